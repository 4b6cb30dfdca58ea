// Barriers, and the operations that the 32 lanes of a simdgroup do together.
#pragma once
#include "math.h"
#include "runtime.h"

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

inline void threadgroup_barrier(mem_flags flags, MSLSIM_LINE) {
  mslsim::barrier(mslsim::Scope::threadgroup, uint(flags), line);
}
inline void simdgroup_barrier(mem_flags flags, MSLSIM_LINE) {
  mslsim::barrier(mslsim::Scope::simdgroup, uint(flags), line);
}

// Reductions: the lanes' values in pairs, which is one of the orders a GPU may take.
#define MSLSIM_FOLD(NAME, HOW, T)                                                                        \
  inline T NAME(T x, MSLSIM_LINE) { return mslsim::fold<T>(x, mslsim::Fold::HOW, line); }
#define MSLSIM_FOLDS(T)                                                                                  \
  MSLSIM_FOLD(simd_sum, sum, T)                                                                          \
  MSLSIM_FOLD(simd_product, product, T)                                                                  \
  MSLSIM_FOLD(simd_max, max, T)                                                                          \
  MSLSIM_FOLD(simd_min, min, T)                                                                          \
  inline T simd_prefix_inclusive_sum(T x, MSLSIM_LINE) { return mslsim::scan<T>(x, true, line); }        \
  inline T simd_prefix_exclusive_sum(T x, MSLSIM_LINE) { return mslsim::scan<T>(x, false, line); }
MSLSIM_FOLDS(float)
MSLSIM_FOLDS(half)
MSLSIM_FOLDS(int)
MSLSIM_FOLDS(uint)
#undef MSLSIM_FOLDS
#undef MSLSIM_FOLD
template <int N, class T> vec<T, N> simd_sum(vec<T, N> x, MSLSIM_LINE) {
  for (int i = 0; i < N; i++) x[i] = simd_sum(x[i], line);
  return x;
}

// Shuffles take any type but their lane is a ushort. What lies past the ends is undefined, so that it reads as a NaN.
namespace detail {
template <class T> T from_lane(T x, int lane, int line) {
  T other;
  mslsim::exchange(&x, &other, sizeof(T), lane, line);
  return other;
}
inline int me() { return int(mslsim::here().thread_index_in_simdgroup); }
}  // namespace detail

template <class T> T simd_shuffle(T x, ushort lane, MSLSIM_LINE) { return detail::from_lane(x, lane, line); }
template <class T> T simd_broadcast(T x, ushort lane, MSLSIM_LINE) { return detail::from_lane(x, lane, line); }
template <class T> T simd_broadcast_first(T x, MSLSIM_LINE) { return detail::from_lane(x, 0, line); }
template <class T> T simd_shuffle_xor(T x, ushort mask, MSLSIM_LINE) {
  return detail::from_lane(x, detail::me() ^ mask, line);
}
template <class T> T simd_shuffle_down(T x, ushort delta, MSLSIM_LINE) {
  return detail::from_lane(x, detail::me() + delta, line);
}
template <class T> T simd_shuffle_up(T x, ushort delta, MSLSIM_LINE) {
  return detail::from_lane(x, detail::me() - delta, line);
}
template <class T> T simd_shuffle_rotate_down(T x, ushort delta, MSLSIM_LINE) {
  return detail::from_lane(x, (detail::me() + delta) % mslsim::kLanes, line);
}

struct simd_vote {
  typedef ulong vote_t;
  ulong mask;
  explicit operator vote_t() const { return mask; }
  bool all() const { return mask == 0xffffffffu; }
  bool any() const { return mask != 0; }
};
inline simd_vote simd_ballot(bool x, MSLSIM_LINE) { return simd_vote{mslsim::ballot(x, line)}; }
inline bool simd_any(bool x, MSLSIM_LINE) { return mslsim::ballot(x, line) != 0; }
inline bool simd_all(bool x, MSLSIM_LINE) { return mslsim::ballot(!x, line) == 0; }
inline bool simd_is_first() { return detail::me() == 0; }

}  // namespace metal
