// The CPU twin of ptx/registers.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

namespace leanconv {

template <int count>
inline void set_registers_up(EMULATOR_SITE) {
    static_assert(count >= 24 && count <= 256 && count % 8 == 0, "setmaxnreg takes multiples of 8 from 24 to 256");
    emulator::set_registers(true, count, site);
}

template <int count>
inline void set_registers_down(EMULATOR_SITE) {
    static_assert(count >= 24 && count <= 256 && count % 8 == 0, "setmaxnreg takes multiples of 8 from 24 to 256");
    emulator::set_registers(false, count, site);
}

}  // namespace leanconv
