// Barriers in shared memory: mbarrier. Each call is held against the rules of the PTX manual and those of the project.
// An mbarrier lives in a table beside shared memory; the sanitizer keeps the kernel off the eight bytes that hold it.
#include <runtime.h>

#include <sanitizer/asan_interface.h>

#include <cstdio>
#include <cstring>

using namespace machine;

namespace {

void forbid(size_t at) { __asan_poison_memory_region(::shared + at, barrier_bytes); }
void permit(size_t at) { __asan_unpoison_memory_region(::shared + at, barrier_bytes); }

bool complete(const Mbarrier& barrier, unsigned parity) { return ((barrier.phase & 1) ^ 1) == static_cast<int64_t>(parity); }

// A wait has seen that all phases but the one that has begun are complete: what they brought may be used. NOTE: by any
// thread, not only by those that wait; one that does not is too early in the order that gives it its turn first.
void see(size_t at, const Mbarrier& barrier) {
    auto& loads = own->async.loads;
    for (size_t i = loads.size(); i-- > 0;) {
        const Load& load = loads[i];
        if (load.barrier != at || load.phase >= barrier.phase) continue;
        __asan_unpoison_memory_region(::shared + load.at, load.bytes);
        loads.erase(loads.begin() + static_cast<long>(i));
    }
}

void check_parity(unsigned parity, Site site) {
    if (parity > 1) emulator::fail(site, "mbarrier wait: parity %u is none of 0 and 1", parity);
}

// What the thread that has its turn has done completes the phase: those who wait may be faster than its next step.
void give_way(size_t at, Site site) {
    if (!settle(*own, at, site)) return;
    released = order != 2;
    leave_fibre();
}

}  // namespace

namespace machine {

int64_t phases_completed = 0;

Mbarrier& barrier_at(const void* pointer, const char* what, Site site, size_t& at) {
    at = shared_range(pointer, barrier_bytes, barrier_bytes, what, site);
    const auto entry = own->async.barriers.find(at);
    if (entry == own->async.barriers.end()) {
        emulator::fail(site, "%s: no mbarrier has been initialised at shared byte %zu", what, at);
    }
    return entry->second;
}

bool settle(Block& in, size_t at, Site site) {
    Mbarrier& barrier = in.async.barriers.at(at);
    if (barrier.pending > 0) return false;
    const long phase = static_cast<long>(barrier.phase);
    if (barrier.bytes < 0) {
        emulator::fail(site, "mbarrier at shared byte %zu: %ld bytes more have landed in phase %ld than were expected, and all "
                       "arrivals are made", at, static_cast<long>(-barrier.bytes), phase);
    }
    if (barrier.bytes > 0) return false;
    for (const Load& load : in.async.loads) {
        if (load.barrier != at || load.landed) continue;
        emulator::fail(site, "mbarrier at shared byte %zu: phase %ld completes while %zu bytes are under way that it was not "
                       "told to expect, copied by thread %d at %s:%d", at, phase, load.bytes, load.thread,
                       base_name(load.site.file), load.site.line);
    }
    for (auto& fibre : in.fibres) {
        if (fibre.state == polling) fibre.state = running;
        if (fibre.mbarrier != static_cast<long>(at)) continue;
        if (fibre.state == at_mbarrier) {
            if (fibre.parity == (barrier.phase & 1)) fibre.state = running;
            continue;
        }
        emulator::fail(site, "mbarrier at shared byte %zu: phase %ld completes before thread %ld, which waits at %s:%d, has "
                       "seen that the one before is complete", at, phase, static_cast<long>(&fibre - in.fibres.data()),
                       base_name(fibre.site.file), fibre.site.line);
    }
    ++barrier.phase;
    ++phases_completed;
    barrier.pending = barrier.count;
    return true;
}

void arrive(Block& in, const Arrival& arrival) {
    for (const Copy& copy : arrival.copies) land(copy);
    Mbarrier& barrier = in.async.barriers.at(arrival.barrier);
    if (barrier.pending == 0) {
        emulator::fail(arrival.site, "mbarrier at shared byte %zu: copies of thread %d arrive in phase %ld, which has all its %d "
                       "arrivals", arrival.barrier, arrival.thread, static_cast<long>(barrier.phase), barrier.count);
    }
    --barrier.pending;
    settle(in, arrival.barrier, arrival.site);
}

void say_barriers() {
    for (unsigned rank = 0; rank < blocks.size(); ++rank) {
        for (const auto& [at, barrier] : blocks[rank].async.barriers) {
            fprintf(stderr, "  mbarrier at byte %zu of block %u, made at %s:%d: phase %ld, %d of %d arrivals, ", at, number(rank),
                    base_name(barrier.site.file), barrier.site.line, static_cast<long>(barrier.phase),
                    barrier.count - barrier.pending, barrier.count);
            if (barrier.bytes < 0) {
                fprintf(stderr, "%ld bytes landed and not expected\n", static_cast<long>(-barrier.bytes));
            } else {
                fprintf(stderr, "%ld bytes expected and not landed\n", static_cast<long>(barrier.bytes));
            }
        }
    }
}

void say_async(const unsigned char* address) {
    for (unsigned rank = 0; rank < blocks.size(); ++rank) {
        const Block& in = blocks[rank];
        const auto at = static_cast<size_t>(address - in.shared);
        if (address < in.shared || at >= static_cast<size_t>(shared_bytes)) continue;
        for (const Load& load : in.async.loads) {
            if (at < load.at || at >= load.at + load.bytes) continue;
            fprintf(stderr, "emulator: it is under way: no wait has seen the %zu bytes land that thread %d copies at %s:%d\n",
                    load.bytes, load.thread, base_name(load.site.file), load.site.line);
        }
        for (const auto& [start, barrier] : in.async.barriers) {
            if (at < start || at >= start + barrier_bytes) continue;
            fprintf(stderr, "emulator: it is an mbarrier, made at %s:%d\n", base_name(barrier.site.file), barrier.site.line);
        }
    }
}

}  // namespace machine

