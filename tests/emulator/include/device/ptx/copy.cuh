// The CPU twin of ptx/copy.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

namespace leanconv {

inline void cp_async_4(void* shared, const void* global, bool valid, EMULATOR_SITE) {
    emulator::cp_async(shared, global, 4, valid, site);
}

inline void cp_async_16(void* shared, const void* global, bool valid, EMULATOR_SITE) {
    emulator::cp_async(shared, global, 16, valid, site);
}

inline void cp_async_commit_group() { emulator::cp_async_commit_group(); }

template <int pending>
inline void cp_async_wait_group() {
    static_assert(pending >= 0, "cp.async.wait_group takes a number of groups");
    emulator::cp_async_wait_group(pending);
}

}  // namespace leanconv
