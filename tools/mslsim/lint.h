// Declarations of Metal's standard library for the lint: only what the specification of MSL lists, with its address
// spaces. Nothing here has a body. Kernels that use more than this are refused: add a declaration when a document or a
// kernel that Apple's compiler is known to take shows it.

#pragma clang system_header

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2))) const
#define threadgroup __attribute__((address_space(3)))
#define thread
#define kernel
#define METAL_FUNC inline __attribute__((always_inline))
#define __METAL_VERSION__ 310
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX 3.402823466e+38f
#define MAXFLOAT 3.402823466e+38f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define M_PI_F 3.14159265358979323846f

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
typedef unsigned long size_t;
typedef _Float16 half;
typedef __bf16 bfloat;

namespace metal {

template <class T> struct identity { typedef T type; };

// Clang has no methods of objects in an address space: vectors can be read from memory whole or by member, but written
// by member only.
template <class T, int N> struct vec;
template <class T> struct vec<T, 2> {
  T x, y;
  vec() = default;
  explicit vec(T);
  vec(T, T);
  template <class U> explicit vec(vec<U, 2>);
  vec(const vec&) = default;
  vec& operator=(const vec&) = default;
  vec(const device vec&);
  vec(const threadgroup vec&);
  vec(constant vec&);
  T& operator[](int);
  const T& operator[](int) const;
};
template <class T> struct vec<T, 3> {
  T x, y, z;
  vec<T, 2> xy;
  vec() = default;
  explicit vec(T);
  vec(T, T, T);
  template <class U> explicit vec(vec<U, 3>);
  vec(const vec&) = default;
  vec& operator=(const vec&) = default;
  vec(const device vec&);
  vec(const threadgroup vec&);
  vec(constant vec&);
  T& operator[](int);
  const T& operator[](int) const;
};
template <class T> struct vec<T, 4> {
  T x, y, z, w;
  vec<T, 2> xy, zw;
  vec<T, 3> xyz;
  vec() = default;
  explicit vec(T);
  vec(T, T, T, T);
  vec(vec<T, 2>, vec<T, 2>);
  template <class U> explicit vec(vec<U, 4>);
  vec(const vec&) = default;
  vec& operator=(const vec&) = default;
  vec(const device vec&);
  vec(const threadgroup vec&);
  vec(constant vec&);
  T& operator[](int);
  const T& operator[](int) const;
};
#define OPERATOR(OP)                                                                        \
  template <class T, int N> vec<T, N> operator OP(vec<T, N>, vec<T, N>);                    \
  template <class T, int N> vec<T, N> operator OP(vec<T, N>, typename identity<T>::type);   \
  template <class T, int N> vec<T, N> operator OP(typename identity<T>::type, vec<T, N>);   \
  template <class T, int N> vec<T, N>& operator OP##=(vec<T, N>&, vec<T, N>);               \
  template <class T, int N> vec<T, N>& operator OP##=(vec<T, N>&, typename identity<T>::type);
OPERATOR(+) OPERATOR(-) OPERATOR(*) OPERATOR(/)
#undef OPERATOR
template <class T, int N> vec<T, N> operator-(vec<T, N>);
template <class T, int N> T dot(vec<T, N>, vec<T, N>);

template <class T> void lint_stored(device T*, typename identity<T>::type);
template <class T> void lint_stored(threadgroup T*, typename identity<T>::type);

// Mathematics is of float and half: bfloat has none of its own and must be made a float first.
#define ONE(NAME)                                           \
  float NAME(float);                                        \
  half NAME(half);                                          \
  bfloat NAME(bfloat) = delete;                             \
  template <class T, int N> vec<T, N> NAME(vec<T, N>);
#define ONES                                                                                                    \
  ONE(exp) ONE(exp2) ONE(log) ONE(log2) ONE(tanh) ONE(sqrt) ONE(rsqrt) ONE(sin) ONE(cos) ONE(floor) ONE(ceil)   \
  ONE(rint) ONE(round) ONE(trunc) ONE(fabs)
ONES
namespace fast { ONES }
namespace precise { ONES }
#undef ONES
#undef ONE
float pow(float, float);
float powr(float, float);
float fma(float, float, float);
half fma(half, half, half);
bool isnan(float);
bool isinf(float);
bool isfinite(float);
float fmax(float, float);
float fmin(float, float);
float sign(float);
float mix(float, float, float);
#define COMMON(T)                        \
  T max(T, T);                           \
  T min(T, T);                           \
  T clamp(T, T, T);                      \
  T select(T, T, bool);
COMMON(float) COMMON(half) COMMON(char) COMMON(uchar) COMMON(short) COMMON(ushort) COMMON(int) COMMON(uint)
COMMON(long) COMMON(ulong)
#undef COMMON
bfloat max(bfloat, bfloat) = delete;
bfloat min(bfloat, bfloat) = delete;
bfloat clamp(bfloat, bfloat, bfloat) = delete;
bfloat select(bfloat, bfloat, bool) = delete;
template <class T, int N> vec<T, N> max(vec<T, N>, vec<T, N>);
template <class T, int N> vec<T, N> min(vec<T, N>, vec<T, N>);
float abs(float);
half abs(half);
int abs(int);
long abs(long);
uint popcount(uint);
uint clz(uint);
uint ctz(uint);

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

#define SIMD(T)                                  \
  T simd_sum(T);                                 \
  T simd_product(T);                             \
  T simd_max(T);                                 \
  T simd_min(T);                                 \
  T simd_prefix_inclusive_sum(T);                \
  T simd_prefix_exclusive_sum(T);                \
  T simd_shuffle(T, ushort);                     \
  T simd_shuffle_xor(T, ushort);                 \
  T simd_shuffle_down(T, ushort);                \
  T simd_shuffle_up(T, ushort);                  \
  T simd_shuffle_rotate_down(T, ushort);         \
  T simd_broadcast(T, ushort);                   \
  T simd_broadcast_first(T);
SIMD(float) SIMD(half) SIMD(int) SIMD(uint) SIMD(short) SIMD(ushort)
typedef vec<float, 2> simd_float2;
typedef vec<float, 4> simd_float4;
typedef vec<half, 4> simd_half4;
SIMD(simd_float2) SIMD(simd_float4) SIMD(simd_half4)
#undef SIMD
bfloat simd_sum(bfloat) = delete;
bfloat simd_max(bfloat) = delete;
bfloat simd_min(bfloat) = delete;
struct simd_vote {
  explicit operator ulong() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);
bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();

// One type for all matrices of a product. Load and store take pointers to device or threadgroup memory of that type.
template <class T, int Columns, int Rows> struct simdgroup_matrix {
  simdgroup_matrix();
  explicit simdgroup_matrix(T);
  vec<T, 2>& thread_elements();
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int Columns, int Rows> simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T);
#define MOVES(SPACE)                                                                                              \
  template <class T>                                                                                              \
  void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const SPACE T*, ulong = 8, vec<ulong, 2> = vec<ulong, 2>(0, 0), \
                      bool = false);                                                                              \
  template <class T>                                                                                              \
  void simdgroup_store(simdgroup_matrix<T, 8, 8>, SPACE T*, ulong = 8, vec<ulong, 2> = vec<ulong, 2>(0, 0),       \
                       bool = false);
