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
// Bulk copies do the same (bulk.cpp); as late as allowed is when nobody can go on without them.
// In 0 the first warp that can go on does, in 1 the last: between them, each warp is as far ahead of each other one as
// barriers permit, and as far behind.
// The blocks of a cluster take their turns in the same order; in 0 and 1 each goes as far as it can before the next one
// begins, so that one is done, or at its next cluster barrier, while another has not even started.
#include <runtime.h>

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
#include <new>
#include <numeric>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// What the machine keeps for itself is not under test, and the sanitizer's allocator took a quarter of the time. Free
// pieces of each power of two form a list; a piece lies behind the number of its list.
namespace {
struct Piece {
    Piece* next;
};
constexpr size_t piece_head = 16, arena_bytes = 1 << 20;
Piece* free_pieces[64];
char *arena = nullptr, *arena_end = nullptr;
}  // namespace

void* operator new(size_t bytes) {
    const int list = 64 - __builtin_clzll((bytes + piece_head - 1) | 31);
    if (Piece* piece = free_pieces[list]) {
        free_pieces[list] = piece->next;
        return piece;
    }
    const size_t size = size_t{1} << list;
    if (arena_end - arena < static_cast<long>(size)) {
        const size_t more = std::max(size, arena_bytes);
        arena = static_cast<char*>(mmap(nullptr, more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (arena == MAP_FAILED) abort();
        arena_end = arena + more;
    }
    *reinterpret_cast<int*>(arena) = list;
    arena += size;
    return arena - size + piece_head;
}

void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return operator new(bytes); }

void operator delete(void* pointer) noexcept {
    if (!pointer) return;
    const int list = *reinterpret_cast<int*>(static_cast<char*>(pointer) - piece_head);
    auto* piece = static_cast<Piece*>(pointer);
    piece->next = free_pieces[list];
    free_pieces[list] = piece;
}

void operator delete(void* pointer, size_t) noexcept { operator delete(pointer); }

namespace machine {

std::vector<Block> blocks;
unsigned here = 0;
Block* own = nullptr;
Fibre* fibres = nullptr;
Warp* warps = nullptr;
unsigned char* shared = nullptr;
int waiting_at_cluster_barrier = 0, finished_in_cluster = 0;
Site cluster_barrier_site;
int current = -1, order = 0;
int64_t grid = 0, block = 0, cluster = 1, shared_bytes = 0;
bool released = false;

}  // namespace machine

using namespace machine;

namespace {

constexpr size_t stack_bytes = 256 * 1024;
constexpr size_t fence_bytes = 1 << 20;
const char* const order_names[] = {"ascending", "descending", "shuffled"};

struct Parameter {
    enum Kind : int64_t { scalar, constant, writable, null, tensor_map, same } kind;
    size_t bytes;
    std::vector<unsigned char> initial;
    size_t array = 0;  // which parameter a tensor map describes, or is the same array
    bool hidden = false;  // an earlier launch of the plan writes it, and this one may run while that still does
    unsigned char* memory = nullptr;
};

std::vector<Parameter> parameters;
Context scheduler;
void (*call)(void** arguments) = nullptr;  // written next to the unit: unpacks the arguments and calls the kernel
void** kernel_arguments = nullptr;
uint64_t random_state = 1;
int64_t fruitless = 0;  // rounds in which threads did nothing but look at mbarriers, in vain
constexpr int64_t most_fruitless = 10000;

uint64_t draw() {  // xorshift64*
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 0x2545F4914F6CDD1Dull;
}

bool draw_bit() { return draw() & 1; }

void enter(unsigned rank) {
    here = rank;
    own = &blocks[rank];
    fibres = own->fibres.data();
    warps = own->warps.data();
    shared = own->shared;
    blockIdx.x = blockIdx.x / static_cast<unsigned>(cluster) * static_cast<unsigned>(cluster) + rank;
}

}  // namespace

namespace machine {

unsigned number(unsigned rank) { return blockIdx.x - here + rank; }

void say_where() {
    if (current < 0) return;
    fprintf(stderr, "in block %u of %ld, thread %d of %ld, thread order %s\n", blockIdx.x, static_cast<long>(grid),
            current, static_cast<long>(block), order_names[order]);
}

const char* base_name(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

// NOTE: this frame and its caller's are still on the stack when the fibre ends for good; instrumented, they would leave it
// poisoned for the next block. This file is built without the sanitizers.
void leave_fibre() { switch_context(fibres[current].context, scheduler); }

// The sanitizer hears of a fibre's stack when there is something to report; at every step that took a tenth of the time.
void show_stack() {
    static bool shown = false;
    if (shown || current < 0) return;
    shown = true;
    __sanitizer_start_switch_fiber(nullptr, fibres[current].stack, stack_bytes);
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
}

Visit::Visit(unsigned rank, const char* what, Site site) : home(here) {
    if (rank >= blocks.size()) emulator::fail(site, "%s: rank %u of a cluster of %zu", what, rank, blocks.size());
    if (blocks[rank].finished == block) {
        emulator::fail(site, "%s: block %u, rank %u, has left the kernel, and its shared memory with it", what, number(rank),
                       rank);
    }
    enter(rank);
}
Visit::~Visit() { enter(home); }
void* Visit::there(void* pointer) const { return shared + (static_cast<unsigned char*>(pointer) - blocks[home].shared); }

[[noreturn]] void die() {
    fflush(stderr);
    _exit(86);
}

}  // namespace machine

// Hooks of the sanitizers: both are about to report; and what does not return ends the program, so no stack need be cleaned.
extern "C" __attribute__((visibility("default"))) void __asan_on_error() { show_stack(); }
extern "C" __attribute__((visibility("default"))) void __ubsan_on_report() { show_stack(); }
extern "C" __attribute__((visibility("default"))) void __asan_handle_no_return() {}

namespace {

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
        say_async(address);
        say_products(address);
    }
    say_where();
}

void land_some(Fibre& fibre) {
    for (auto& group : fibre.groups) {
        auto kept = std::partition(group.begin(), group.end(), [](const Copy&) { return draw() & 1; });
        std::for_each(group.begin(), kept, [](const Copy& copy) { land(copy); });
        group.erase(group.begin(), kept);
    }
}

void fibre_main() {
    call(kernel_arguments);
    leave_kernel();
    leave_fibre();
}

void resume(int thread) {
    Fibre& fibre = fibres[thread];
    if (order == 2) move_some(*own, draw_bit);
    current = thread;
    const unsigned x = static_cast<unsigned>(thread);
    threadIdx = make_uint3(x, 0, 0);
    if (order == 2) land_some(fibre);
    switch_context(scheduler, fibre.context);
    current = -1;
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
            const bool alike = (f.state != at_named_barrier || b.call.number == f.call.number) &&
                               (f.state != at_mbarrier || b.mbarrier == f.mbarrier);
            if (b.state == f.state && (f.state == finished || (b.site.line == f.site.line && alike))) continue;
        }
        ++shown;
        fprintf(stderr, "  from thread %d", thread);
        if (cluster > 1) fprintf(stderr, " of block %u", number(static_cast<unsigned>(rank)));
        if (f.state == finished) {
            fprintf(stderr, ": has left the kernel\n");
            continue;
        }
        fprintf(stderr, f.state == polling ? ": looks again and again" : ": waits in ");
        if (f.state == at_warp_operation) fprintf(stderr, "%s with mask %08x", warp_names[f.operation], f.mask);
        else if (f.state == at_named_barrier) fprintf(stderr, "%s", Name(f.call).text);
        else if (f.state == at_mbarrier) fprintf(stderr, "mbarrier_wait_parity(byte %ld, %u)", f.mbarrier, f.parity);
        else if (f.state == at_products) fprintf(stderr, "wgmma_wait_group");
        else if (f.state != polling) fprintf(stderr, f.state == at_block_barrier ? "__syncthreads" : "cluster_barrier");
        fprintf(stderr, " at %s:%d\n", base_name(f.site.file), f.site.line);
    }
    for (unsigned rank = 0; rank < blocks.size(); ++rank) {
        for (int i = 0; i < barrier_count; ++i) {
            const Barrier& b = blocks[rank].barriers[i];
            if (!b.arrived) continue;
            fprintf(stderr, "  at barrier %d of block %u: %d of %d threads\n", i, number(rank),
                    32 * __builtin_popcount(b.arrived), b.first.threads);
        }
    }
    say_barriers();
    die();
}

