// The CPU twin of ptx/launches.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

namespace leanconv {

// Launches run one after the other here, but what earlier ones write is out of reach until a thread of the cluster waits.
inline void griddepcontrol_wait() { emulator::wait_for_launches(); }

}  // namespace leanconv
