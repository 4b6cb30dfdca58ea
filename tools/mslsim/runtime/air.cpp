// What kernels compiled by Apple's compiler call. `air.py` gives them these instead of a GPU's instructions; each does
// what the function of the same name in include/ does. No lines are known here: an operation is named by a number.
#include <cmath>
#include <cstring>

#include "worker.h"

namespace mslsim {

enum Operation { kSum = 1, kMax, kShuffle, kBarrier, kMultiply };

#define AIR(NAME) extern "C" __attribute__((used)) NAME

AIR(void* mslsim_air_buffer(int index)) { return buffer(index); }

// Where the thread stands: three numbers, by the name of the attribute.
AIR(void mslsim_air_position(const char* name, uint* out)) {
  const Here& h = here();
  const struct { const char* name; Position value; } all[] = {
    {"thread_position_in_grid", h.thread_position_in_grid},
    {"thread_position_in_threadgroup", h.thread_position_in_threadgroup},
    {"threadgroup_position_in_grid", h.threadgroup_position_in_grid},
    {"threads_per_grid", h.threads_per_grid},
    {"threads_per_threadgroup", h.threads_per_threadgroup},
    {"threadgroups_per_grid", h.threadgroups_per_grid},
    {"thread_index_in_threadgroup", {{h.thread_index_in_threadgroup, 0, 0}}},
    {"thread_index_in_simdgroup", {{h.thread_index_in_simdgroup, 0, 0}}},
    {"simdgroup_index_in_threadgroup", {{h.simdgroup_index_in_threadgroup, 0, 0}}},
    {"simdgroups_per_threadgroup", {{h.simdgroups_per_threadgroup, 0, 0}}},
    {"threads_per_simdgroup", {{h.threads_per_simdgroup, 0, 0}}},
  };
  for (const auto& entry : all)
    if (!std::strcmp(entry.name, name)) std::memcpy(out, entry.value.v, sizeof entry.value.v);
}

// Two elements of each matrix; c is added last, as in include/mslsim/matrix.h.
AIR(void mslsim_air_multiply(const float* a, const float* b, const float* c, float* out)) {
  float product[2];
  multiply(a, b, product, kMultiply);
  for (int i = 0; i < 2; i++) out[i] = c[i] + product[i];
}

AIR(float mslsim_air_sum(float x)) { return fold<float>(x, Fold::sum, kSum); }
AIR(float mslsim_air_max(float x)) { return fold<float>(x, Fold::max, kMax); }
AIR(float mslsim_air_shuffle_xor(float x, int mask)) {
  float other;
  exchange(&x, &other, sizeof x, int(here().thread_index_in_simdgroup) ^ mask, kShuffle);
  return other;
}
AIR(void mslsim_air_barrier(int flags, int all)) {
  barrier(all ? Scope::threadgroup : Scope::simdgroup, uint(flags), kBarrier);
}
AIR(float mslsim_air_exp(float x)) { return __builtin_expf(x); }
AIR(float mslsim_air_exp2(float x)) { return __builtin_exp2f(x); }
AIR(float mslsim_air_log2(float x)) { return __builtin_log2f(x); }
AIR(float mslsim_air_fmax(float x, float y)) { return __builtin_fmaxf(x, y); }

#undef AIR

}  // namespace mslsim
