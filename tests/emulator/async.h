// What a block keeps of its mbarriers and bulk copies. Here they are made in mbarrier.cpp, bulk.cpp and tensor.cpp.
#pragma once

#include <emulator.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace machine {

using emulator::Site;

struct Block;
struct Fibre;

// A copy of cp.async.
struct Copy {
    unsigned char* shared;
    int bytes;
    unsigned char data[16];
};

struct Mbarrier {
    Site site;    // of its init
    int creator;  // the thread that has made it
    int count, pending;
    int64_t bytes = 0;    // expected and not landed
    int64_t phase = 0;    // how many are complete
    bool fenced = false;  // copies know of its init
};

// The 128 bytes of a tensor map, as __init__.py writes them; but pointer and bytes, the array's, are the runtime's.
struct MapSpec {
    char magic[8];
    unsigned char* pointer;
    uint64_t bytes;
    uint64_t strides[4];  // of axes 1 to 4; axis 0 is the innermost one
    uint32_t shape[5];
    uint16_t box[5];  // or channels, pixels
    int16_t lower[3], upper[3];
    uint8_t traversal[5];
    uint8_t rank, element_bytes, swizzle, im2col, written;
    char name[20];
};
static_assert(sizeof(MapSpec) == 128, "a tensor map has 128 bytes");

// What a bulk copy moves between shared memory and an array.
struct Transfer {
    Site site;
    int thread;
    size_t at, bytes;  // in shared memory
    unsigned char* global = nullptr;
    bool mapped = false;  // then by these three
    MapSpec map{};
    int coordinates[5]{};
    int offsets[3]{};
};

// From its issue until a wait has seen its phase complete, the sanitizer forbids its part of shared memory.
struct Load : Transfer {
    size_t barrier = 0;  // where in shared memory
    int64_t phase = 0;   // of the barrier, in which it was issued
    bool landed = false;
    bool drawn = false, late = false;  // in the shuffled order: whether it lands as late as allowed
    unsigned sender = 0;  // the rank of the block that has issued it, where several receive it
    bool multicast = false;
};

struct Store : Transfer {
    std::vector<unsigned char> data;     // what it has read
    bool read = false, written = false;  // what it has done
    bool waited = false;                 // its thread knows that it has read
};

// An arrival of a thread that is made when its copies have landed.
struct Arrival {
    Site site;
    int thread;
    size_t barrier;  // where in shared memory
    std::vector<Copy> copies;
    bool drawn = false, late = false;  // in the shuffled order: whether it is made as late as allowed
};

// Of a block.
struct Async {
    std::map<size_t, Mbarrier> barriers;  // by their place in shared memory
    std::vector<Load> loads;              // that no wait has seen
    std::vector<Arrival> arrivals;        // that copies have not made
    std::vector<Store> left;              // by threads that have left the kernel
    int storing = 0;                      // copies out of shared memory that have not written
    std::vector<unsigned char> view;      // shared memory as copies see it: without what no fence has shown them
};

extern int64_t phases_completed;  // of all mbarriers

constexpr size_t barrier_bytes = 8;
constexpr int64_t most_bytes = (1 << 20) - 1;  // that a barrier counts

// Copies that must not meet the sanitizer.
void raw_copy(void* to, const void* from, size_t bytes);
void raw_fill(void* to, int value, size_t bytes);

// mbarrier.cpp
Mbarrier& barrier_at(const void* pointer, const char* what, Site site, size_t& at);
bool settle(Block& block, size_t at, Site site);  // true if its phase is complete now
void arrive(Block& block, const Arrival& arrival);  // its copies land
void say_barriers();
void say_async(const unsigned char* address);  // what keeps the sanitizer from it

// bulk.cpp
void start_async(Block& block);
void land(Block& block, Load& load);
void move_some(Block& block, bool (*now)());  // copies that happen to
bool land_next();                             // nobody can go on: the copy that has to land now; false if there is none
void leave_async(Fibre& fibre);               // the thread that has its turn has left the kernel
void end_async();                             // all threads of the block have
void issue_load(const Load& load, void* barrier, const char* what);
bool begin_load(const Load& load, void* barrier, const char* what);  // true if it completes a phase
void issue_store(const Store& store, const char* what);
// This part of shared memory holds no mbarrier, no copy is under way to it, and none reads from it that `writes` spoil.
void check_free(size_t at, size_t bytes, bool writes, const char* what, Site site);
// Threads have written nothing to it that no fence has shown to copies.
void check_fenced(size_t at, size_t bytes, const char* what, Site site);
size_t shared_range(const void* pointer, size_t bytes, size_t alignment, const char* what, Site site);

// tensor.cpp: the pieces that a transfer moves, and those that lie outside the array are not among them
using Piece = void (*)(void* context, size_t at, unsigned char* global, size_t bytes);
void walk(const Transfer& transfer, Piece piece, void* context);

// runtime.cpp: reports bytes that lie in no array
void check_array(const unsigned char* pointer, size_t bytes, const char* what, Site site);

}  // namespace machine
