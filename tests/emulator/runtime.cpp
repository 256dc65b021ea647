// Plays a grid of thread blocks on the CPU, one cluster of blocks after the other (a cluster is one block unless the
// launch says otherwise), each thread a fibre that runs until it meets a barrier. A program that is given one emulated
// unit as a shared object, reads a request from stdin, answers on stdout, and ends with a report on stderr at the first
// thing that the machine would not forgive.
//
// An order says which thread goes first and when cp.async copies land; both are free on the machine, so a kernel must
// give the same bytes in every order:
//   0  ascending threads, copies land as late as allowed (a missing wait_group reads stale bytes)
//   1  descending threads, copies land at once (a copy into a buffer that is still being read destroys it)
//   2  threads shuffled anew each round, copies land at random moments
// The blocks of a cluster take their turns in the same order; in 0 and 1 each goes as far as it can before the next one
// begins, so that one is done, or at its next cluster barrier, while another has not even started.
#include <emulator.h>
#include <fibre_context.h>

#include <dlfcn.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace {

using emulator::Site;
using emulator::WarpOperation;

constexpr size_t stack_bytes = 256 * 1024;
constexpr size_t fence_bytes = 1 << 20;
const char* const order_names[] = {"ascending", "descending", "shuffled"};
const char* const warp_names[] = {"__syncwarp", "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync",
                                  "__ballot_sync"};

struct Copy {
    unsigned char* shared;
    int bytes;
    unsigned char data[16];
};

enum State { running, at_block_barrier, at_cluster_barrier, at_warp_operation, finished };

struct Fibre {
    Context context;
    char* stack = nullptr;
    State state = finished;
    Site site{};
    // the warp operation it waits in
    WarpOperation operation{};
    unsigned mask = 0, lane_argument = 0;
    int width = 32;
    unsigned long long posted = 0, received = 0;
    // cp.async groups, oldest first; the last one is open
    std::vector<std::vector<Copy>> groups{1};
};

struct Parameter {
    enum Kind : int64_t { scalar, constant, writable, null } kind;
    size_t bytes;
    std::vector<unsigned char> initial;
    unsigned char* memory = nullptr;
};

struct Warp {
    unsigned exists = 0, waiting = 0, left = 0;  // lanes: of the block, in a warp operation, that have left the kernel
};

// What the blocks of a cluster have each for themselves.
struct Block {
    std::vector<Fibre> fibres;
    std::vector<Warp> warps;
    std::vector<int> turns;  // threads in the order in which they go
    unsigned char* shared = nullptr;
    int waiting = 0, finished = 0;  // threads in __syncthreads, threads that have left the kernel
    int first_waiting = 0;          // the one that has waited longest in __syncthreads
};

std::vector<Block> blocks;  // of the cluster that is being played, by rank
unsigned here = 0;          // the rank of the block that has its turn; the next four are its own
Block* own = nullptr;
Fibre* fibres = nullptr;
Warp* warps = nullptr;
unsigned char* shared = nullptr;
int waiting_at_cluster_barrier = 0, finished_in_cluster = 0;
Site cluster_barrier_site;  // where the first one waits
std::vector<Parameter> parameters;
Context scheduler;
void* scheduler_fake_stack = nullptr;
const void* scheduler_stack = nullptr;
size_t scheduler_stack_bytes = 0;
int current = -1, order = 0;
int64_t grid = 0, block = 0, cluster = 1, shared_bytes = 0;
void (*call)(void** arguments) = nullptr;  // written next to the unit: unpacks the arguments and calls the kernel
void** kernel_arguments = nullptr;
uint64_t random_state = 1;

uint64_t draw() {  // xorshift64*
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 0x2545F4914F6CDD1Dull;
}

void enter(unsigned rank) {
    here = rank;
    own = &blocks[rank];
    fibres = own->fibres.data();
    warps = own->warps.data();
    shared = own->shared;
    blockIdx.x = blockIdx.x / static_cast<unsigned>(cluster) * static_cast<unsigned>(cluster) + rank;
}

// What number a block of this cluster has in the grid.
unsigned number(unsigned rank) { return blockIdx.x - here + rank; }

