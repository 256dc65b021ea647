// Products that the tensor cores make while the threads go on: wgmma. Each call is held against the rules of the PTX
// manual and those of the project. In order 1 a product is computed when its last thread has issued it, in 0 when the
// first one waits for it, in 2 at one of the two.
//
// From the call to the wait the sanitizer forbids the registers, which here are arrays of the thread. Operands in shared
// memory are compared, at the first wait, with what they were when the first thread made the call.
//
// Not noticed: a thread that writes what lies there already, to a register between fence and call or to an operand.
#include <runtime.h>

#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>

using namespace machine;
using emulator::Factors;

namespace {

const unsigned char* start_of(const Registers& r) { return static_cast<const unsigned char*>(r.at); }

bool overlap(const Registers& a, const Registers& b) {
    return start_of(a) < start_of(b) + b.bytes && start_of(b) < start_of(a) + a.bytes;
}

bool inside(const Registers& part, const Registers& whole) {
    return start_of(part) >= start_of(whole) && start_of(part) + part.bytes <= start_of(whole) + whole.bytes;
}

const char* kind(bool sums) { return sums ? "sums" : "fragments of A"; }

Warpgroup& group_of(int thread) { return own->warpgroups[static_cast<size_t>(thread / group_threads)]; }

Product& product(Warpgroup& group, int64_t index) { return group.products[static_cast<size_t>(index - group.closed)]; }

// Where the units of 16 bytes of a matrix of so many lines lie: two for each line; or, transposed, one for every 8 lines
// of each reduction element.
std::vector<size_t> units_of(const Matrix& matrix, int lines, const char* name, Site site) {
    const uint64_t bits = matrix.descriptor;
    const auto field = [bits](int first) { return static_cast<size_t>(bits >> first & 0x3fff) << 4; };
    const size_t start = field(0), leading = field(16), stride = field(32);
    const size_t spans[] = {0, 128, 64, 32}, span = spans[bits >> 62], pattern = 8 * span;
    if (bits & 0x3fffc000c000c000ull) {
        emulator::fail(site, "wgmma: the descriptor of %s, %016llx, has bits that it must not have; is it one of "
                       "matrix_descriptor()?", name, static_cast<unsigned long long>(bits));
    }
    const bool at_a_row = !matrix.transposed || (stride == pattern && start % span + 2 * static_cast<size_t>(lines) <= span);
    if (span && !at_a_row && start % pattern >= (matrix.transposed ? 1 : span)) {
        emulator::fail(site, "wgmma: %s begins at shared byte %zu, byte %zu of a pattern of its %zu-byte swizzle; patterns begin "
                       "at multiples of %zu", name, start, start % pattern, span, pattern);
    }
    if (span && start % span + 32 > span) {
        emulator::fail(site, "wgmma: %s begins at shared byte %zu, and 32 bytes from there leave the row of %zu", name, start,
                       span);
    }
    if (span && matrix.transposed && stride % pattern) {
        emulator::fail(site, "wgmma: %s has a stride of %zu bytes, no multiple of the %zu of a pattern of its %zu-byte swizzle",
                       name, stride, pattern, span);
    }
    // where patterns lie behind each other, groups of lines may begin at any row
    const size_t unit = stride == pattern ? span : pattern;
    if (span && matrix.transposed && leading % unit) {
        emulator::fail(site, "wgmma: %s has a leading offset of %zu bytes, no multiple of the %zu of a pattern of its %zu-byte "
                       "swizzle", name, leading, pattern, span);
    }
    std::vector<size_t> units;
    const auto add = [&](size_t at) {
        if (span) at ^= at >> 3 & (span - 1) & ~size_t{15};
        if (at + 16 > static_cast<size_t>(shared_bytes)) {
            emulator::fail(site, "wgmma: %s takes shared bytes %zu to %zu of %ld", name, at, at + 16,
                           static_cast<long>(shared_bytes));
        }
        units.push_back(at);
    };
    const auto count = static_cast<size_t>(lines);
    if (!matrix.transposed) {
        for (size_t line = 0; line < count; ++line) {
            const size_t at = start + line / 8 * stride + line % 8 * (span ? span : 16);
            for (size_t half = 0; half < 2; ++half) add(at + half * (span ? 16 : leading));
        }
        return units;
    }
    for (size_t k = 0; k < depth; ++k) {
        for (size_t line = 0; line < count; line += 8) {
            if (span) add(start + 2 * line / span * leading + k / 8 * stride + k % 8 * span + 2 * line % span);
            else add(start + line / 8 * stride + k / 8 * leading + k % 8 * 16);
        }
    }
    return units;
}

std::vector<unsigned char> read_units(const std::vector<size_t>& units) {
    std::vector<unsigned char> bytes(units.size() * 16);
    for (size_t i = 0; i < units.size(); ++i) __builtin_memcpy(bytes.data() + 16 * i, ::shared + units[i], 16);
    return bytes;
}

void take_operand(const Matrix& matrix, int lines, const char* name, std::vector<size_t>& units,
                  std::vector<unsigned char>& bytes, Site site) {
    units = units_of(matrix, lines, name, site);
    char what[32];
    snprintf(what, sizeof what, "wgmma, operand %s", name);
    for (const size_t at : units) {
        check_free(at, 16, false, what, site);
        check_fenced(at, 16, what, site);
    }
    bytes = read_units(units);
}

void check_unchanged(const Product& p, const std::vector<size_t>& units, const std::vector<unsigned char>& bytes,
                     const char* name, Site wait) {
    for (size_t i = 0; i < bytes.size(); ++i) {
        const size_t at = units[i / 16] + i % 16;
        if (::shared[at] == bytes[i]) continue;
        emulator::fail(p.site, "wgmma: shared byte %zu, of operand %s, was overwritten before the wgmma_wait_group at %s:%d",
                       at, name, base_name(wait.file), wait.line);
    }
}

// By lines, or by reduction elements; of TF32 there are half as many.
std::vector<double> widen_lines(const std::vector<unsigned char>& bytes, Factors factors, bool transposed, bool by_lines) {
    std::vector<double> to(bytes.size() / 2);
    const size_t lines = to.size() / depth;
    const auto place = [=](size_t line, size_t k) { return by_lines ? line * depth + k : k * lines + line; };
    if (factors == Factors::tf32) {
        for (size_t i = 0; i < bytes.size() / 4; ++i) {
            unsigned bits;
            __builtin_memcpy(&bits, bytes.data() + 4 * i, sizeof bits);
            to[place(i / (depth / 2), i % (depth / 2))] = widen_tf32(bits);
        }
        return to;
    }
    for (size_t i = 0; i < to.size(); ++i) {
        unsigned short bits;
        __builtin_memcpy(&bits, bytes.data() + 2 * i, sizeof bits);
        to[transposed ? place(i % lines, i / lines) : place(i / depth, i % depth)] = widen(bits, factors == Factors::bfloat16);
    }
    return to;
}

void compute(Product& p) {
    p.computed = true;
    std::vector<double> a(group_rows * depth);
    if (p.a_in_registers) {
        for (int thread = 0; thread < group_threads; ++thread) {
            const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
            const bool bfloat16 = p.factors == Factors::bfloat16;
            for (int i = 0; i < 4; ++i) {
                if (p.factors == Factors::tf32) {
                    a[static_cast<size_t>((row + i % 2 * 8) * depth + column / 2 + i / 2 * 4)] = widen_tf32(p.a[thread][i]);
                    continue;
                }
                double* at = &a[static_cast<size_t>((row + i % 2 * 8) * depth + column + i / 2 * 8)];
                at[0] = widen(static_cast<unsigned short>(p.a[thread][i]), bfloat16);
                at[1] = widen(static_cast<unsigned short>(p.a[thread][i] >> 16), bfloat16);
            }
        }
    } else {
        a = widen_lines(p.a_bytes, p.factors, p.a_matrix.transposed, true);
    }
    const std::vector<double> b = widen_lines(p.b_bytes, p.factors, p.b_matrix.transposed, false);
    for (int row = 0; row < group_rows; ++row) {
        float sums[most_lines] = {};
        // those of four threads
        const auto each = [&](auto move) {
            for (int i = 0; i < 2 * p.count; ++i) {
                const int thread = row / 16 * 32 + row % 8 * 4 + i % 8 / 2;
                move(p.sums[thread][i / 8 * 4 + row % 16 / 8 * 2 + i % 2], sums[i]);
            }
        };
        if (p.add) each([](float mine, float& there) { there = mine; });
        add_row(sums, 2 * p.count, &a[static_cast<size_t>(row * depth)], b.data(), p.factors);
        each([](float& mine, float there) { mine = there; });
    }
}

// The first thread waits for all products before `end`.
void finish(Warpgroup& group, int64_t end, Site wait) {
    for (int64_t i = group.closed; i < end; ++i) {
        Product& p = product(group, i);
        if (p.waited) continue;
        check_unchanged(p, p.a_units, p.a_bytes, "A", wait);
        check_unchanged(p, p.b_units, p.b_bytes, "B", wait);
        if (!p.computed) compute(p);
        p.waited = true;
    }
}

bool different(const Matrix& a, const Matrix& b) {
    return a.descriptor != b.descriptor || a.transposed != b.transposed;
}

void check_alike(const Product& p, const ProductCall& mine, Site site) {
    const bool same_site = p.site.line == site.line && (p.site.file == site.file || !strcmp(p.site.file, site.file));
    const char* differ = nullptr;
    if (!same_site || p.count != mine.count || p.factors != mine.factors || p.a_in_registers != mine.a_in_registers) {
        differ = "make different calls";
    } else if (different(p.b_matrix, mine.b_matrix)) {
        differ = "have different descriptors of B";
    } else if (different(p.a_matrix, mine.a_matrix)) {
        differ = "have different descriptors of A";
    } else if (p.add != mine.add) {
        differ = "disagree whether to add";
    }
    if (!differ) return;
    emulator::fail(site, "wgmma: threads %d and %d of one warpgroup %s, thread %d at %s:%d", p.caller, current, differ, p.caller,
                   base_name(p.site.file), p.site.line);
}

// Registers that a product takes: handed over by a fence and as they were, or sums that the one before adds to.
void check_registers(const Fibre& self, const Registers& r, bool sums, Site site) {
    bool guarded = false;  // a fragment that a product in flight takes too: nobody can have written to it
    for (const InFlight& other : self.products.in_flight) {
        if (!overlap(other.registers, r)) continue;
        const bool same = other.registers.at == r.at && other.registers.bytes == r.bytes;
        if (sums && other.sums && same) return;
        if (!sums && !other.sums && same) {
            guarded = true;
            continue;
        }
        emulator::fail(site, "wgmma: its %s are %s of the wgmma at %s:%d, which is under way%s", kind(sums), kind(other.sums),
                       base_name(other.site.file), other.site.line,
                       sums && other.sums ? " and has another shape" : "");
    }
    if (guarded) return;
    for (const Handed& handed : self.products.handed) {
        if (!inside(r, handed.registers)) continue;
        const long offset = start_of(r) - start_of(handed.registers);
        if (!memcmp(r.at, handed.value.data() + offset, r.bytes)) return;
        emulator::fail(site, "wgmma: thread %d has written to its %s since the last wgmma_fence() that names them", current,
                       kind(sums));
    }
    emulator::fail(site, "wgmma: no wgmma_fence() names its %s since they were the thread's own", kind(sums));
}

// These registers are no longer handed over.
void take_back(ThreadProducts& mine, const Registers& r) {
    std::vector<Handed> left;
    for (const Handed& h : mine.handed) {
        const long from = std::max(start_of(r) - start_of(h.registers), 0L), size = static_cast<long>(h.registers.bytes);
        const long to = std::min(start_of(r) - start_of(h.registers) + static_cast<long>(r.bytes), size);
        const auto keep = [&](long first, long end) {
            if (first >= end) return;
            left.push_back({{start_of(h.registers) + first, static_cast<size_t>(end - first)},
                            {h.value.begin() + first, h.value.begin() + end}});
        };
        if (from >= to) {
            left.push_back(h);
        } else {
            keep(0, from);
            keep(to, size);
        }
    }
    mine.handed = left;
}

void forbid(Fibre& self, const InFlight& registers) {
    self.products.in_flight.push_back(registers);
    __asan_poison_memory_region(registers.registers.at, registers.registers.bytes);
}

// Products that all have waited for are gone.
void forget(int first_thread) {
    Warpgroup& group = group_of(first_thread);
    int64_t least = INT64_MAX;
    for (int i = 0; i < group_threads; ++i) least = std::min(least, fibres[first_thread + i].products.waited);
    for (; group.closed < least; ++group.closed) group.products.pop_front();
}

}  // namespace

