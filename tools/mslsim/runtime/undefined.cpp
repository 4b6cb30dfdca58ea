// g++ -fsanitize=bounds,... calls these where C++ leaves a result undefined; so does MSL.
#include <cstdio>

#include "worker.h"

namespace mslsim {

[[noreturn]] static void undefined(void* caller, const char* text) {
  Worker& w = *worker;
  w.report.memory = 0;
  w.fail(Fault::arithmetic, uint(uintptr_t(caller) - w.launch->image), text);
}

[[noreturn]] static void out_of_range(void* caller, long index) {
  Worker& w = *worker;
  w.report.memory = 0;
  char text[64];
  std::snprintf(text, sizeof text, "index %ld is outside of its array", index);
  w.fail(Fault::bounds, uint(uintptr_t(caller) - w.launch->image), text);
}

}  // namespace mslsim

#define MSLSIM_HANDLER(NAME, TEXT)                                                                         \
  extern "C" void __ubsan_handle_##NAME(void*, ulong, ulong) { mslsim::undefined(__builtin_return_address(0), TEXT); }
MSLSIM_HANDLER(add_overflow, "signed overflow of a sum")
MSLSIM_HANDLER(sub_overflow, "signed overflow of a difference")
MSLSIM_HANDLER(mul_overflow, "signed overflow of a product")
MSLSIM_HANDLER(negate_overflow, "signed overflow of a negation")
MSLSIM_HANDLER(divrem_overflow, "division by zero, or of the least integer by -1")
MSLSIM_HANDLER(shift_out_of_bounds, "shift by more bits than there are")
extern "C" void __ubsan_handle_type_mismatch_v1(void*, ulong address) {
  using namespace mslsim;
  Worker& w = *worker;
  w.report.memory = 0;
  char text[100];
  std::snprintf(text, sizeof text, "address %#lx is no multiple of its type's alignment", address);
  w.fail(Fault::alignment, uint(uintptr_t(__builtin_return_address(0)) - w.launch->image), text);
}
extern "C" void __ubsan_handle_out_of_bounds(void*, ulong index) {
  mslsim::out_of_range(__builtin_return_address(0), long(index));
}
