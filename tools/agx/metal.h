// Metal's words in C++ for OpenCL: what a compiler for the same GPU needs to choose the same instructions. Compiled only,
// never run. A simdgroup matrix is two elements in each lane, and a product of two of them, which is one instruction
// with two registers for each operand, stands as two FMAs on the same registers.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define device __global
#define constant __constant
#define threadgroup __local
#define thread
#define inline inline __attribute__((always_inline)) // Metal knows no calls
#define INLINE inline
#define METAL_FUNC inline
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;

template <class T, class U> INLINE T as_type(U u) { return __builtin_bit_cast(T, u); }

// The M1 has no bfloat either: one is the upper half of a float.
struct bfloat {
  ushort bits;
  bfloat() = default;
  INLINE bfloat(float x) {
    const uint u = as_type<uint>(x);
    bits = ushort((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  INLINE operator float() const { return as_type<float>(uint(bits) << 16); }
};
struct bfloat4 { ushort4 all; };
struct bfloat2 { ushort2 all; };

#include "traits.h" // the simulator's

namespace metal {

template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));

// Functions of OpenCL's names have others here: a call could mean either.
#define COMMON(T)                                                 \
  INLINE T msl_max(T a, T b) { return ::max(a, b); }              \
  INLINE T msl_min(T a, T b) { return ::min(a, b); }
COMMON(float) COMMON(half) COMMON(short) COMMON(ushort) COMMON(int) COMMON(uint) COMMON(long) COMMON(ulong)
#undef COMMON
INLINE float msl_fabs(float x) { return ::fabs(x); }
INLINE float msl_fma(float a, float b, float c) { return ::fma(a, b, c); }
INLINE bool msl_isnan(float x) { return ::isnan(x) != 0; }
// Fast versions stand for all: which ones a text asks for is no matter of registers.
#define TRANSCENDENTAL                                                 \
  INLINE float msl_exp2(float x) { return ::native_exp2(x); }          \
  INLINE float msl_exp(float x) { return ::native_exp2(x * 1.44269504f); }  \
  INLINE float msl_log2(float x) { return ::native_log2(x); }          \
  INLINE float msl_log(float x) { return ::native_log2(x) * 0.69314718f; }
TRANSCENDENTAL
namespace fast { TRANSCENDENTAL }
#undef TRANSCENDENTAL

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
INLINE void threadgroup_barrier(mem_flags) { barrier(CLK_LOCAL_MEM_FENCE); }
INLINE void simdgroup_barrier(mem_flags) {
  atomic_work_item_fence(CLK_LOCAL_MEM_FENCE, memory_order_acq_rel, memory_scope_sub_group);
}
#define SIMD(T)                                                                                       \
  INLINE T simd_sum(T x) { return sub_group_reduce_add(x); }                                          \
  INLINE T simd_max(T x) { return sub_group_reduce_max(x); }                                          \
  INLINE T simd_min(T x) { return sub_group_reduce_min(x); }                                          \
  INLINE T simd_shuffle_xor(T x, ushort mask) { return sub_group_shuffle_xor(x, uint(mask)); }        \
  INLINE T simd_shuffle(T x, ushort lane) { return sub_group_shuffle(x, uint(lane)); }
SIMD(float) SIMD(int) SIMD(uint)
#undef SIMD
INLINE bool simd_any(bool x) { return sub_group_any(int(x)) != 0; }

template <class T, int Columns, int Rows> struct simdgroup_matrix {
  vec<T, 2> e;
  INLINE vec<T, 2>& thread_elements() { return e; }
  INLINE const vec<T, 2>& thread_elements() const { return e; }
};
template <class T, int Columns, int Rows> INLINE simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, Columns, Rows> m;
  m.e = vec<T, 2>(x);
  return m;
}
INLINE int matrix_row() { const int q = int(get_sub_group_local_id()) / 4; return (q & 4) + int(get_sub_group_local_id()) / 2 % 4; }
INLINE int matrix_column() { const int q = int(get_sub_group_local_id()) / 4; return (q & 2) * 2 + int(get_sub_group_local_id()) % 2 * 2; }
template <class T>
INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const __local T* p, int stride = 8, ulong2 = 0, bool transpose = false) {
  const __local T* at = transpose ? p + matrix_column() * stride + matrix_row() : p + matrix_row() * stride + matrix_column();
  m.e = vec<T, 2>{at[0], at[transpose ? stride : 1]};
}
template <class T> INLINE void simdgroup_store(simdgroup_matrix<T, 8, 8> m, __local T* p, int stride = 8) {
  __local T* at = p + matrix_row() * stride + matrix_column();
  at[0] = m.e[0];
  at[1] = m.e[1];
}
template <class T>
INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<T, 8, 8>& d, simdgroup_matrix<T, 8, 8> a,
                                          simdgroup_matrix<T, 8, 8> b, simdgroup_matrix<T, 8, 8> c) {
  d.e = vec<T, 2>{T(::fma(a.e[0], b.e[0], c.e[0])), T(::fma(a.e[1], b.e[1], c.e[1]))};
}

}  // namespace metal

#define max msl_max
#define min msl_min
#define fabs msl_fabs
#define fma msl_fma
#define isnan msl_isnan
#define exp2 msl_exp2
#define exp msl_exp
#define log2 msl_log2
#define log msl_log
