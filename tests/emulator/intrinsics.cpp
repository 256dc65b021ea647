// What a kernel calls: barriers, warp operations, register pools, copies, shared memory. Each call is held against the
// rules of the PTX manual and those of the project, and ends the program with a report where it breaks one.
#include <runtime.h>

#include <sanitizer/common_interface_defs.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>

using namespace machine;

namespace {

bool same(Site a, Site b) { return a.line == b.line && (a.file == b.file || !strcmp(a.file, b.file)); }

int lowest(unsigned bits) { return __builtin_ctz(bits); }

int lanes(int warp) { return __builtin_popcount(warps[warp].exists); }

int threads_at(const Barrier& barrier) { return 32 * __builtin_popcount(barrier.arrived); }

// In the shuffled order everyone has its turn soon enough.
void hand_back_turn() { released = order != 2; }

// The thread that has its turn makes a call of a group, `count` threads from `first` on; true if it is the last one to.
bool join(Group& group, int64_t& made, const Call& call, int first, int count) {
    const auto index = static_cast<size_t>(made++ - group.closed);
    if (index == group.open.size()) {
        for (int thread = first; thread < first + count; ++thread) {
            if (fibres[thread].state != finished) continue;
            emulator::fail(call.site, "warp divergence: thread %d is in %s, thread %d has left the kernel", current,
                           Name(call).text, thread);
        }
        group.open.push_back(call);
    }
    Call& open = group.open[index];
    if (open.kind != call.kind || open.number != call.number || open.threads != call.threads || !same(open.site, call.site)) {
        emulator::fail(call.site, "warp divergence: thread %d is in %s, thread %d in %s at %s:%d", current, Name(call).text,
                       open.caller, Name(open).text, base_name(open.site.file), open.site.line);
    }
    if (++open.made < count) return false;
    // Whoever has made this call has made those before it: they are gone.
    group.open.erase(group.open.begin());
    ++group.closed;
    return true;
}

// setmaxnreg shares out what the block was launched with: the same number for all threads, a multiple of 8. Whoever asks
// for more waits for ever. NOTE: as if the launch bounds let one block have the whole multiprocessor.
void check_registers_suffice() {
    const int launched = static_cast<int>(std::min<int64_t>(65536 / block / 8 * 8, 256));
    int asked = 0;
    const Call* most = nullptr;
    for (const Pool& pool : own->pools) {
        asked += pool.registers ? pool.registers : launched;
        if (pool.registers && (!most || pool.registers > most->number)) most = &pool.last;
    }
    const int there = launched * static_cast<int>(own->pools.size());
    if (!most || asked <= there) return;
    emulator::fail(most->site, "%s: the block asks for %d registers in its %zu groups of four warps and was launched with %d, "
                   "%d for each", Name(*most).text, asked, own->pools.size(), there, launched);
}

// Looks whether the thread that leaves the kernel has made every call that another one of the group has.
void check_none_missed(const Group& group, int64_t made) {
    const auto index = static_cast<size_t>(made - group.closed);
    if (index == group.open.size()) return;
    const Call& call = group.open[index];
    emulator::fail(call.site, "warp divergence: thread %d is in %s, thread %d has left the kernel", call.caller,
                   Name(call).text, current);
}

// The warp of the thread that has its turn arrives, whole; true if the barrier is complete and starts anew.
bool arrive(const Call& call) {
    Barrier& barrier = own->barriers[call.number];
    const unsigned warp = 1u << current / 32;
    if (call.number == 0 && own->waiting > 0) {
        const Site other = fibres[own->first_waiting].site;
        emulator::fail(call.site, "barrier divergence: thread %d is in %s, thread %d in __syncthreads, which is barrier 0, "
                       "at %s:%d", current, Name(call).text, own->first_waiting, base_name(other.file), other.line);
    }
    if (!barrier.arrived) barrier.first = call;
    const Call& first = barrier.first;
    if (barrier.arrived & warp) {
        emulator::fail(call.site, "barrier %d: thread %d arrives a second time, when %d of %d threads have arrived",
                       call.number, current, threads_at(barrier), first.threads);
    }
    if (first.threads != call.threads) {
        emulator::fail(call.site, "barrier divergence: thread %d is in %s, thread %d in %s at %s:%d", current,
                       Name(call).text, first.caller, Name(first).text, base_name(first.site.file), first.site.line);
    }
    barrier.arrived |= warp;
    if (call.kind == Call::barrier_sync) barrier.waiting |= warp;
    if (threads_at(barrier) < call.threads) return false;
    for (unsigned rest = barrier.waiting; rest; rest &= rest - 1) {
        const int w = lowest(rest);
        for (int lane = 0; lane < lanes(w); ++lane) fibres[w * 32 + lane].state = running;
    }
    barrier = {};
    hand_back_turn();
    return true;
}

}  // namespace

