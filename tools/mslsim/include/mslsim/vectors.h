// vec<T, N>: members x, y, z, w, the halves xy and zw, indexing, and arithmetic by element.
#pragma once
#include "types.h"

namespace metal {

template <class T> struct same { typedef T type; };

template <class T, int N> struct vec;

template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  union {
    struct { T x, y; };
    T e[2];
  };
  vec() = default;
  explicit vec(T s) : x(s), y(s) {}
  vec(T a, T b) : x(a), y(b) {}
  template <class U> explicit vec(const vec<U, 2>& o) : x(T(o.x)), y(T(o.y)) {}
  T& operator[](int i) { return e[i]; }
  const T& operator[](int i) const { return e[i]; }
};

template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  union {
    struct { T x, y, z; };
    vec<T, 2> xy;
    T e[3];
  };
  vec() = default;
  explicit vec(T s) : x(s), y(s), z(s) {}
  vec(T a, T b, T c) : x(a), y(b), z(c) {}
  template <class U> explicit vec(const vec<U, 3>& o) : x(T(o.x)), y(T(o.y)), z(T(o.z)) {}
  T& operator[](int i) { return e[i]; }
  const T& operator[](int i) const { return e[i]; }
};

template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  union {
    struct { T x, y, z, w; };
    struct { vec<T, 2> xy, zw; };
    vec<T, 3> xyz;
    T e[4];
  };
  vec() = default;
  explicit vec(T s) : x(s), y(s), z(s), w(s) {}
  vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  vec(vec<T, 2> a, vec<T, 2> b) : x(a.x), y(a.y), z(b.x), w(b.y) {}
  template <class U> explicit vec(const vec<U, 4>& o) : x(T(o.x)), y(T(o.y)), z(T(o.z)), w(T(o.w)) {}
  T& operator[](int i) { return e[i]; }
  const T& operator[](int i) const { return e[i]; }
};

// The same elements without the alignment.
template <class T, int N> struct packed_vec {
  T e[N];
  packed_vec() = default;
  packed_vec(const vec<T, N>& o) { for (int i = 0; i < N; i++) e[i] = o[i]; }
  operator vec<T, N>() const { vec<T, N> r; for (int i = 0; i < N; i++) r[i] = e[i]; return r; }
  T& operator[](int i) { return e[i]; }
  const T& operator[](int i) const { return e[i]; }
};

#define MSLSIM_OPERATOR(OP)                                                                              \
  template <class T, int N> vec<T, N> operator OP(vec<T, N> a, vec<T, N> b) {                            \
    vec<T, N> r;                                                                                         \
    for (int i = 0; i < N; i++) r[i] = T(a[i] OP b[i]);                                                  \
    return r;                                                                                            \
  }                                                                                                      \
  template <class T, int N> vec<T, N> operator OP(vec<T, N> a, typename same<T>::type b) {               \
    return a OP vec<T, N>(b);                                                                            \
  }                                                                                                      \
  template <class T, int N> vec<T, N> operator OP(typename same<T>::type a, vec<T, N> b) {               \
    return vec<T, N>(a) OP b;                                                                            \
  }                                                                                                      \
  template <class T, int N> vec<T, N>& operator OP##=(vec<T, N>& a, vec<T, N> b) { return a = a OP b; }  \
  template <class T, int N> vec<T, N>& operator OP##=(vec<T, N>& a, typename same<T>::type b) {          \
    return a = a OP b;                                                                                   \
  }
MSLSIM_OPERATOR(+)
MSLSIM_OPERATOR(-)
MSLSIM_OPERATOR(*)
MSLSIM_OPERATOR(/)
MSLSIM_OPERATOR(%)
MSLSIM_OPERATOR(&)
MSLSIM_OPERATOR(|)
MSLSIM_OPERATOR(^)
MSLSIM_OPERATOR(<<)
MSLSIM_OPERATOR(>>)
#undef MSLSIM_OPERATOR

#define MSLSIM_COMPARISON(OP)                                                                            \
  template <class T, int N> vec<bool, N> operator OP(vec<T, N> a, vec<T, N> b) {                         \
    vec<bool, N> r;                                                                                      \
    for (int i = 0; i < N; i++) r[i] = a[i] OP b[i];                                                     \
    return r;                                                                                            \
  }
MSLSIM_COMPARISON(==)
MSLSIM_COMPARISON(!=)
MSLSIM_COMPARISON(<)
MSLSIM_COMPARISON(<=)
MSLSIM_COMPARISON(>)
MSLSIM_COMPARISON(>=)
#undef MSLSIM_COMPARISON

template <class T, int N> vec<T, N> operator-(vec<T, N> a) {
  for (int i = 0; i < N; i++) a[i] = -a[i];
  return a;
}

template <int N> bool any(vec<bool, N> a) { bool r = false; for (int i = 0; i < N; i++) r = r || a[i]; return r; }
template <int N> bool all(vec<bool, N> a) { bool r = true; for (int i = 0; i < N; i++) r = r && a[i]; return r; }

template <class T, int N> T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum = sum + a[i] * b[i];
  return sum;
}

}  // namespace metal

#define MSLSIM_VECTORS(T)                                                                                \
  typedef metal::vec<T, 2> T##2;                                                                         \
  typedef metal::vec<T, 3> T##3;                                                                         \
  typedef metal::vec<T, 4> T##4;                                                                         \
  typedef metal::packed_vec<T, 2> packed_##T##2;                                                         \
  typedef metal::packed_vec<T, 3> packed_##T##3;                                                         \
  typedef metal::packed_vec<T, 4> packed_##T##4;
MSLSIM_VECTORS(bool)
MSLSIM_VECTORS(char)
MSLSIM_VECTORS(uchar)
MSLSIM_VECTORS(short)
MSLSIM_VECTORS(ushort)
MSLSIM_VECTORS(int)
MSLSIM_VECTORS(uint)
MSLSIM_VECTORS(long)
MSLSIM_VECTORS(ulong)
MSLSIM_VECTORS(half)
MSLSIM_VECTORS(bfloat)
MSLSIM_VECTORS(float)
#undef MSLSIM_VECTORS
