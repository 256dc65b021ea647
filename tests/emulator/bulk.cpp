// Copies that the machine makes by itself: when they land, what they may not touch meanwhile, and what they see.
// The order of threads says when (runtime.cpp): in 0 a copy into shared memory lands when nobody can go on without it, one
// out of shared memory reads when its thread waits for that and writes when its thread waits for that or its block ends. In 2
// one copy in eight into shared memory lands as late as in 0, after many that began behind it.
//
// Not enforced: which thread's wait, or fence, lets another one go on. A wait lets all threads of the block use what it
// has seen land, and fence_proxy_async shows copies all that has been written, by whichever thread; a thread that relies
// on another's without a barrier between them is too early in one of the orders. Nor what the kernel writes to an array
// and copies out of it again, which on the machine wants a fence too.
#include <runtime.h>

#include <sanitizer/asan_interface.h>

#include <cstdio>
#include <cstring>

using namespace machine;

namespace {

bool overlap(size_t a, size_t a_bytes, size_t b, size_t b_bytes) { return a < b + b_bytes && b < a + a_bytes; }

struct Target {
    Block& block;
    const Load& load;
};

void put(void* context, size_t at, unsigned char* global, size_t bytes) {
    auto& [block, load] = *static_cast<Target*>(context);
    raw_copy(block.shared + load.at + at, global, bytes);
}

void take(void* context, size_t at, unsigned char* global, size_t bytes) {
    raw_copy(global, static_cast<Store*>(context)->data.data() + at, bytes);
}

struct Check {
    const Transfer& transfer;
    const char* what;
};

void check_piece(void* context, size_t, unsigned char* global, size_t bytes) {
    const auto& [transfer, what] = *static_cast<Check*>(context);
    const MapSpec& map = transfer.map;
    if (!transfer.mapped) return check_array(global, bytes, what, transfer.site);
    if (global >= map.pointer && global + bytes <= map.pointer + map.bytes) return;
    emulator::fail(transfer.site, "%s: %s leads to byte %ld of its array, which has %ld bytes", what, map.name,
                   static_cast<long>(global - map.pointer), static_cast<long>(map.bytes));
}

void read(Store& store, const Block& block) {
    if (store.read) return;
    store.read = true;
    store.data.resize(store.bytes);
    raw_copy(store.data.data(), block.shared + store.at, store.bytes);
}

void write(Store& store, Block& block) {
    if (store.written) return;
    store.written = true;
    --block.async.storing;
    walk(store, take, &store);
}

}  // namespace