namespace machine {

const char* const warp_names[] = {"__syncwarp", "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync",
                                  "__ballot_sync", "ldmatrix", "mma"};

Name::Name(const Call& call) {
    const char* const formats[] = {"barrier_sync(%d, %d)", "barrier_arrive(%d, %d)", "set_registers_up<%d>()",
                                   "set_registers_down<%d>()"};
    snprintf(text, sizeof text, formats[call.kind], call.number, call.threads);
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

void leave_kernel() {
    Fibre& self = fibres[current];
    self.state = finished;
    Warp& warp = warps[current / 32];
    warp.left |= 1u << current % 32;
    ++own->finished;
    ++finished_in_cluster;
    leave_async(self);
    leave_products(self);
    check_none_missed(warp.barriers, self.barrier_calls);
    check_none_missed(own->pools[static_cast<size_t>(current / 128)], self.register_calls);
    if (own->finished < block) return;
    for (const Barrier& barrier : own->barriers) {
        if (!barrier.arrived) continue;
        emulator::fail(barrier.first.site, "barrier %d: the block ends when %d of %d threads have arrived, thread %d first",
                       barrier.first.number, threads_at(barrier), barrier.first.threads, barrier.first.caller);
    }
    check_registers_suffice();
    end_async();
}

}  // namespace machine

namespace emulator {

void fail(Site site, const char* format, ...) {
    fprintf(stderr, "emulator: ");
    va_list values;
    va_start(values, format);
    vfprintf(stderr, format, values);
    va_end(values);
    fprintf(stderr, "\n  at %s:%d\n", base_name(site.file), site.line);
    say_where();
    show_stack();
    if (current >= 0) __sanitizer_print_stack_trace();
    die();
}

void block_barrier(Site site) {
    if (const Barrier& barrier = own->barriers[0]; barrier.arrived) {
        fail(site, "barrier divergence: thread %d is in __syncthreads, which is barrier 0, thread %d in %s at %s:%d", current,
             barrier.first.caller, Name(barrier.first).text, base_name(barrier.first.site.file), barrier.first.site.line);
    }
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
        hand_back_turn();
    }
    leave_fibre();
}

void named_barrier(bool waits, int number, int threads, Site site) {
    const Call call{waits ? Call::barrier_sync : Call::barrier_arrive, number, threads, site, current, 0};
    if (number < 0 || number >= barrier_count) {
        fail(site, "%s: number %d is not among 0 to %d", Name(call).text, number, barrier_count - 1);
    }
    if (threads < 32 || threads % 32) fail(site, "%s: %d threads are no whole warps", Name(call).text, threads);
    if (threads > (block + 31) / 32 * 32) {
        fail(site, "%s: %d threads meet in a block of %ld", Name(call).text, threads, static_cast<long>(block));
    }
    Fibre& self = fibres[current];
    if (waits) {
        self.state = at_named_barrier;
        self.site = site;
        self.call = call;
    }
    const int warp = current / 32;
    const bool together = join(warps[warp].barriers, self.barrier_calls, call, warp * 32, lanes(warp));
    const bool complete = together && arrive(call);
    // NOTE: who only arrives goes on, but those whom it lets go may be faster than its next step.
    if (waits || complete) leave_fibre();
}

void set_registers(bool up, int count, Site site) {
    const Call call{up ? Call::registers_up : Call::registers_down, count, 0, site, current, 0};
    const int pool = current / 128;
    if ((pool + 1) * 128 > block) {
        fail(site, "%s: thread %d is in none of four whole neighbouring warps", Name(call).text, current);
    }
    Pool& own_pool = own->pools[static_cast<size_t>(pool)];
    join(own_pool, fibres[current].register_calls, call, pool * 128, 128);
    own_pool.registers = count;
    own_pool.last = call;
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
        hand_back_turn();
    }
    leave_fibre();
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

void check_cluster_vector(const float* pointer, Site site) {
    const long offset = reinterpret_cast<const unsigned char*>(pointer) - ::shared;
    if (offset % 16) fail(site, "cluster_load_v4: shared byte %ld is misaligned", offset);
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
        if (operation == load_matrices) give_matrices(first);
        if (operation == multiply) multiply_matrices(first);
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
    leave_fibre();
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
    check_no_product_reads(static_cast<size_t>(offset), static_cast<size_t>(bytes), "cp_async", site);
    Copy copy{s, bytes, {}};
    if (valid) memcpy(copy.data, from, static_cast<size_t>(bytes));
    if (order == 1) land(copy);
    else fibres[current].groups.back().push_back(copy);
}

void cp_async_commit_group() { fibres[current].groups.emplace_back(); }

void cp_async_wait_group(int pending) {
    // The open group has not been committed and is not waited for.
    auto& groups = fibres[current].groups;
    for (Arrival& arrival : own->async.arrivals) {
        // NOTE: which of them the pending groups have nobody knows any more: all or none land.
        if (pending > 0 || arrival.thread != current) continue;
        for (const Copy& copy : arrival.copies) land(copy);
        arrival.copies.clear();
    }
    while (groups.size() > static_cast<size_t>(pending) + 1) {
        for (const Copy& copy : groups.front()) land(copy);
        groups.erase(groups.begin());
    }
}

}  // namespace emulator