namespace machine {

void check_no_product_reads(size_t at, size_t bytes, const char* what, Site site) {
    for (const Warpgroup& group : own->warpgroups) {
        for (const Product& p : group.products) {
            if (p.waited) continue;
            for (const auto* units : {&p.a_units, &p.b_units}) {
                for (const size_t unit : *units) {
                    if (unit >= at + bytes || at >= unit + 16) continue;
                    emulator::fail(site, "%s: the wgmma at %s:%d may still read shared bytes %zu to %zu: nobody has waited for it",
                                   what, base_name(p.site.file), p.site.line, unit, unit + 16);
                }
            }
        }
    }
}

void leave_products(Fibre& self) {
    ThreadProducts& mine = self.products;
    Warpgroup& group = group_of(current);
    if (mine.waited < mine.made) {
        emulator::fail(product(group, mine.waited).site, "wgmma: thread %d leaves the kernel without having waited for it",
                       current);
    }
    if (mine.made < group.closed + static_cast<int64_t>(group.products.size())) {
        const Product& p = product(group, mine.made);
        emulator::fail(p.site, "warp divergence: thread %d is in wgmma, thread %d of its warpgroup has left the kernel", p.caller,
                       current);
    }
}

void say_products(const unsigned char* address) {
    if (current < 0) return;
    for (const InFlight& r : fibres[current].products.in_flight) {
        if (!overlap(r.registers, {address, 1})) continue;
        fprintf(stderr, "emulator: it is %s of the wgmma at %s:%d, and no wgmma_wait_group() has given them back\n", kind(r.sums),
                base_name(r.site.file), r.site.line);
        return;
    }
}

}  // namespace machine