// Memory of exactly `bytes` bytes, aligned plus `offset`, between two fences that no access may touch.
unsigned char* fenced(size_t bytes, size_t offset, size_t alignment = 256) {
    const size_t body = (bytes + offset + alignment - 1) / alignment * alignment;
    auto* base = static_cast<unsigned char*>(aligned_alloc(alignment, 2 * fence_bytes + body));
    if (!base) {
        fprintf(stderr, "emulator: out of memory: %zu bytes\n", bytes);
        die();
    }
    unsigned char* start = base + fence_bytes + offset;
    __asan_poison_memory_region(base, fence_bytes + offset);
    __asan_poison_memory_region(start + bytes, base + 2 * fence_bytes + body - (start + bytes));
    return start;
}

// A tensor map as a kernel takes it: by value, with its array's place in it.
void place(Parameter& p) {
    MapSpec map;
    memcpy(&map, p.initial.data(), sizeof map);
    const Parameter& array = parameters[p.array];
    map.pointer = array.memory;
    map.bytes = array.bytes;
    if (!map.pointer || reinterpret_cast<uintptr_t>(map.pointer) % 16) {
        fprintf(stderr, "emulator: %s: its array is null, or not aligned to 16 bytes\n", map.name);
        die();
    }
    p.memory = static_cast<unsigned char*>(aligned_alloc(64, sizeof map));
    memcpy(p.memory, &map, sizeof map);
}