void say_where() {
    if (current < 0) return;
    fprintf(stderr, "in block %u of %ld, thread %d of %ld, thread order %s\n", blockIdx.x, static_cast<long>(grid),
            current, static_cast<long>(block), order_names[order]);
}

// After a sanitizer's own report: where the address lies, in the kernel's terms.
void say_what() {
    if (__asan_report_present()) {
        const auto* address = static_cast<const unsigned char*>(__asan_get_report_address());
        auto near = [&](const char* what, size_t index, const unsigned char* start, size_t bytes) {
            if (!start || address < start - fence_bytes || address >= start + bytes + fence_bytes) return;
            fprintf(stderr, "emulator: byte %ld of %s %zu, which has %zu bytes\n", static_cast<long>(address - start), what,
                    index, bytes);
        };
        for (size_t i = 0; i < parameters.size(); ++i) near("argument", i, parameters[i].memory, parameters[i].bytes);
        for (unsigned r = 0; r < blocks.size(); ++r) {
            near("shared memory of block", number(r), blocks[r].shared, static_cast<size_t>(shared_bytes));
        }
    }
    say_where();
}

const char* base_name(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

bool same(Site a, Site b) { return a.line == b.line && (a.file == b.file || !strcmp(a.file, b.file)); }

int lowest(unsigned bits) { return __builtin_ctz(bits); }

void land(const Copy& copy) { memcpy(copy.shared, copy.data, static_cast<size_t>(copy.bytes)); }

void land_some(Fibre& fibre) {
    for (auto& group : fibre.groups) {
        auto kept = std::partition(group.begin(), group.end(), [](const Copy&) { return draw() & 1; });
        std::for_each(group.begin(), kept, land);
        group.erase(group.begin(), kept);
    }
}

// NOTE: these two frames are still on the stack when the fibre ends for good; instrumented, they would leave it poisoned
// for the next block. This file is built without the sanitizers.
void leave_fibre(bool for_good) {
    Fibre& self = fibres[current];
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fake_stack, scheduler_stack, scheduler_stack_bytes);
    switch_context(self.context, scheduler);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

void fibre_main() {
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
    call(kernel_arguments);
    Fibre& self = fibres[current];
    self.state = finished;
    warps[current / 32].left |= 1u << current % 32;
    ++own->finished;
    ++finished_in_cluster;
    leave_fibre(true);
}

void resume(int thread) {
    Fibre& fibre = fibres[thread];
    current = thread;
    const unsigned x = static_cast<unsigned>(thread);
    threadIdx = make_uint3(x, 0, 0);
    if (order == 2) land_some(fibre);
    __sanitizer_start_switch_fiber(&scheduler_fake_stack, fibre.stack, stack_bytes);
    switch_context(scheduler, fibre.context);
    __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
    current = -1;
}

[[noreturn]] void die() {
    fflush(stderr);
    _exit(86);
}

[[noreturn]] void report_stuck() {
    fprintf(stderr, "emulator: the %s is stuck: no thread can go on\n", cluster > 1 ? "cluster" : "block");
    current = 0;
    say_where();
    current = -1;
    int shown = 0;
    for (int i = 0; i < cluster * block && shown < 24; ++i) {
        const int rank = i / static_cast<int>(block), thread = i % static_cast<int>(block);
        const Fibre& f = blocks[static_cast<size_t>(rank)].fibres[static_cast<size_t>(thread)];
        if (thread > 0) {  // one line for each run of threads in the same place
            const Fibre& b = (&f)[-1];
            if (b.state == f.state && (f.state == finished || b.site.line == f.site.line)) continue;
        }
        ++shown;
        fprintf(stderr, "  from thread %d", thread);
        if (cluster > 1) fprintf(stderr, " of block %u", number(static_cast<unsigned>(rank)));
        if (f.state == finished) {
            fprintf(stderr, ": has left the kernel\n");
            continue;
        }
        fprintf(stderr, ": waits in ");
        if (f.state == at_warp_operation) fprintf(stderr, "%s with mask %08x", warp_names[f.operation], f.mask);
        else fprintf(stderr, f.state == at_block_barrier ? "__syncthreads" : "cluster_barrier");
        fprintf(stderr, " at %s:%d\n", base_name(f.site.file), f.site.line);
    }
    die();
}

// NOTE: the machine lets threads leave before a barrier that the others meet. The project does not: a kernel that needs
// this cannot tell it from a forgotten thread.
void look_who_left() {
    const auto find = [](const Block& in, State state) {
        int thread = 0;
        while (thread < block && in.fibres[static_cast<size_t>(thread)].state != state) ++thread;
        return thread;
    };
    if (own->finished > 0 && own->waiting > 0) {
        const int gone = find(*own, finished), waits = find(*own, at_block_barrier);
        emulator::fail(fibres[waits].site,
                       "barrier divergence: thread %d waits in __syncthreads, thread %d has left the kernel", waits, gone);
    }
    if (finished_in_cluster > 0 && waiting_at_cluster_barrier > 0) {
        unsigned from = 0, in = 0;
        while (find(blocks[from], finished) == block) ++from;
        while (find(blocks[in], at_cluster_barrier) == block) ++in;
        emulator::fail(cluster_barrier_site,
                       "barrier divergence: thread %d of block %u waits in cluster_barrier, "
                       "thread %d of block %u has left the kernel",
                       find(blocks[in], at_cluster_barrier), number(in), find(blocks[from], finished), number(from));
    }
}

// After every step of every thread, hence in two parts.
inline void check_nobody_left() {
    if (finished_in_cluster > 0) look_who_left();
}

// Memory of exactly `bytes` bytes, 256-byte aligned plus `offset`, between two fences that no access may touch.
unsigned char* fenced(size_t bytes, size_t offset) {
    const size_t body = (bytes + offset + 255) / 256 * 256;
    auto* base = static_cast<unsigned char*>(aligned_alloc(256, 2 * fence_bytes + body));
    if (!base) {
        fprintf(stderr, "emulator: out of memory: %zu bytes\n", bytes);
        die();
    }
    unsigned char* start = base + fence_bytes + offset;
    __asan_poison_memory_region(base, fence_bytes + offset);
    __asan_poison_memory_region(start + bytes, base + 2 * fence_bytes + body - (start + bytes));
    return start;
}

template <typename Iterator>
void shuffle(Iterator begin, Iterator end) {
    for (long i = end - begin - 1; i > 0; --i) {
        std::swap(begin[i], begin[static_cast<long>(draw() % static_cast<uint64_t>(i + 1))]);
    }
}

void start_block(Block& b) {
    if (shared_bytes > 0) memset(b.shared, 0xff, static_cast<size_t>(shared_bytes));  // all ones is a NaN
    b.waiting = b.finished = 0;
    b.warps.assign(static_cast<size_t>(block + 31) / 32, {});
    for (int thread = 0; thread < block; ++thread) b.warps[static_cast<size_t>(thread / 32)].exists |= 1u << thread % 32;
    for (auto& fibre : b.fibres) {
        fibre.state = running;
        fibre.groups.assign(1, {});
        make_context(fibre.context, fibre.stack, stack_bytes, fibre_main);
    }
    b.turns.resize(static_cast<size_t>(block));
    std::iota(b.turns.begin(), b.turns.end(), 0);
    if (order == 1) std::reverse(b.turns.begin(), b.turns.end());
}

// Lets the threads of the block that was entered go on; false when none could.
bool play() {
    // A warp goes as far as it can before the next one has its turn, so warps drift apart as far as barriers let them;
    // in the shuffled order single threads do, and the blocks of a cluster are handed the turn after each round.
    const int64_t chunk = order == 2 ? block : 32;
    bool progress = false;
    for (int64_t first = 0; first < block; first += chunk) {
        const auto begin = own->turns.begin() + first, end = own->turns.begin() + std::min(first + chunk, block);
        for (bool again = true; again;) {
            again = false;
            if (order == 2) shuffle(begin, end);
            for (auto thread = begin; thread != end; ++thread) {
                if (fibres[*thread].state != running) continue;
                again = progress = true;
                resume(*thread);
                check_nobody_left();
            }
            if (order == 2 && cluster > 1) break;
        }
    }
    return progress;
}

// The cluster that begins with block `first` of the grid.
void run_cluster(int64_t first) {
    blockIdx = make_uint3(static_cast<unsigned>(first), 0, 0);
    waiting_at_cluster_barrier = finished_in_cluster = 0;
    std::vector<unsigned> ranks(blocks.size());
    std::iota(ranks.begin(), ranks.end(), 0u);
    if (order == 1) std::reverse(ranks.begin(), ranks.end());
    for (Block& b : blocks) start_block(b);
    while (finished_in_cluster < cluster * block) {
        bool progress = false;
        if (order == 2) shuffle(ranks.begin(), ranks.end());
        for (const unsigned rank : ranks) {
            enter(rank);
            while (own->finished < block && play()) {
                progress = true;
                if (order == 2 && cluster > 1) break;
            }
        }
        if (!progress) report_stuck();
    }
}

void read_exactly(void* into, size_t bytes) {
    if (fread(into, 1, bytes, stdin) != bytes) {
        fprintf(stderr, "emulator: the request ends early\n");
        die();
    }
}

int64_t read_number() {
    int64_t value;
    read_exactly(&value, sizeof value);
    return value;
}

}  // namespace

