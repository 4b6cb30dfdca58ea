// simdgroup_matrix: 8 x 8, two elements in each lane.
#pragma once
#include "simdgroup.h"

namespace metal {

template <class T, int Columns, int Rows> struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup_matrix is 8 x 8");
  vec<T, 2> elements;

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    const mslsim::Place p = mslsim::place();
    for (int i = 0; i < 2; i++) elements[i] = p.row[i] == p.column[i] ? diagonal : T(0.0f);
  }
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }
};

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Columns, int Rows>
simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(typename same<T>::type value) {
  simdgroup_matrix<T, Columns, Rows> m;
  m.elements = vec<T, 2>(value);
  return m;
}
template <class T, int Columns, int Rows>
simdgroup_matrix<T, Columns, Rows> make_diagonal_simdgroup_matrix(typename same<T>::type value) {
  return simdgroup_matrix<T, Columns, Rows>(value);
}

template <class T> MSLSIM_OWN
void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const T* source, ulong elements_per_row = 8,
                    ulong2 origin = ulong2(0, 0), bool transpose = false, MSLSIM_LINE) {
  mslsim::load_tile(&m.elements, {(char*)source, sizeof(T), long(elements_per_row), long(origin.x), long(origin.y), transpose}, line);
}
template <class T> MSLSIM_OWN
void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, T* target, ulong elements_per_row = 8,
                     ulong2 origin = ulong2(0, 0), bool transpose = false, MSLSIM_LINE) {
  mslsim::store_tile(&m.elements, {(char*)target, sizeof(T), long(elements_per_row), long(origin.x), long(origin.y), transpose}, line);
}

namespace detail {
// Products and sums in float, rounded once. `d` may be `c`, `a` or `b`.
template <class D, class A, class B> MSLSIM_OWN
void multiply(vec<D, 2>& d, const vec<A, 2>& a, const vec<B, 2>& b, float c0, float c1, int line) {
  const float left[2] = {float(a.x), float(a.y)}, right[2] = {float(b.x), float(b.y)};
  float out[2];
  mslsim::multiply(left, right, out, line);
  d = vec<D, 2>(D(c0 + out[0]), D(c1 + out[1]));
}
}  // namespace detail

// One type for all four, as in Metal's specification. Other mixtures are known to compile (half x half into float),
// but no document promises them: MSLSIM_MIXED_MATRICES lets them in.
#ifdef MSLSIM_MIXED_MATRICES
#define MSLSIM_MATRICES template <class D, class A, class B>
#else
#define MSLSIM_MATRICES template <class D, class A = D, class B = D, class = typename is_same<D, A>::yes, class = typename is_same<D, B>::yes>
#endif
MSLSIM_MATRICES
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                   const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<D, 8, 8>& c, MSLSIM_LINE) {
  detail::multiply(d.elements, a.elements, b.elements, float(c.elements.x), float(c.elements.y), line);
}
MSLSIM_MATRICES
void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                        const simdgroup_matrix<B, 8, 8>& b, MSLSIM_LINE) {
  detail::multiply(d.elements, a.elements, b.elements, 0.0f, 0.0f, line);
}
#undef MSLSIM_MATRICES

}  // namespace metal