template <typename Iterator>
void shuffle(Iterator begin, Iterator end) {
    for (long i = end - begin - 1; i > 0; --i) {
        std::swap(begin[i], begin[static_cast<long>(draw() % static_cast<uint64_t>(i + 1))]);
    }
}

void start_block(Block& b) {
    start_async(b);
    if (shared_bytes > 0) memset(b.shared, 0xff, static_cast<size_t>(shared_bytes));  // all ones is a NaN
    b.waiting = b.finished = 0;
    b.pools.assign(static_cast<size_t>(block + 127) / 128, {});
    b.warps.assign(static_cast<size_t>(block + 31) / 32, {});
    b.warpgroups.assign(static_cast<size_t>(block + 127) / 128, {});
    for (int thread = 0; thread < block; ++thread) b.warps[static_cast<size_t>(thread / 32)].exists |= 1u << thread % 32;
    for (auto& fibre : b.fibres) {
        fibre.state = running;
        fibre.barrier_calls = fibre.register_calls = 0;
        fibre.groups.assign(1, {});
        fibre.stores.assign(1, {});
        fibre.mbarrier = -1;
        fibre.products = {};
        make_context(fibre.context, fibre.stack, stack_bytes, fibre_main);
    }
    b.turns.resize(static_cast<size_t>(block));
    std::iota(b.turns.begin(), b.turns.end(), 0);
    if (order == 1) std::reverse(b.turns.begin(), b.turns.end());
}

// Lets the threads of the block that was entered go on; false when none could.
bool play() {
    // A warp goes as far as it can before the next one has its turn, and takes the turn back as soon as a barrier lets it
    // go on: the first one is as far ahead as barriers permit, the last one as far behind, and in the other order the
    // other way round. In the shuffled order threads go one by one, and the blocks of a cluster are handed the turn after
    // each round.
    const int64_t chunk = order == 2 ? block : 32;
    bool progress = false;
    for (int64_t first = 0; first < block;) {
        const auto begin = own->turns.begin() + first, end = own->turns.begin() + std::min(first + chunk, block);
        released = false;
        for (bool again = true; again && !released;) {
            again = false;
            if (order == 2) shuffle(begin, end);
            for (auto thread = begin; thread != end && !released; ++thread) {
                if (fibres[*thread].state != running) continue;
                again = progress = true;
                resume(*thread);
                check_nobody_left();
            }
            if (order == 2 && cluster > 1) break;
        }
        first = released ? 0 : first + chunk;
    }
    return progress;
}

