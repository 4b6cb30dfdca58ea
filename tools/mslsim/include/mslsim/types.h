// Scalars of MSL: sized integers, half and bfloat. No standard header is included anywhere here: compiling a kernel
// then takes a fraction of a second.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;

namespace mslsim {

inline uint bits_of(float x) { uint u; __builtin_memcpy(&u, &x, 4); return u; }
inline float float_of(uint u) { float x; __builtin_memcpy(&x, &u, 4); return x; }

struct Binary16 {
  static ushort pack(float x) {  // to nearest, ties to even
    const uint sign = (bits_of(x) >> 16) & 0x8000u, u = bits_of(x) & 0x7fffffffu;
    if (u > 0x7f800000u) return ushort(sign | 0x7e00u);
    if (u >= 0x477ff000u) return ushort(sign | 0x7c00u);  // 65520 and above
    // Below the least normal number the adder rounds: 0.5 has just the unit of half's subnormals.
    if (u < 0x38800000u) return ushort(sign | (bits_of(float_of(u) + 0.5f) - bits_of(0.5f)));
    return ushort(sign | ((u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13));
  }
  static float unpack(ushort h) {
    const uint sign = (h & 0x8000u) << 16, u = (h & 0x7fffu) << 13;
    if (u >= 0x0f800000u) return float_of(sign | 0x7f800000u | u);
    return float_of(sign | bits_of(float_of(u) * 0x1p112f));
  }
};

struct Brain16 {
  static ushort pack(float x) {
    const uint u = bits_of(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return ushort((u >> 16 & 0x8000u) | 0x7fc0u);
    return ushort((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  static float unpack(ushort h) { return float_of(uint(h) << 16); }
};

// A float of 16 bits: every operation is done in float and rounded, which equals one done in 16 bits.
template <class Format>
struct Small {
  ushort bits;

  Small() = default;
  Small(float x) : bits(Format::pack(x)) {}
  Small(double x) : Small(float(x)) {}
  Small(int x) : Small(float(x)) {}
  Small(uint x) : Small(float(x)) {}
  Small(long x) : Small(float(x)) {}
  Small(ulong x) : Small(float(x)) {}
  operator float() const { return Format::unpack(bits); }

  Small operator-() const { return Small(-float(*this)); }

// With an integer the result is small, with a float it is a float.
#define MSLSIM_WITH(OP, NUMBER, RESULT)                                                                  \
  friend RESULT operator OP(Small a, NUMBER b) { return RESULT(float(a) OP float(b)); }                  \
  friend RESULT operator OP(NUMBER a, Small b) { return RESULT(float(a) OP float(b)); }
#define MSLSIM_OPERATOR(OP)                                                                              \
  friend Small operator OP(Small a, Small b) { return Small(float(a) OP float(b)); }                     \
  MSLSIM_WITH(OP, float, float)                                                                          \
  MSLSIM_WITH(OP, int, Small)                                                                            \
  MSLSIM_WITH(OP, uint, Small)                                                                           \
  MSLSIM_WITH(OP, long, Small)                                                                           \
  MSLSIM_WITH(OP, ulong, Small)                                                                          \
  Small& operator OP##=(Small b) { return *this = *this OP b; }                                          \
  Small& operator OP##=(float b) { return *this = Small(float(*this) OP b); }
  MSLSIM_OPERATOR(+)
  MSLSIM_OPERATOR(-)
  MSLSIM_OPERATOR(*)
  MSLSIM_OPERATOR(/)
#undef MSLSIM_OPERATOR
#undef MSLSIM_WITH
};

}  // namespace mslsim

typedef mslsim::Small<mslsim::Binary16> half;
typedef mslsim::Small<mslsim::Brain16> bfloat;

inline half operator""h(long double x) { return half(float(x)); }
inline bfloat operator""bf(long double x) { return bfloat(float(x)); }
