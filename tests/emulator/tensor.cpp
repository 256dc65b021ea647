// Copies through tensor maps: which bytes of the array go where in shared memory.
#include <runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

using namespace machine;

namespace {

constexpr size_t unit = 16;

// Where the unit of 16 bytes at this address of shared memory goes: bits 4 to 6 ^= bits 7 to 9, as many as the span has.
size_t swizzled(size_t address, int span) { return address ^ ((address >> 3) & static_cast<size_t>(span - 1) & ~(unit - 1)); }

// One row of shared memory: `elements` neighbours of axis 0 from the copy's coordinate on.
void walk_row(const Transfer& t, size_t row, int elements, unsigned char* start, Piece piece, void* context) {
    const MapSpec& map = t.map;
    const auto size = static_cast<int64_t>(map.element_bytes);
    const auto in_unit = static_cast<int64_t>(unit) / size;
    for (int64_t first = 0; first < elements; first += in_unit) {
        const int64_t low = std::max<int64_t>(t.coordinates[0] + first, 0);
        const int64_t high = std::min<int64_t>(t.coordinates[0] + first + in_unit, map.shape[0]);
        if (low >= high) continue;
        const size_t address = t.at + (row * static_cast<size_t>(elements) + static_cast<size_t>(first)) * map.element_bytes;
        const size_t to = map.swizzle ? swizzled(address, map.swizzle) : address;
        const auto skipped = static_cast<size_t>((low - t.coordinates[0] - first) * size);
        piece(context, to + skipped - t.at, start + low * size, static_cast<size_t>((high - low) * size));
    }
}

void walk_tiled(const Transfer& t, Piece piece, void* context) {
    const MapSpec& map = t.map;
    int extent[5] = {1, 1, 1, 1, 1}, index[5] = {};
    for (int axis = 0; axis < map.rank; ++axis) {
        extent[axis] = (map.box[axis] + map.traversal[axis] - 1) / map.traversal[axis];
    }
    const size_t rows = static_cast<size_t>(extent[1]) * static_cast<size_t>(extent[2]) * static_cast<size_t>(extent[3]) *
                        static_cast<size_t>(extent[4]);
    for (size_t row = 0; row < rows; ++row) {
        unsigned char* start = map.pointer;
        bool inside = true;
        for (int axis = 1; axis < map.rank; ++axis) {
            const int64_t at = static_cast<int64_t>(t.coordinates[axis]) + index[axis] * map.traversal[axis];
            inside = inside && at >= 0 && at < map.shape[axis];
            if (inside) start += at * static_cast<int64_t>(map.strides[axis - 1]);
        }
        if (inside) walk_row(t, row, extent[0], start, piece, context);
        for (int axis = 1; axis < 5 && ++index[axis] == extent[axis]; ++axis) index[axis] = 0;
    }
}

// The last position between the corners, along an axis of pixels.
int64_t last(const MapSpec& map, int axis) { return static_cast<int64_t>(map.shape[axis]) - 1 + map.upper[axis - 1]; }

void walk_im2col(const Transfer& t, Piece piece, void* context) {
    const MapSpec& map = t.map;
    const int images = map.rank - 1, channels = map.box[0], pixels = map.box[1];
    int64_t position[5];
    for (int axis = 0; axis < map.rank; ++axis) position[axis] = t.coordinates[axis];
    for (int pixel = 0; pixel < pixels; ++pixel) {
        unsigned char* start = map.pointer;
        bool inside = true;
        for (int axis = 1; axis < map.rank; ++axis) {
            const int64_t at = position[axis] + (axis < images ? t.offsets[axis - 1] : 0);
            inside = inside && at >= 0 && at < map.shape[axis];
            if (inside) start += at * static_cast<int64_t>(map.strides[axis - 1]);
        }
        if (inside) walk_row(t, static_cast<size_t>(pixel), channels, start, piece, context);
        // along w, then h, then d between the corners, then the next image
        for (int axis = 1; axis < map.rank; ++axis) {
            position[axis] += map.traversal[axis];
            if (axis == images || position[axis] <= last(map, axis)) break;
            position[axis] = map.lower[axis - 1];
        }
    }
}

MapSpec map_at(const void* pointer, const char* what, Site site) {
    MapSpec map;
    memcpy(&map, pointer, sizeof map);
    if (memcmp(map.magic, "a tensor", sizeof map.magic)) emulator::fail(site, "%s: there is no tensor map here", what);
    return map;
}

void describe(Transfer& t, const void* shared_pointer, const void* map_pointer, int rank, const int* coordinates,
              const unsigned short* offsets, const char* what) {
    t.map = map_at(map_pointer, what, t.site);
    const MapSpec& map = t.map;
    t.mapped = true;
    if (rank != map.rank) emulator::fail(t.site, "%s: %d coordinates, and %s has %d axes", what, rank, map.name, map.rank);
    if (map.im2col != (offsets != nullptr)) {
        emulator::fail(t.site, "%s: %s is %s map", what, map.name, map.im2col ? "an im2col" : "a tiled");
    }
    t.bytes = map.element_bytes;
    for (int axis = 0; axis < (map.im2col ? 2 : rank); ++axis) {
        const int step = map.im2col ? 1 : map.traversal[axis];
        t.bytes *= static_cast<size_t>((map.box[axis] + step - 1) / step);
    }
    t.at = shared_range(shared_pointer, t.bytes, 128, what, t.site);
    // NOTE: undocumented; an H200 raises an illegal instruction.
    const int64_t first = coordinates[0] * static_cast<int64_t>(map.element_bytes);
    if (first % 16) {
        emulator::fail(t.site, "%s: coordinate %d of axis 0 is %ld bytes from the start of %s, no multiple of 16", what,
                       coordinates[0], static_cast<long>(first), map.name);
    }
    for (int axis = 0; axis < rank; ++axis) t.coordinates[axis] = coordinates[axis];
    if (!map.im2col) return;
    const int most = rank == 3 ? 65535 : rank == 4 ? 255 : 31;
    for (int axis = 1; axis < rank - 1; ++axis) {
        const int offset = t.offsets[axis - 1] = offsets[axis - 1];
        if (offset > most) {
            emulator::fail(t.site, "%s: offset %d along axis %d is not among 0 to %d", what, offset, axis, most);
        }
        if (coordinates[axis] < map.lower[axis - 1] || coordinates[axis] > last(map, axis)) {
            emulator::fail(t.site, "%s: coordinate %d of axis %d is not between the corners of %s, %d to %ld", what,
                           coordinates[axis], axis, map.name, map.lower[axis - 1], static_cast<long>(last(map, axis)));
        }
    }
}

}  // namespace

