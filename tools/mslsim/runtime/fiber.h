// Stacks and how to change from one to another: a dozen instructions where we know the machine, ucontext elsewhere (or
// with -DMSLSIM_UCONTEXT).
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(MSLSIM_UCONTEXT)
#define MSLSIM_UCONTEXT
#endif
#ifdef MSLSIM_UCONTEXT
#include <ucontext.h>
#endif

namespace mslsim {

constexpr size_t kStack = 256 << 10;
// Tops of stacks a power of two apart would all fall into the same few lines of the caches.
constexpr size_t kColours = 32, kColour = 33 * 64;
constexpr size_t kGuard = 16 << 10;  // lowest part of each stack: touching it kills the process, loudly

#ifndef MSLSIM_UCONTEXT

struct Context { void* sp = nullptr; };
extern "C" void mslsim_switch(void** save, void* to);

#if defined(__x86_64__)
constexpr int kSaved = 6;  // rbp rbx r12 r13 r14 r15; `ret` then takes the address above them
asm(R"(
.text
.globl mslsim_switch
.type mslsim_switch, @function
mslsim_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
inline void prepare(Context& c, char* top, void (*start)()) {
  void** sp = reinterpret_cast<void**>(top);
  *--sp = nullptr;  // a return address for `start`, which never returns: keeps the stack aligned as after a call
  *--sp = reinterpret_cast<void*>(start);
  for (int i = 0; i < kSaved; i++) *--sp = nullptr;
  c.sp = sp;
}
#else
asm(R"(
.text
.globl mslsim_switch
.type mslsim_switch, %function
mslsim_switch:
  stp x29, x30, [sp, #-160]!
  stp x19, x20, [sp, #16]
  stp x21, x22, [sp, #32]
  stp x23, x24, [sp, #48]
  stp x25, x26, [sp, #64]
  stp x27, x28, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #16]
  ldp x21, x22, [sp, #32]
  ldp x23, x24, [sp, #48]
  ldp x25, x26, [sp, #64]
  ldp x27, x28, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  ldp x29, x30, [sp], #160
  ret
)");
inline void prepare(Context& c, char* top, void (*start)()) {
  void** sp = reinterpret_cast<void**>(top) - 20;
  for (int i = 0; i < 20; i++) sp[i] = nullptr;
  sp[1] = reinterpret_cast<void*>(start);  // x30
  c.sp = sp;
}
#endif
inline void change(Context& from, Context& to) { mslsim_switch(&from.sp, to.sp); }

#else

struct Context { ucontext_t state; };
inline void prepare(Context& c, char* top, void (*start)()) {
  constexpr size_t kSize = kStack - kGuard - kColours * kColour;
  getcontext(&c.state);
  c.state.uc_stack.ss_sp = top - kSize;
  c.state.uc_stack.ss_size = kSize;
  c.state.uc_link = nullptr;
  makecontext(&c.state, start, 0);
}
inline void change(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

#endif

inline char* new_stacks(size_t count) {
  void* all = mmap(nullptr, count * kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  for (size_t i = 0; i < count; i++) mprotect(static_cast<char*>(all) + i * kStack, kGuard, PROT_NONE);
  return static_cast<char*>(all);
}
inline char* top_of(char* stacks, size_t i) { return stacks + (i + 1) * kStack - i % kColours * kColour; }

}  // namespace mslsim
