// The CPU twin of ptx/prefetch.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

namespace leanconv {

// Stricter than the machine, which ignores an address that is no memory: what is fetched must belong to an array.
inline void prefetch_l2(const void* at) { static_cast<void>(*static_cast<const volatile char*>(at)); }

}  // namespace leanconv