namespace emulator {

unsigned long long matrix_descriptor(const void* start, int leading, int stride, int swizzle, Site site) {
    const size_t at = shared_range(start, 16, 16, "matrix_descriptor", site);
    if (leading % 16 || leading < 0 || leading > 0x3fff0) {
        fail(site, "matrix_descriptor: leading %d is no multiple of 16 from 0 to %d", leading, 0x3fff0);
    }
    if (stride % 16 || stride < 0 || stride > 0x3fff0) {
        fail(site, "matrix_descriptor: stride %d is no multiple of 16 from 0 to %d", stride, 0x3fff0);
    }
    if (swizzle != 0 && swizzle != 32 && swizzle != 64 && swizzle != 128) {
        fail(site, "matrix_descriptor: swizzle %d is none of 0, 32, 64 and 128", swizzle);
    }
    const unsigned long long kind = swizzle == 128 ? 1 : swizzle == 64 ? 2 : swizzle == 32 ? 3 : 0;
    return kind << 62 | static_cast<unsigned long long>(stride / 16) << 32 | static_cast<unsigned>(leading / 16) << 16 | at / 16;
}

void wgmma_fence(const Registers* named, Site site) {
    ThreadProducts& mine = fibres[current].products;
    for (; named->bytes; ++named) {
        for (const InFlight& r : mine.in_flight) {
            if (!overlap(r.registers, *named)) continue;
            fail(site, "wgmma_fence: names %s of the wgmma at %s:%d, which is under way", kind(r.sums), base_name(r.site.file),
                 r.site.line);
        }
        take_back(mine, *named);
        mine.handed.push_back({*named, {start_of(*named), start_of(*named) + named->bytes}});
    }
}

void wgmma(Factors factors, float* sums, int count, const unsigned* a, Matrix a_matrix, Matrix b_matrix, bool add, Site site) {
    const int first = current / group_threads * group_threads, place = current - first;
    if (first + group_threads > block) {
        fail(site, "wgmma: thread %d is in none of four whole neighbouring warps", current);
    }
    Fibre& self = fibres[current];
    const Registers accumulators{sums, sizeof(float) * static_cast<size_t>(count)}, fragments{a, 4 * sizeof(unsigned)};
    check_registers(self, accumulators, true, site);
    if (a) check_registers(self, fragments, false, site);

    self.products.loaded.clear();
    Warpgroup& group = group_of(current);
    const int64_t index = self.products.made++;
    const ProductCall mine{site, current, factors, add, count, a != nullptr, a_matrix, b_matrix};
    if (index == group.closed + static_cast<int64_t>(group.products.size())) {
        for (int thread = first; thread < first + group_threads; ++thread) {
            if (fibres[thread].state != finished) continue;
            fail(site, "warp divergence: thread %d is in wgmma, thread %d of its warpgroup has left the kernel", current, thread);
        }
        Product& made = group.products.emplace_back();
        static_cast<ProductCall&>(made) = mine;
        if (!a) take_operand(a_matrix, group_rows, "A", made.a_units, made.a_bytes, site);
        take_operand(b_matrix, 2 * count, "B", made.b_units, made.b_bytes, site);
    }
    Product& p = product(group, index);
    check_alike(p, mine, site);
    p.sums[place] = sums;
    if (a) {
        __asan_unpoison_memory_region(a, fragments.bytes);  // until forbid() below: another product may have it too
        memcpy(p.a[place], a, sizeof p.a[place]);
    }
    forbid(self, {index, accumulators, true, site});
    if (a) forbid(self, {index, fragments, false, site});
    if (++p.made < group_threads) return;
    for (int thread = first; thread < first + group_threads; ++thread) {
        Fibre& fibre = fibres[thread];
        if (fibre.state == at_products && fibre.products.wanted <= index + 1) fibre.state = running;
    }
    // NOTE: those before it are computed first, for they may have the same sums.
    if (order == 1 || (order == 2 && place % 2)) {
        for (int64_t i = group.closed; i <= index; ++i) {
            if (Product& before = product(group, i); !before.computed) compute(before);
        }
    }
}

void wgmma_commit_group() {
    ThreadProducts& mine = fibres[current].products;
    mine.groups.push_back(mine.made);
}

void wgmma_wait_group(int pending, const Registers* named, Site site) {
    Fibre& self = fibres[current];
    ThreadProducts& mine = self.products;
    Warpgroup& group = group_of(current);
    const auto kept = static_cast<size_t>(pending);
    int64_t end = mine.waited;
    if (mine.groups.size() > kept) {
        end = mine.groups[mine.groups.size() - kept - 1];
        mine.groups.erase(mine.groups.begin(), mine.groups.end() - static_cast<long>(kept));
    }
    if (end > mine.waited && product(group, end - 1).made < group_threads) {
        self.state = at_products;
        self.site = site;
        mine.wanted = end;
        leave_fibre();
    }
    finish(group, end, site);
    mine.waited = end;
    forget(current / group_threads * group_threads);

    std::vector<InFlight> back;
    const auto kept_from = std::stable_partition(mine.in_flight.begin(), mine.in_flight.end(),
                                                 [end](const InFlight& r) { return r.product < end; });
    back.assign(mine.in_flight.begin(), kept_from);
    mine.in_flight.erase(mine.in_flight.begin(), kept_from);
    for (const InFlight& r : back) __asan_unpoison_memory_region(r.registers.at, r.registers.bytes);
    for (const InFlight& r : mine.in_flight) __asan_poison_memory_region(r.registers.at, r.registers.bytes);
    for (const Registers* n = named; n->bytes; ++n) {
        for (const InFlight& r : mine.in_flight) {
            if (!overlap(r.registers, *n)) continue;
            fail(site, "wgmma_wait_group: names %s of the wgmma at %s:%d, which is still under way", kind(r.sums),
                 base_name(r.site.file), r.site.line);
        }
    }
    for (const InFlight& r : back) {
        bool used = false, given = false;
        for (const InFlight& other : mine.in_flight) used |= overlap(other.registers, r.registers);
        for (const Registers* n = named; n->bytes; ++n) given |= inside(r.registers, *n);
        if (!used && !given) {
            fail(site, "wgmma_wait_group: does not name %s of the wgmma at %s:%d, which is complete; the compiler may use them "
                 "before the wait", kind(r.sums), base_name(r.site.file), r.site.line);
        }
        if (!used) take_back(mine, r.registers);
    }
}

}  // namespace emulator
