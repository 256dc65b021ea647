// Two threads of control and the step from one to the other: what the emulator's runtime makes its fibres of.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
// Saves the callee-saved registers and the stack pointer, and takes over those saved in `to`. swapcontext would do, but
// it enters the kernel twice for the signal mask, thirty times the cost.
struct Context {
    void* stack_pointer = nullptr;
};
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, .-emulator_switch
.section .note.GNU-stack,"",@progbits
.text
)");
static void switch_context(Context& from, Context& to) { emulator_switch(&from.stack_pointer, to.stack_pointer); }
static void make_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
    // At entry a function expects rsp = 16n + 8, the place of a return address that is never used.
    auto top = reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t{15};
    auto* slot = reinterpret_cast<void**>(top);
    *--slot = nullptr;
    *--slot = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--slot = nullptr;
    context.stack_pointer = slot;
}
#else
#include <ucontext.h>
struct Context {
    ucontext_t state;
};
static void switch_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }
static void make_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
    getcontext(&context.state);
    context.state.uc_stack.ss_sp = stack;
    context.state.uc_stack.ss_size = bytes;
    context.state.uc_link = nullptr;
    makecontext(&context.state, entry, 0);
}
#endif