namespace emulator {

void mbarrier_init(void* pointer, int count, Site site) {
    const size_t at = shared_range(pointer, barrier_bytes, barrier_bytes, "mbarrier_init", site);
    auto& async = own->async;
    if (const auto other = async.barriers.find(at); other != async.barriers.end()) {
        fail(site, "mbarrier_init: there is an mbarrier at shared byte %zu already, initialised at %s:%d", at,
             base_name(other->second.site.file), other->second.site.line);
    }
    if (count < 1 || count > most_bytes) fail(site, "mbarrier_init: count %d is not among 1 to %ld", count, most_bytes);
    for (const Load& load : async.loads) {
        if (at + barrier_bytes <= load.at || load.at + load.bytes <= at) continue;
        fail(site, "mbarrier_init: the copy at %s:%d brings shared byte %zu", base_name(load.site.file), load.site.line, at);
    }
    async.barriers[at] = Mbarrier{site, current, count, count};
    forbid(at);
}

void mbarrier_inval(void* pointer, Site site) {
    size_t at;
    const Mbarrier& barrier = barrier_at(pointer, "mbarrier_inval", site, at);
    for (const auto& fibre : own->fibres) {
        if (fibre.mbarrier != static_cast<long>(at)) continue;
        fail(site, "mbarrier_inval: thread %ld waits for the mbarrier at shared byte %zu, at %s:%d",
             static_cast<long>(&fibre - own->fibres.data()), at, base_name(fibre.site.file), fibre.site.line);
    }
    for (const Load& load : own->async.loads) {
        if (load.barrier != at) continue;
        fail(site, "mbarrier_inval: nobody has waited at the mbarrier at shared byte %zu for the copy at %s:%d", at,
             base_name(load.site.file), load.site.line);
    }
    for (const Arrival& arrival : own->async.arrivals) {
        if (arrival.barrier != at) continue;
        fail(site, "mbarrier_inval: nobody has waited at the mbarrier at shared byte %zu for the copies of thread %d at %s:%d", at,
             arrival.thread, base_name(arrival.site.file), arrival.site.line);
    }
    if (barrier.bytes) {
        fail(site, "mbarrier_inval: the mbarrier at shared byte %zu expects %ld bytes", at, static_cast<long>(barrier.bytes));
    }
    own->async.barriers.erase(at);
    permit(at);
}

void fence_mbarrier_init() {
    for (auto& [at, barrier] : own->async.barriers) barrier.fenced |= barrier.creator == current;
}

void mbarrier_expect_tx(void* pointer, unsigned bytes, Site site) {
    size_t at;
    Mbarrier& barrier = barrier_at(pointer, "mbarrier_expect_tx", site, at);
    barrier.bytes += bytes;
    if (bytes > most_bytes || barrier.bytes > most_bytes) {
        fail(site, "mbarrier_expect_tx: the mbarrier at shared byte %zu would expect %ld bytes, and can %ld", at,
             static_cast<long>(barrier.bytes), most_bytes);
    }
    if (barrier.pending == 0) settle(*own, at, site);
}

void mbarrier_arrive(void* pointer, Site site) {
    size_t at;
    Mbarrier& barrier = barrier_at(pointer, "mbarrier_arrive", site, at);
    if (barrier.pending == 0) {
        fail(site, "mbarrier at shared byte %zu: thread %d arrives in phase %ld, which has all its %d arrivals and still expects "
             "%ld bytes", at, current, static_cast<long>(barrier.phase), barrier.count, static_cast<long>(barrier.bytes));
    }
    --barrier.pending;
    give_way(at, site);
}

void cp_async_mbarrier_arrive(void* pointer, Site site) {
    Arrival arrival{site, current, 0, {}};
    barrier_at(pointer, "cp_async_mbarrier_arrive", site, arrival.barrier);
    auto& groups = fibres[current].groups;
    for (auto& group : groups) arrival.copies.insert(arrival.copies.end(), group.begin(), group.end());
    groups.assign(1, {});
    if (order == 1) return mbarrier_arrive(pointer, site);
    own->async.arrivals.push_back(arrival);
}

void mbarrier_arrive_cluster(void* pointer, unsigned rank, Site site) {
    {
        const Visit visit(rank, "mbarrier_arrive_cluster", site);
        size_t at;
        Mbarrier& barrier = barrier_at(visit.there(pointer), "mbarrier_arrive_cluster", site, at);
        if (barrier.pending == 0) {
            fail(site, "mbarrier at shared byte %zu of rank %u: thread %d of another block arrives in phase %ld, which has all "
                 "its %d arrivals", at, rank, current, static_cast<long>(barrier.phase), barrier.count);
        }
        --barrier.pending;
        if (!settle(*own, at, site)) return;
    }
    released = order != 2;
    leave_fibre();
}

void look_later(Site site) {
    Fibre& self = fibres[current];
    self.state = polling;
    self.site = site;
    leave_fibre();
}

// NOTE: a thread that looks and finds the phase incomplete lets the others go on as far as they can before it has the
// answer, which may by then be yes.
bool mbarrier_test_wait(void* pointer, unsigned parity, Site site) {
    size_t at;
    check_parity(parity, site);
    if (!complete(barrier_at(pointer, "mbarrier_test_wait_parity", site, at), parity)) look_later(site);
    const Mbarrier& barrier = barrier_at(pointer, "mbarrier_test_wait_parity", site, at);
    if (!complete(barrier, parity)) return false;
    see(at, barrier);
    return true;
}

void mbarrier_wait(void* pointer, unsigned parity, Site site) {
    size_t at;
    check_parity(parity, site);
    const Mbarrier& barrier = barrier_at(pointer, "mbarrier_wait_parity", site, at);
    if (!complete(barrier, parity)) {
        Fibre& self = fibres[current];
        self.state = at_mbarrier;
        self.site = site;
        self.mbarrier = static_cast<long>(at);
        self.parity = parity;
        leave_fibre();
        self.mbarrier = -1;
    }
    see(at, barrier);
}

}  // namespace emulator
