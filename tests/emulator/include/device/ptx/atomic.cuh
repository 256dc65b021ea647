// The CPU twin of ptx/atomic.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

namespace leanconv {

inline unsigned atom_add_acq_rel(unsigned* counter, unsigned value) {
    const unsigned before = *counter;
    *counter = before + value;
    return before;
}

// NOTE: only the blocks of a cluster run side by side here: a block that waited for one of a later cluster would wait for ever.
inline unsigned ld_acquire(const unsigned* counter, EMULATOR_SITE) {
    emulator::look_later(site);
    return *counter;
}

}  // namespace leanconv