namespace machine {

// NOTE: an own loop would be compiled to a call of memcpy, which is the sanitizer's.
void raw_copy(void* to, const void* from, size_t bytes) {
#if defined(__x86_64__)
    asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
#else
    auto* t = static_cast<volatile unsigned char*>(to);
    const auto* f = static_cast<const volatile unsigned char*>(from);
    for (size_t i = 0; i < bytes; ++i) t[i] = f[i];
#endif
}

void raw_fill(void* to, int value, size_t bytes) {
    auto* t = static_cast<volatile unsigned char*>(to);
    for (size_t i = 0; i < bytes; ++i) t[i] = static_cast<unsigned char>(value);
}

size_t shared_range(const void* pointer, size_t bytes, size_t alignment, const char* what, Site site) {
    const long at = static_cast<const unsigned char*>(pointer) - ::shared;
    if (at < 0 || at + static_cast<long>(bytes) > shared_bytes) {
        emulator::fail(site, "%s: takes shared bytes %ld to %ld of %ld", what, at, at + static_cast<long>(bytes),
                       static_cast<long>(shared_bytes));
    }
    if (static_cast<size_t>(at) % alignment) {
        emulator::fail(site, "%s: shared byte %ld is misaligned, no multiple of %zu", what, at, alignment);
    }
    return static_cast<size_t>(at);
}

void check_free(size_t at, size_t bytes, bool writes, const char* what, Site site) {
    const auto& async = own->async;
    const auto near = async.barriers.lower_bound(at < barrier_bytes ? 0 : at - barrier_bytes + 1);
    if (near != async.barriers.end() && near->first < at + bytes) {
        const Site made = near->second.site;
        emulator::fail(site, "%s: shared bytes %zu to %zu hold an mbarrier, made at %s:%d", what, at, at + bytes,
                       base_name(made.file), made.line);
    }
    for (const Load& load : async.loads) {
        if (!overlap(at, bytes, load.at, load.bytes)) continue;
        emulator::fail(site, "%s: shared bytes %zu to %zu are under way: no wait has seen the copy at %s:%d land", what, at,
                       at + bytes, base_name(load.site.file), load.site.line);
    }
    if (!writes) return;
    check_no_product_reads(at, bytes, what, site);
    check_loads_used(at, bytes, what, site);
    for (const Fibre& fibre : own->fibres) {
        for (const auto& group : fibre.stores) {
            for (const Store& store : group) {
                if (store.waited || !overlap(at, bytes, store.at, store.bytes)) continue;
                emulator::fail(site, "%s: the copy at %s:%d may still read shared bytes %zu to %zu", what,
                               base_name(store.site.file), store.site.line, at, at + bytes);
            }
        }
    }
}

// NOTE: it does not notice a write of what lay there already.
void check_fenced(size_t at, size_t bytes, const char* what, Site site) {
    const unsigned char *now = ::shared + at, *seen = own->async.view.data() + at;
    if (!memcmp(now, seen, bytes)) return;
    size_t first = 0;
    while (now[first] == seen[first]) ++first;
    emulator::fail(site, "%s: shared byte %zu has been written by a thread, and no fence_proxy_async() came between", what,
                   at + first);
}

void start_async(Block& b) {
    b.async = {};
    if (shared_bytes > 0) __asan_unpoison_memory_region(b.shared, static_cast<size_t>(shared_bytes));
    b.async.view.assign(static_cast<size_t>(shared_bytes), 0xff);
}

void land(Block& in, Load& load) {
    load.landed = true;
    // what lies outside the array is zero
    if (load.mapped) raw_fill(in.shared + load.at, 0, load.bytes);
    Target target{in, load};
    walk(load, put, &target);
    raw_copy(in.async.view.data() + load.at, in.shared + load.at, load.bytes);
    int64_t& expected = in.async.barriers.at(load.barrier).bytes;
    expected -= static_cast<int64_t>(load.bytes);
    if (expected < -most_bytes) {
        emulator::fail(load.site, "mbarrier at shared byte %zu: %ld bytes have landed and were not expected; it counts to %ld",
                       load.barrier, static_cast<long>(-expected), static_cast<long>(most_bytes));
    }
}

void move_some(Block& in, bool (*now)()) {
    for (Load& load : in.async.loads) {
        if (!load.drawn) load.drawn = true, load.late = now() && now() && now();
        if (load.landed || load.late || !now()) continue;
        land(in, load);
        settle(in, load.barrier, load.site);
    }
    auto& arrivals = in.async.arrivals;
    for (size_t i = 0; i < arrivals.size(); ++i) {
        Arrival& arrival = arrivals[i];
        if (!arrival.drawn) arrival.drawn = true, arrival.late = now() && now() && now();
        if (arrival.late || !now()) continue;
        const Arrival made = arrival;
        arrivals.erase(arrivals.begin() + static_cast<long>(i--));
        arrive(in, made);
    }
    if (!in.async.storing) return;
    for (Fibre& fibre : in.fibres) {
        for (auto& group : fibre.stores) {
            for (Store& store : group) {
                if (store.written || !now()) continue;
                if (store.read) write(store, in);
                else read(store, in);
            }
        }
    }
}

bool land_next() {
    Block* in = nullptr;
    Load* next = nullptr;
    for (Block& b : blocks) {
        for (Load& load : b.async.loads) {
            if (load.landed) continue;
            bool wanted = false;
            for (const Fibre& fibre : b.fibres) wanted |= fibre.mbarrier == static_cast<long>(load.barrier);
            if (next && !wanted) continue;
            in = &b;
            next = &load;
            if (wanted) break;
        }
    }
    if (!next) {
        for (Block& b : blocks) {
            if (b.async.arrivals.empty()) continue;
            const Arrival made = b.async.arrivals.front();
            b.async.arrivals.erase(b.async.arrivals.begin());
            arrive(b, made);
            return true;
        }
        return false;
    }
    land(*in, *next);
    settle(*in, next->barrier, next->site);
    return true;
}

void leave_async(Fibre& self) {
    for (auto& group : self.stores) {
        for (Store& store : group) {
            if (!store.waited) {
                emulator::fail(store.site, "thread %d leaves the kernel without having waited for its copy of shared bytes %zu "
                               "to %zu to be read", current, store.at, store.at + store.bytes);
            }
            own->async.left.push_back(store);
        }
    }
    self.stores.assign(1, {});
}

void end_async() {
    auto& async = own->async;
    for (const Load& load : async.loads) {
        emulator::fail(load.site, "the block ends, and nobody has waited for these %zu bytes", load.bytes);
    }
    for (const Arrival& arrival : async.arrivals) {
        emulator::fail(arrival.site, "the block ends, and nobody has waited for the copies of thread %d", arrival.thread);
    }
    for (unsigned rank = 0; rank < blocks.size(); ++rank) {
        for (const Load& load : blocks[rank].async.loads) {
            if (!load.multicast || load.sender != here || load.landed) continue;
            emulator::fail(load.site, "block %u has left the kernel before these %zu bytes have landed in block %u, to which it "
                           "sends them; no manual says what becomes of them", number(here), load.bytes, number(rank));
        }
    }
    for (const auto& [at, barrier] : async.barriers) {
        if (!barrier.bytes) continue;
        emulator::fail(barrier.site, "mbarrier at shared byte %zu: the block ends in phase %ld with %ld bytes expected and not "
                       "landed", at, static_cast<long>(barrier.phase), static_cast<long>(barrier.bytes));
    }
    for (Store& store : async.left) write(store, *own);
}

bool begin_load(const Load& given, void* pointer, const char* what) {
    Load load = given;
    const Mbarrier& barrier = barrier_at(pointer, what, load.site, load.barrier);
    if (!barrier.fenced) {
        emulator::fail(load.site, "%s: copies do not know of the mbarrier at shared byte %zu: thread %d has made it at %s:%d "
                       "without a fence_mbarrier_init() after it", what, load.barrier, barrier.creator,
                       base_name(barrier.site.file), barrier.site.line);
    }
    load.phase = barrier.phase;
    load.thread = current;
    check_free(load.at, load.bytes, true, what, load.site);
    check_fenced(load.at, load.bytes, what, load.site);
    Check check{load, what};
    walk(load, check_piece, &check);
    __asan_poison_memory_region(::shared + load.at, load.bytes);
    own->async.loads.push_back(load);
    if (order != 1) return false;
    land(*own, own->async.loads.back());
    return settle(*own, load.barrier, load.site);
}

void issue_load(const Load& load, void* pointer, const char* what) {
    if (!begin_load(load, pointer, what)) return;
    released = true;
    leave_fibre();
}

static void issue_multicast(const Load& given, void* pointer, unsigned receivers, const char* what) {
    Load load = given;
    load.sender = here;
    load.multicast = true;
    for (unsigned rank = 0; receivers >> rank; ++rank) {
        if (!(receivers >> rank & 1)) continue;
        const Visit visit(rank, what, load.site);
        begin_load(load, visit.there(pointer), what);
    }
    // In the order in which copies land at once they may have completed phases.
    if (order != 1) return;
    released = true;
    leave_fibre();
}

void issue_store(const Store& given, const char* what) {
    Store store = given;
    store.thread = current;
    check_free(store.at, store.bytes, false, what, store.site);
    check_fenced(store.at, store.bytes, what, store.site);
    Check check{store, what};
    walk(store, check_piece, &check);
    auto& group = fibres[current].stores.back();
    group.push_back(store);
    ++own->async.storing;
    if (order != 1) return;
    read(group.back(), *own);
    write(group.back(), *own);
}

}  // namespace machine