namespace emulator {

void fail(Site site, const char* format, ...) {
    fprintf(stderr, "emulator: ");
    va_list values;
    va_start(values, format);
    vfprintf(stderr, format, values);
    va_end(values);
    fprintf(stderr, "\n  at %s:%d\n", base_name(site.file), site.line);
    say_where();
    if (current >= 0) __sanitizer_print_stack_trace();
    die();
}

void block_barrier(Site site) {
    Fibre& self = fibres[current];
    self.state = at_block_barrier;
    self.site = site;
    ++own->waiting;
    check_nobody_left();
    if (own->waiting == 1) own->first_waiting = current;
    const Site other = fibres[own->first_waiting].site;
    if (!same(other, site)) {
        fail(site, "barrier divergence: thread %d waits in another __syncthreads, at %s:%d", own->first_waiting,
             base_name(other.file), other.line);
    }
    if (own->waiting == block) {
        own->waiting = 0;
        for (auto& fibre : own->fibres) fibre.state = running;
    }
    leave_fibre(false);
}

unsigned cluster_rank() { return here; }

void cluster_barrier(Site site) {
    Fibre& self = fibres[current];
    self.state = at_cluster_barrier;
    self.site = site;
    if (++waiting_at_cluster_barrier == 1) cluster_barrier_site = site;
    check_nobody_left();
    if (!same(cluster_barrier_site, site)) {
        fail(site, "barrier divergence: a thread of the cluster waits in another cluster_barrier, at %s:%d",
             base_name(cluster_barrier_site.file), cluster_barrier_site.line);
    }
    if (waiting_at_cluster_barrier == cluster * block) {
        waiting_at_cluster_barrier = 0;
        for (Block& b : blocks) {
            for (auto& fibre : b.fibres) fibre.state = running;
        }
    }
    leave_fibre(false);
}

float cluster_load(const float* pointer, unsigned rank, Site site) {
    const long offset = reinterpret_cast<const unsigned char*>(pointer) - ::shared;
    if (offset < 0 || offset + 4 > shared_bytes) {
        fail(site, "cluster_load: reads shared bytes %ld to %ld of %ld", offset, offset + 4, static_cast<long>(shared_bytes));
    }
    if (offset % 4) fail(site, "cluster_load: shared byte %ld is misaligned", offset);
    if (rank >= blocks.size()) fail(site, "cluster_load: rank %u of a cluster of %zu", rank, blocks.size());
    if (blocks[rank].finished == block) {
        fail(site, "cluster_load: block %u, rank %u, has left the kernel, and its shared memory with it", number(rank), rank);
    }
    float value;
    memcpy(&value, blocks[rank].shared + offset, sizeof value);
    return value;
}

unsigned long long warp_exchange(WarpOperation operation, unsigned mask, unsigned long long value, unsigned lane_argument,
                                 int width, Site site) {
    const int first = current / 32 * 32, lane = current % 32;
    Fibre& self = fibres[current];
    const char* name = warp_names[operation];
    if (!(mask >> lane & 1)) fail(site, "%s: lane %d calls it with mask %08x, which does not name it", name, lane, mask);
    if (width < 1 || width > 32 || (width & (width - 1))) fail(site, "%s: width %d is no power of two up to 32", name, width);
    Warp& warp = warps[current / 32];
    if (mask & ~warp.exists) {
        fail(site, "%s: mask %08x names lane %d, which the block does not have", name, mask, lowest(mask & ~warp.exists));
    }
    if (mask & warp.left) {
        fail(site, "%s: mask %08x names lane %d, which has left the kernel", name, mask, lowest(mask & warp.left));
    }
    self.state = at_warp_operation;
    self.site = site;
    self.operation = operation;
    self.mask = mask;
    self.lane_argument = lane_argument;
    self.width = width;
    self.posted = value;
    // One of those that wait will do: they have been held against each other.
    if (const unsigned others = warp.waiting & mask) {
        const int i = lowest(others);
        const Fibre& other = fibres[first + i];
        if (other.mask != mask || other.operation != operation || !same(other.site, site)) {
            fail(site, "warp divergence: lane %d is here in %s with mask %08x, lane %d in %s with mask %08x at %s:%d", lane,
                 name, mask, i, warp_names[other.operation], other.mask, base_name(other.site.file), other.site.line);
        }
    }
    warp.waiting |= 1u << lane;
    if ((warp.waiting & mask) == mask) {
        warp.waiting &= ~mask;
        unsigned votes = 0;
        for (int i = 0; i < 32; ++i) {
            if (mask >> i & 1) votes |= static_cast<unsigned>(fibres[first + i].posted != 0) << i;
        }
        for (int i = 0; i < 32; ++i) {
            if (!(mask >> i & 1)) continue;
            Fibre& other = fibres[first + i];
            const int w = other.width, segment = i & ~(w - 1);
            const int64_t argument = other.lane_argument;
            int64_t from = i;
            if (operation == shuffle_index) from = segment | (argument & (w - 1));
            if (operation == shuffle_up && i - argument >= segment) from = i - argument;
            if (operation == shuffle_down && i + argument < segment + w) from = i + argument;
            if (operation == shuffle_xor && (i ^ argument) < segment + w) from = i ^ argument;
            if (!(mask >> from & 1)) {
                fail(site, "%s: lane %d reads lane %d, which mask %08x does not name", name, i, static_cast<int>(from), mask);
            }
            other.received = operation == ballot ? votes : fibres[first + from].posted;
            other.state = running;
        }
    }
    leave_fibre(false);
    return self.received;
}

unsigned running_lanes() {
    const Warp& warp = warps[current / 32];
    return warp.exists & ~warp.left;
}

unsigned char* shared_memory() { return ::shared; }

unsigned shared_address(const void* pointer, Site site) {
    const auto* p = static_cast<const unsigned char*>(pointer);
    if (p < ::shared || p >= ::shared + shared_bytes) fail(site, "shared_address: not a pointer into shared memory");
    return static_cast<unsigned>(p - ::shared);
}

void cp_async(void* to, const void* from, int bytes, bool valid, Site site) {
    auto* s = static_cast<unsigned char*>(to);
    const auto alignment = static_cast<uintptr_t>(bytes - 1);
    const long offset = s - ::shared;
    if (offset < 0 || offset + bytes > shared_bytes) {
        fail(site, "cp_async_%d: writes shared bytes %ld to %ld of %ld", bytes, offset, offset + bytes,
             static_cast<long>(shared_bytes));
    }
    if (reinterpret_cast<uintptr_t>(s) & alignment) fail(site, "cp_async_%d: shared byte %ld is misaligned", bytes, offset);
    if (reinterpret_cast<uintptr_t>(from) & alignment) fail(site, "cp_async_%d: global address %p is misaligned", bytes, from);
    Copy copy{s, bytes, {}};
    if (valid) memcpy(copy.data, from, static_cast<size_t>(bytes));
    if (order == 1) land(copy);
    else fibres[current].groups.back().push_back(copy);
}

void cp_async_commit_group() { fibres[current].groups.emplace_back(); }

void cp_async_wait_group(int pending) {
    // The open group has not been committed and is not waited for.
    auto& groups = fibres[current].groups;
    while (groups.size() > static_cast<size_t>(pending) + 1) {
        for (const Copy& copy : groups.front()) land(copy);
        groups.erase(groups.begin());
    }
}

}  // namespace emulator

