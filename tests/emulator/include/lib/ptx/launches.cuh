// The CPU twin of kernels/lib/ptx/launches.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

namespace leanconv {

// Launches run one after the other here.
inline void griddepcontrol_wait() {}

}  // namespace leanconv
