// How the text around a kernel, written by text.py, hands its arguments over and says what they are.
#pragma once
#include "runtime.h"

namespace mslsim {

struct Pointer {
  int index;
  template <class T> operator T*() const { return static_cast<T*>(buffer(index)); }
};
struct Reference {
  int index;
  template <class T> operator T&() const { return *static_cast<T*>(buffer(index)); }
};

// Of each parameter: the bytes of an element, and whether it can be written.
struct Parameter { uint unit, writable; };
template <class P> struct Describe { static constexpr Parameter value = {0, 0}; };
template <class T> struct Describe<T*> { static constexpr Parameter value = {sizeof(T), 1}; };
template <class T> struct Describe<const T*> { static constexpr Parameter value = {sizeof(T), 0}; };
template <class T> struct Describe<T&> { static constexpr Parameter value = {sizeof(T), 1}; };
template <class T> struct Describe<const T&> { static constexpr Parameter value = {sizeof(T), 0}; };
template <> struct Describe<void*> { static constexpr Parameter value = {1, 1}; };
template <> struct Describe<const void*> { static constexpr Parameter value = {1, 0}; };
template <class... P> void describe(void (*)(P...), Parameter* out) {
  const Parameter all[] = {Describe<P>::value...};
  for (size_t i = 0; i < sizeof...(P); i++) out[i] = all[i];
}

// A threadgroup array. Its size is told when the library is loaded, so that a kernel's sum is known before it runs.
template <class A> struct Element { typedef A type; };
template <class A, size_t N> struct Element<A[N]> { typedef typename Element<A>::type type; };
template <int Id, int Line, class A> struct Sized {
  struct Tell { Tell() { size_of_shared(Id, sizeof(A), Line); } };
  static Tell tell;
};
template <int Id, int Line, class A> typename Sized<Id, Line, A>::Tell Sized<Id, Line, A>::tell;
template <int Id, int Line, class A> A& shared_array(const char* name) {
  (void)&Sized<Id, Line, A>::tell;
  return *static_cast<A*>(shared(Id, sizeof(A), sizeof(typename Element<A>::type), name, Line));
}

}  // namespace mslsim