int main(int, char** argv) {
    // Linked against nothing, so that linking it costs next to nothing; all that it calls must be found here and now.
    void* unit = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    call = unit ? reinterpret_cast<void (*)(void**)>(dlsym(unit, "emulator_call")) : nullptr;
    if (!call) {
        fprintf(stderr, "emulator: %s\n", dlerror());
        _exit(85);
    }
    const int answer = dup(1);  // what a kernel prints must not end up in the answer
    dup2(2, 1);
    __sanitizer_set_death_callback(say_what);

    grid = read_number();
    block = read_number();
    cluster = read_number();
    shared_bytes = read_number();
    std::vector<int> orders(static_cast<size_t>(read_number()));
    for (int& o : orders) o = static_cast<int>(read_number());
    parameters.resize(static_cast<size_t>(read_number()));
    std::vector<void*> arguments;
    for (auto& p : parameters) {
        p.kind = static_cast<Parameter::Kind>(read_number());
        p.bytes = static_cast<size_t>(read_number());
        const auto offset = static_cast<size_t>(read_number());
        p.initial.resize(p.bytes);
        read_exactly(p.initial.data(), p.bytes);
        if (p.kind == Parameter::constant || p.kind == Parameter::writable) p.memory = fenced(p.bytes, offset);
    }
    for (auto& p : parameters) {
        arguments.push_back(p.kind == Parameter::scalar ? static_cast<void*>(p.initial.data()) : &p.memory);
    }
    kernel_arguments = arguments.data();

    if (cluster < 1 || cluster > 8 || grid % cluster) {
        fprintf(stderr, "emulator: a grid of %ld blocks in clusters of %ld; a cluster has 1 to 8 and divides the grid\n",
                static_cast<long>(grid), static_cast<long>(cluster));
        die();
    }
    blocks.resize(static_cast<size_t>(cluster));
    for (auto& b : blocks) {
        b.shared = fenced(static_cast<size_t>(shared_bytes), 0);
        b.fibres.resize(static_cast<size_t>(block));
        for (auto& fibre : b.fibres) {
            // one page below each stack stays unmapped to catch a stack that overflows
            auto* base = static_cast<char*>(mmap(nullptr, stack_bytes + 4096, PROT_READ | PROT_WRITE,
                                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
            if (base == MAP_FAILED) {
                fprintf(stderr, "emulator: no memory for %ld stacks\n", static_cast<long>(cluster * block));
                die();
            }
            mprotect(base, 4096, PROT_NONE);
            fibre.stack = base + 4096;
        }
    }
    blockDim = dim3(static_cast<unsigned>(block));
    gridDim = dim3(static_cast<unsigned>(grid));

    FILE* out = fdopen(answer, "wb");
    for (int o : orders) {
        order = o;
        random_state = 0x9E3779B97F4A7C15ull;
        for (auto& p : parameters) {
            if (p.memory) memcpy(p.memory, p.initial.data(), p.bytes);
        }
        for (int64_t i = 0; i < grid; i += cluster) run_cluster(o == 1 ? grid - cluster - i : i);
        for (auto& p : parameters) {
            if (p.kind == Parameter::constant && memcmp(p.memory, p.initial.data(), p.bytes) != 0) {
                fprintf(stderr, "emulator: the kernel wrote to an argument that it takes as const\n");
                die();
            }
            if (p.kind == Parameter::writable) fwrite(p.memory, 1, p.bytes, out);
        }
    }
    fclose(out);
    fflush(stderr);
    _exit(0);
}
