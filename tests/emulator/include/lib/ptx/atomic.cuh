// The CPU twin of kernels/lib/ptx/atomic.cuh: same names, same signatures, the rules of the PTX manual checked at each call.
#pragma once

namespace leanconv {

inline unsigned atom_add_acq_rel(unsigned* counter, unsigned value) {
    const unsigned before = *counter;
    *counter = before + value;
    return before;
}

// NOTE: blocks run one after the other here: a block that waited for a later one would wait for ever.
inline unsigned ld_acquire(const unsigned* counter) { return *counter; }

}  // namespace leanconv