namespace emulator {

void fence_proxy_async() {
    raw_copy(own->async.view.data(), ::shared, static_cast<size_t>(shared_bytes));
    fence_mbarrier_init();
}

void bulk_load(void* to, const void* from, unsigned bytes, void* barrier, unsigned receivers, Site site) {
    const char* what = receivers ? "cp_async_bulk_multicast_shared_global" : "cp_async_bulk_shared_global";
    if (!bytes || bytes % 16) fail(site, "%s: %u bytes are no positive multiple of 16", what, bytes);
    if (reinterpret_cast<uintptr_t>(from) % 16) fail(site, "%s: global address %p is misaligned", what, from);
    Load load;
    load.site = site;
    load.at = shared_range(to, bytes, 16, what, site);
    load.bytes = bytes;
    load.global = static_cast<unsigned char*>(const_cast<void*>(from));
    if (receivers) issue_multicast(load, barrier, receivers, what);
    else issue_load(load, barrier, what);
}

void bulk_store(void* to, const void* from, unsigned bytes, Site site) {
    const char* what = "cp_async_bulk_global_shared";
    if (!bytes || bytes % 16) fail(site, "%s: %u bytes are no positive multiple of 16", what, bytes);
    if (reinterpret_cast<uintptr_t>(to) % 16) fail(site, "%s: global address %p is misaligned", what, to);
    Store store;
    store.site = site;
    store.at = shared_range(from, bytes, 16, what, site);
    store.bytes = bytes;
    store.global = static_cast<unsigned char*>(to);
    issue_store(store, what);
}

void bulk_commit_group() { fibres[current].stores.emplace_back(); }

void bulk_wait_group(int pending, bool only_read) {
    // The open group has not been committed and is not waited for.
    auto& groups = fibres[current].stores;
    const size_t kept = static_cast<size_t>(pending) + 1;
    for (size_t i = 0; i + kept < groups.size(); ++i) {
        for (Store& store : groups[i]) {
            read(store, *own);
            store.waited = true;
        }
    }
    if (only_read) return;
    while (groups.size() > kept) {
        for (Store& store : groups.front()) write(store, *own);
        groups.erase(groups.begin());
    }
}

}  // namespace emulator