namespace machine {

void walk(const Transfer& transfer, Piece piece, void* context) {
    if (!transfer.mapped) piece(context, 0, transfer.global, transfer.bytes);
    else if (transfer.map.im2col) walk_im2col(transfer, piece, context);
    else walk_tiled(transfer, piece, context);
}

}  // namespace machine

namespace emulator {

void check_tensor_map(const void* map, Site site) { map_at(map, "prefetch_tensormap", site); }

void tensor_load(void* to, const void* map, void* barrier, int rank, const int* coordinates, const unsigned short* offsets,
                 Site site) {
    const char* what = offsets ? "cp_async_bulk_tensor_im2col_shared_global" : "cp_async_bulk_tensor_shared_global";
    Load load;
    load.site = site;
    describe(load, to, map, rank, coordinates, offsets, what);
    issue_load(load, barrier, what);
}

void tensor_store(const void* map, const void* from, int rank, const int* coordinates, Site site) {
    const char* what = "cp_async_bulk_tensor_global_shared";
    Store store;
    store.site = site;
    describe(store, from, map, rank, coordinates, nullptr, what);
    if (!store.map.written) fail(site, "%s: %s says that the kernel does not store through it", what, store.map.name);
    for (int axis = 0; axis < rank; ++axis) {
        if (coordinates[axis] >= 0) continue;
        fail(site, "%s: coordinate %d of axis %d is negative, which only copies into shared memory take", what,
             coordinates[axis], axis);
    }
    issue_store(store, what);
}

}  // namespace emulator