// No thread can go on: lands a copy that may be waited for, and lets those who look at an mbarrier look again. False when
// nothing of that helps.
bool wake() {
    static int64_t completed = 0;
    const bool landed = land_next();
    fruitless = landed || completed != phases_completed ? 0 : fruitless + 1;
    completed = phases_completed;
    if (fruitless == most_fruitless) return false;
    bool looks = false;
    for (Block& b : blocks) {
        for (Fibre& fibre : b.fibres) {
            if (fibre.state != polling) continue;
            fibre.state = running;
            looks = true;
        }
    }
    return landed || looks;
}

// What earlier launches write: out of reach until a thread of the cluster has waited for their end.
bool away = false;
void hide(bool hidden) {
    away = hidden;
    for (const Parameter& p : parameters) {
        if (!p.hidden) continue;
        if (away) __asan_poison_memory_region(p.memory, p.bytes);
        else __asan_unpoison_memory_region(p.memory, p.bytes);
    }
}

// The cluster that begins with block `first` of the grid.
void run_cluster(int64_t first) {
    hide(true);
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
        if (!progress && !wake()) report_stuck();
    }
    hide(false);
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

namespace machine {

void check_array(const unsigned char* pointer, size_t bytes, const char* what, Site site) {
    for (size_t i = 0; i < parameters.size(); ++i) {
        const Parameter& p = parameters[i];
        if (p.kind == Parameter::tensor_map || p.kind == Parameter::same || !p.memory) continue;
        const long at = pointer - p.memory;
        if (at >= 0 && at + bytes <= p.bytes) {
            // Copies are not made by instrumented code.
            if (p.hidden && away)
                emulator::fail(site, "%s: of argument %zu, which launches before this one may still write: no wait for them", what, i);
            return;
        }
        if (at < -static_cast<long>(fence_bytes) || at >= static_cast<long>(p.bytes + fence_bytes)) continue;
        emulator::fail(site, "%s: takes bytes %ld to %ld of argument %zu, which has %zu bytes", what, at,
                       at + static_cast<long>(bytes), i, p.bytes);
    }
    emulator::fail(site, "%s: global address %p lies in no argument", what, static_cast<const void*>(pointer));
}

}  // namespace machine

namespace emulator {

void wait_for_launches() { hide(false); }

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
        const int64_t kind = read_number();
        p.kind = static_cast<Parameter::Kind>(kind % 8);
        p.hidden = kind >= 8;
        p.bytes = static_cast<size_t>(read_number());
        const auto offset = static_cast<size_t>(read_number());
        p.initial.resize(p.bytes);
        read_exactly(p.initial.data(), p.bytes);
        if (p.kind == Parameter::constant || p.kind == Parameter::writable) p.memory = fenced(p.bytes, offset);
        if (p.kind == Parameter::tensor_map || p.kind == Parameter::same) p.array = offset;
    }
    for (auto& p : parameters) {
        if (p.kind == Parameter::tensor_map) place(p);
        if (p.kind == Parameter::same) p.memory = parameters[p.array].memory;
    }
    for (auto& p : parameters) {
        const bool by_value = p.kind == Parameter::scalar || p.kind == Parameter::tensor_map;
        arguments.push_back(!by_value ? &p.memory : p.memory ? p.memory : static_cast<void*>(p.initial.data()));
    }
    kernel_arguments = arguments.data();

    if (block < 1 || block > 1024) {
        fprintf(stderr, "emulator: a block of %ld threads; a block has 1 to 1024\n", static_cast<long>(block));
        die();
    }
    if (cluster < 1 || cluster > 16 || grid % cluster) {
        fprintf(stderr, "emulator: a grid of %ld blocks in clusters of %ld; a cluster has 1 to 16 and divides the grid\n",
                static_cast<long>(grid), static_cast<long>(cluster));
        die();
    }
    blocks.resize(static_cast<size_t>(cluster));
    for (auto& b : blocks) {
        b.shared = fenced(static_cast<size_t>(shared_bytes), 0, 1024);
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
            if (p.memory && p.kind != Parameter::tensor_map) memcpy(p.memory, p.initial.data(), p.bytes);
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
