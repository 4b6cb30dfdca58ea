// Metal's mathematics, over the C library's.
#pragma once
#include "traits.h"
#include "vectors.h"

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT __FLT_MAX__
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX 65504.0f
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX (__INT_MAX__ * 2u + 1u)
#define M_E_F 2.71828182845904523536f
#define M_PI_F 3.14159265358979323846f
#define M_LN2_F 0.69314718055994530942f
#define M_LOG2E_F 1.44269504088896340736f

namespace metal {

// One argument: float, half, and vectors by element.
#define MSLSIM_ONE(NAME, BUILTIN)                                                                        \
  inline float NAME(float x) { return BUILTIN(x); }                                                      \
  inline half NAME(half x) { return half(BUILTIN(float(x))); }                                           \
  template <class T, int N> vec<T, N> NAME(vec<T, N> x) {                                                \
    for (int i = 0; i < N; i++) x[i] = NAME(x[i]);                                                       \
    return x;                                                                                            \
  }
inline float reciprocal_root(float x) { return 1.0f / __builtin_sqrtf(x); }
#define MSLSIM_TRANSCENDENTAL                                                                            \
  MSLSIM_ONE(exp, __builtin_expf)                                                                        \
  MSLSIM_ONE(exp2, __builtin_exp2f)                                                                      \
  MSLSIM_ONE(log, __builtin_logf)                                                                        \
  MSLSIM_ONE(log2, __builtin_log2f)                                                                      \
  MSLSIM_ONE(tanh, __builtin_tanhf)                                                                      \
  MSLSIM_ONE(sqrt, __builtin_sqrtf)                                                                      \
  MSLSIM_ONE(rsqrt, metal::reciprocal_root)                                                              \
  MSLSIM_ONE(sin, __builtin_sinf)                                                                        \
  MSLSIM_ONE(cos, __builtin_cosf)                                                                        \
  MSLSIM_ONE(floor, __builtin_floorf)                                                                    \
  MSLSIM_ONE(ceil, __builtin_ceilf)                                                                      \
  MSLSIM_ONE(rint, __builtin_rintf)                                                                      \
  MSLSIM_ONE(round, __builtin_roundf)                                                                    \
  MSLSIM_ONE(trunc, __builtin_truncf)                                                                    \
  MSLSIM_ONE(fabs, __builtin_fabsf)                                                                      \
  inline float pow(float x, float y) { return __builtin_powf(x, y); }                                    \
  inline float powr(float x, float y) { return __builtin_powf(x, y); }                                   \
  inline float fmax(float a, float b) { return __builtin_fmaxf(a, b); }                                  \
  inline float fmin(float a, float b) { return __builtin_fminf(a, b); }
MSLSIM_TRANSCENDENTAL
namespace fast { MSLSIM_TRANSCENDENTAL }
namespace precise { MSLSIM_TRANSCENDENTAL }
#undef MSLSIM_TRANSCENDENTAL
#undef MSLSIM_ONE

inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// The exact product of two halves fits a float, but its sum with a third may not: the sum is rounded twice there.
inline half fma(half a, half b, half c) { return half(float(double(float(a)) * float(b) + float(c))); }
template <class T, int N> vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  for (int i = 0; i < N; i++) c[i] = fma(a[i], b[i], c[i]);
  return c;
}

// Several arguments of one type: min and max of floats pass over a NaN.
#define MSLSIM_COMMON(T, MAX, MIN)                                                                       \
  inline T max(T a, T b) { return MAX; }                                                                 \
  inline T min(T a, T b) { return MIN; }                                                                 \
  inline T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }                                        \
  inline T select(T a, T b, bool c) { return c ? b : a; }                                                \
  inline T max3(T a, T b, T c) { return max(max(a, b), c); }                                             \
  inline T min3(T a, T b, T c) { return min(min(a, b), c); }
MSLSIM_COMMON(float, __builtin_fmaxf(a, b), __builtin_fminf(a, b))
MSLSIM_COMMON(half, half(__builtin_fmaxf(float(a), float(b))), half(__builtin_fminf(float(a), float(b))))
MSLSIM_COMMON(short, a > b ? a : b, a < b ? a : b)
MSLSIM_COMMON(ushort, a > b ? a : b, a < b ? a : b)
MSLSIM_COMMON(int, a > b ? a : b, a < b ? a : b)
MSLSIM_COMMON(uint, a > b ? a : b, a < b ? a : b)
MSLSIM_COMMON(long, a > b ? a : b, a < b ? a : b)
MSLSIM_COMMON(ulong, a > b ? a : b, a < b ? a : b)
#undef MSLSIM_COMMON
template <class T, int N> vec<T, N> max(vec<T, N> a, vec<T, N> b) {
  for (int i = 0; i < N; i++) a[i] = max(a[i], b[i]);
  return a;
}
template <class T, int N> vec<T, N> min(vec<T, N> a, vec<T, N> b) {
  for (int i = 0; i < N; i++) a[i] = min(a[i], b[i]);
  return a;
}

inline float abs(float x) { return __builtin_fabsf(x); }
inline half abs(half x) { return half(__builtin_fabsf(float(x))); }
inline int abs(int x) { return x < 0 ? -x : x; }
inline float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }
inline float mix(float a, float b, float t) { return a + (b - a) * t; }
inline uint popcount(uint x) { return uint(__builtin_popcount(x)); }
inline ulong popcount(ulong x) { return ulong(__builtin_popcountl(x)); }
inline uint clz(uint x) { return x ? uint(__builtin_clz(x)) : 32u; }
inline uint ctz(uint x) { return x ? uint(__builtin_ctz(x)) : 32u; }

template <class T> struct numeric_limits;
template <> struct numeric_limits<float> {
  static constexpr float max() { return __FLT_MAX__; }
  static constexpr float lowest() { return -__FLT_MAX__; }
  static constexpr float infinity() { return __builtin_inff(); }
};
template <> struct numeric_limits<int> {
  static constexpr int max() { return __INT_MAX__; }
  static constexpr int lowest() { return -__INT_MAX__ - 1; }
};

}  // namespace metal

template <class T, class U> T as_type(U u) {
  static_assert(sizeof(T) == sizeof(U), "as_type keeps the size");
  T t;
  __builtin_memcpy(static_cast<void*>(&t), &u, sizeof t);
  return t;
}
