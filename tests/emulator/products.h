// What the tensor cores have under way, and their arithmetic. Here they are made in wgmma.cpp and mma.cpp.
#pragma once

#include <emulator.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace machine {

using emulator::Matrix;
using emulator::Registers;
using emulator::Site;

struct Block;
struct Fibre;

// Of tf32 a product has half as many reduction elements: the others are not read.
constexpr int group_threads = 128, group_rows = 64, depth = 16, most_lines = 256;

// What the threads of a warpgroup must agree on.
struct ProductCall {
    Site site;
    int caller;  // the first thread
    emulator::Factors factors;
    bool add;
    int count;            // sums of a thread
    bool a_in_registers;  // else a_matrix counts
    Matrix a_matrix, b_matrix;
};

// One wgmma of a warpgroup. It is issued when all its threads have made the call.
struct Product : ProductCall {
    int made = 0;  // by how many threads
    float* sums[group_threads];
    unsigned a[group_threads][4];                 // what the registers held
    std::vector<size_t> a_units, b_units;         // where in shared memory units of 16 bytes lie
    std::vector<unsigned char> a_bytes, b_bytes;  // what they held when the first thread made the call
    bool computed = false;
    bool waited = false;  // a thread knows that it is complete
};

struct Warpgroup {
    std::deque<Product> products;
    int64_t closed = 0;  // those that all threads have waited for and that are gone
};

// A part of a thread's registers, with what they held at the fence.
struct Handed {
    Registers registers;
    std::vector<unsigned char> value;
};

// Registers of a product under way: the sanitizer forbids them.
struct InFlight {
    int64_t product;
    Registers registers;
    bool sums;
    Site site;
};

// What a thread has loaded and nothing has used.
struct Loaded {
    size_t at;
    Site site;
};

// Of a thread.
struct ThreadProducts {
    int64_t made = 0, waited = 0, wanted = 0;
    std::vector<int64_t> groups;  // that have not been waited for: how many products were made before each one's end
    std::vector<Handed> handed;
    std::vector<InFlight> in_flight;
    std::vector<Loaded> loaded;  // units of 16 bytes
};

// wgmma.cpp
void leave_products(Fibre& fibre);
void say_products(const unsigned char* address);  // what keeps the sanitizer from it
// No product that nobody has waited for has operands here.
void check_no_product_reads(size_t at, size_t bytes, const char* what, Site site);

// mma.cpp
// No thread has loaded from here what nothing has used: the values may come after the copy.
void check_loads_used(size_t at, size_t bytes, const char* what, Site site);
// Adds to a row of sums the products of a row of A with so many lines of B, which lies by reduction elements.
void add_row(float* sums, int lines, const double* a, const double* b, emulator::Factors factors);
double widen(unsigned short bits, bool bfloat16);
double widen_tf32(unsigned bits);
void give_matrices(int first_thread);
void multiply_matrices(int first_thread);

}  // namespace machine