MOVES(device)
MOVES(threadgroup)
#undef MOVES
#ifdef MSLSIM_MIXED_MATRICES
template <class D, class A, class B>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>,
                                   simdgroup_matrix<D, 8, 8>);
#else
template <class T>
void simdgroup_multiply_accumulate(simdgroup_matrix<T, 8, 8>&, simdgroup_matrix<T, 8, 8>, simdgroup_matrix<T, 8, 8>,
                                   simdgroup_matrix<T, 8, 8>);
#endif
template <class T>
void simdgroup_multiply(simdgroup_matrix<T, 8, 8>&, simdgroup_matrix<T, 8, 8>, simdgroup_matrix<T, 8, 8>);

enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T hidden; };
#define ATOMIC(SPACE)                                                                                       \
  template <class T> T atomic_load_explicit(const volatile SPACE atomic<T>*, memory_order);                 \
  template <class T> void atomic_store_explicit(volatile SPACE atomic<T>*, typename identity<T>::type, memory_order);  \
  template <class T> T atomic_fetch_add_explicit(volatile SPACE atomic<T>*, typename identity<T>::type, memory_order); \
  template <class T> T atomic_fetch_max_explicit(volatile SPACE atomic<T>*, typename identity<T>::type, memory_order); \
  template <class T> T atomic_fetch_min_explicit(volatile SPACE atomic<T>*, typename identity<T>::type, memory_order); \
  template <class T> T atomic_fetch_or_explicit(volatile SPACE atomic<T>*, typename identity<T>::type, memory_order);
ATOMIC(device)
ATOMIC(threadgroup)
#undef ATOMIC

}  // namespace metal

template <class T, class U> T as_type(U);
typedef metal::atomic<int> atomic_int;
typedef metal::atomic<uint> atomic_uint;
typedef metal::atomic<float> atomic_float;
#define VECTORS(T)                 \
  typedef metal::vec<T, 2> T##2;   \
  typedef metal::vec<T, 3> T##3;   \
  typedef metal::vec<T, 4> T##4;
VECTORS(char) VECTORS(uchar) VECTORS(short) VECTORS(ushort) VECTORS(int) VECTORS(uint) VECTORS(long) VECTORS(ulong)
VECTORS(half) VECTORS(bfloat) VECTORS(float)
#undef VECTORS
