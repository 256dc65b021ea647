// The machine: what runtime.cpp plays and what a kernel's calls, in the other files, do to it.
#pragma once

#include <async.h>
#include <emulator.h>
#include <fibre_context.h>
#include <products.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace machine {

using emulator::Site;
using emulator::WarpOperation;

extern const char* const warp_names[];

// One that neighbouring threads must make alike: the lanes of a warp, or the threads of four warps.
struct Call {
    enum Kind { barrier_sync, barrier_arrive, registers_up, registers_down } kind;
    int number, threads;  // the barrier's; or the count of registers, and 0
    Site site;
    int caller;  // the first thread that has made it
    int made;    // by how many threads
};

// A call as it stands in the kernel.
struct Name {
    char text[64];
    explicit Name(const Call& call);
};

// The calls that some threads of a group have made and others have not, oldest first: nothing but a barrier holds a
// thread back until its neighbours have made the same call.
struct Group {
    std::vector<Call> open;
    int64_t closed = 0;  // calls that all have made
};

// Four neighbouring warps: their calls of setmaxnreg, and what the last one set.
struct Pool : Group {
    int registers = 0;
    Call last{};
};

// A named barrier. It starts anew when as many threads have arrived as the first of them said.
struct Barrier {
    unsigned arrived = 0, waiting = 0;  // warps
    Call first{};
};

enum State {
    running, at_block_barrier, at_cluster_barrier, at_named_barrier, at_warp_operation, at_mbarrier, polling, at_products,
    finished
};

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
    // the named barrier it waits in
    Call call{};
    // how many calls it has made with its warp and with its four warps
    int64_t barrier_calls = 0, register_calls = 0;
    // cp.async groups, oldest first; the last one is open
    std::vector<std::vector<Copy>> groups{1};
    // bulk groups, likewise
    std::vector<std::vector<Store>> stores{1};
    // the mbarrier that it waits for, by its place in shared memory, until it has its turn again; -1 for none
    long mbarrier = -1;
    unsigned parity = 0;
    ThreadProducts products;
};

struct Warp {
    unsigned exists = 0, waiting = 0, left = 0;  // lanes: of the block, in a warp operation, that have left the kernel
    Group barriers;
};

constexpr int barrier_count = 16;

// What the blocks of a cluster have each for themselves.
struct Block {
    std::vector<Fibre> fibres;
    std::vector<Warp> warps;
    std::vector<Pool> pools;  // of registers
    std::vector<Warpgroup> warpgroups;
    std::vector<int> turns;    // threads in the order in which they go
    unsigned char* shared = nullptr;
    int waiting = 0, finished = 0;  // threads in __syncthreads, threads that have left the kernel
    int first_waiting = 0;          // the one that has waited longest in __syncthreads
    Barrier barriers[barrier_count];
    Async async;
};

extern std::vector<Block> blocks;  // of the cluster that is being played, by rank
extern unsigned here;              // the rank of the block that has its turn; the next four are its own
extern Block* own;
extern Fibre* fibres;
extern Warp* warps;
extern unsigned char* shared;
extern int waiting_at_cluster_barrier, finished_in_cluster;
extern Site cluster_barrier_site;  // where the first one waits
extern int current, order;
extern int64_t grid, block, cluster, shared_bytes;
extern bool released;  // a barrier has let threads go that may come before the one that has its turn

inline void land(const Copy& copy) { memcpy(copy.shared, copy.data, static_cast<size_t>(copy.bytes)); }
const char* base_name(const char* path);
unsigned number(unsigned rank);  // what number a block of this cluster has in the grid
void leave_fibre();
void show_stack();  // to the sanitizer, before it tells the way to here

// For a while the thread that has its turn acts in the shared memory of another block of its cluster, or in its own. That
// block must not have left the kernel.
class Visit {
  public:
    Visit(unsigned rank, const char* what, Site site);
    ~Visit();
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;
    // What lies there where the thread's own block has this.
    void* there(void* shared) const;

  private:
    unsigned home;
};
void say_where();
[[noreturn]] void die();

// The thread that has its turn has left the kernel.
void leave_kernel();
void look_who_left();
// After every step of every thread, hence in two parts.
inline void check_nobody_left() {
    if (finished_in_cluster > 0) look_who_left();
}

}  // namespace machine
