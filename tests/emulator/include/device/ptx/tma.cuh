// The CPU twin of ptx/tma.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

#include <device/ptx/sync.cuh>

namespace leanconv {

// Here the bytes are a machine::MapSpec.
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

inline void fence_proxy_async() { emulator::fence_proxy_async(); }
// NOTE: global memory has no proxies here: that this fence is missing shows on a GPU alone.
inline void fence_proxy_async_global() {}

inline void prefetch_tensormap(const TensorMap& map, EMULATOR_SITE) { emulator::check_tensor_map(&map, site); }

inline void cp_async_bulk_shared_global(void* shared, const void* global, unsigned bytes, Mbarrier* barrier,
                                        EMULATOR_SITE) {
    emulator::bulk_load(shared, global, bytes, barrier, 0, site);
}

inline void cp_async_bulk_multicast_shared_global(void* shared, const void* global, unsigned bytes, Mbarrier* barrier,
                                                  unsigned short destinations, EMULATOR_SITE) {
    if (destinations == 0) emulator::fail(site, "cp_async_bulk_multicast_shared_global: no block receives the copy");
    emulator::bulk_load(shared, global, bytes, barrier, destinations, site);
}

inline void cp_async_bulk_global_shared(void* global, const void* shared, unsigned bytes, EMULATOR_SITE) {
    emulator::bulk_store(global, shared, bytes, site);
}

inline void cp_async_bulk_commit_group() { emulator::bulk_commit_group(); }

template <int pending>
inline void cp_async_bulk_wait_group() {
    static_assert(pending >= 0, "cp.async.bulk.wait_group takes a number of groups");
    emulator::bulk_wait_group(pending, false);
}

template <int pending>
inline void cp_async_bulk_wait_group_read() {
    static_assert(pending >= 0, "cp.async.bulk.wait_group takes a number of groups");
    emulator::bulk_wait_group(pending, true);
}

inline void cp_async_bulk_tensor_shared_global(void* shared, const TensorMap& map, Mbarrier* barrier,
                                               int c0, EMULATOR_SITE) {
    const int at[] = {c0};
    emulator::tensor_load(shared, &map, barrier, 1, at, nullptr, site);
}
inline void cp_async_bulk_tensor_shared_global(void* shared, const TensorMap& map, Mbarrier* barrier,
                                               int c0, int c1, EMULATOR_SITE) {
    const int at[] = {c0, c1};
    emulator::tensor_load(shared, &map, barrier, 2, at, nullptr, site);
}
inline void cp_async_bulk_tensor_shared_global(void* shared, const TensorMap& map, Mbarrier* barrier,
                                               int c0, int c1, int c2, EMULATOR_SITE) {
    const int at[] = {c0, c1, c2};
    emulator::tensor_load(shared, &map, barrier, 3, at, nullptr, site);
}
inline void cp_async_bulk_tensor_shared_global(void* shared, const TensorMap& map, Mbarrier* barrier,
                                               int c0, int c1, int c2, int c3, EMULATOR_SITE) {
    const int at[] = {c0, c1, c2, c3};
    emulator::tensor_load(shared, &map, barrier, 4, at, nullptr, site);
}
inline void cp_async_bulk_tensor_shared_global(void* shared, const TensorMap& map, Mbarrier* barrier,
                                               int c0, int c1, int c2, int c3, int c4, EMULATOR_SITE) {
    const int at[] = {c0, c1, c2, c3, c4};
    emulator::tensor_load(shared, &map, barrier, 5, at, nullptr, site);
}

inline void cp_async_bulk_tensor_im2col_shared_global(
    void* shared, const TensorMap& map, Mbarrier* barrier, int c, int w, int n,
    unsigned short ow, EMULATOR_SITE) {
    const int at[] = {c, w, n};
    const unsigned short offsets[] = {ow};
    emulator::tensor_load(shared, &map, barrier, 3, at, offsets, site);
}
inline void cp_async_bulk_tensor_im2col_shared_global(
    void* shared, const TensorMap& map, Mbarrier* barrier, int c, int w, int h, int n,
    unsigned short ow, unsigned short oh, EMULATOR_SITE) {
    const int at[] = {c, w, h, n};
    const unsigned short offsets[] = {ow, oh};
    emulator::tensor_load(shared, &map, barrier, 4, at, offsets, site);
}
inline void cp_async_bulk_tensor_im2col_shared_global(
    void* shared, const TensorMap& map, Mbarrier* barrier, int c, int w, int h, int d, int n,
    unsigned short ow, unsigned short oh, unsigned short od, EMULATOR_SITE) {
    const int at[] = {c, w, h, d, n};
    const unsigned short offsets[] = {ow, oh, od};
    emulator::tensor_load(shared, &map, barrier, 5, at, offsets, site);
}

inline void cp_async_bulk_tensor_global_shared(const TensorMap& map, const void* shared,
                                               int c0, EMULATOR_SITE) {
    const int at[] = {c0};
    emulator::tensor_store(&map, shared, 1, at, site);
}
inline void cp_async_bulk_tensor_global_shared(const TensorMap& map, const void* shared,
                                               int c0, int c1, EMULATOR_SITE) {
    const int at[] = {c0, c1};
    emulator::tensor_store(&map, shared, 2, at, site);
}
inline void cp_async_bulk_tensor_global_shared(const TensorMap& map, const void* shared,
                                               int c0, int c1, int c2, EMULATOR_SITE) {
    const int at[] = {c0, c1, c2};
    emulator::tensor_store(&map, shared, 3, at, site);
}
inline void cp_async_bulk_tensor_global_shared(const TensorMap& map, const void* shared,
                                               int c0, int c1, int c2, int c3, EMULATOR_SITE) {
    const int at[] = {c0, c1, c2, c3};
    emulator::tensor_store(&map, shared, 4, at, site);
}
inline void cp_async_bulk_tensor_global_shared(const TensorMap& map, const void* shared,
                                               int c0, int c1, int c2, int c3, int c4, EMULATOR_SITE) {
    const int at[] = {c0, c1, c2, c3, c4};
    emulator::tensor_store(&map, shared, 5, at, site);
}

}  // namespace leanconv
