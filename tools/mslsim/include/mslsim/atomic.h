// Atomics, relaxed as in MSL: no memory order but one's own.
#pragma once
#include "runtime.h"

namespace metal {

enum memory_order { memory_order_relaxed };

template <class T> struct atomic { T value; };

#define MSLSIM_FETCH(NAME, HOW)                                                                          \
  template <class T> T NAME(atomic<T>* a, typename same<T>::type x, memory_order, MSLSIM_LINE) {         \
    return mslsim::atomic<T>(&a->value, mslsim::Update::HOW, x, line);                                   \
  }
MSLSIM_FETCH(atomic_exchange_explicit, exchange)
MSLSIM_FETCH(atomic_fetch_add_explicit, add)
MSLSIM_FETCH(atomic_fetch_sub_explicit, sub)
MSLSIM_FETCH(atomic_fetch_max_explicit, max)
MSLSIM_FETCH(atomic_fetch_min_explicit, min)
MSLSIM_FETCH(atomic_fetch_and_explicit, bit_and)
MSLSIM_FETCH(atomic_fetch_or_explicit, bit_or)
MSLSIM_FETCH(atomic_fetch_xor_explicit, bit_xor)
#undef MSLSIM_FETCH
template <class T> T atomic_load_explicit(const atomic<T>* a, memory_order, MSLSIM_LINE) {
  return mslsim::atomic<T>(const_cast<T*>(&a->value), mslsim::Update::load, T(0), line);
}
template <class T> void atomic_store_explicit(atomic<T>* a, typename same<T>::type x, memory_order, MSLSIM_LINE) {
  mslsim::atomic<T>(&a->value, mslsim::Update::store, x, line);
}
template <class T>
bool atomic_compare_exchange_weak_explicit(atomic<T>* a, T* expected, typename same<T>::type x, memory_order,
                                           memory_order, MSLSIM_LINE) {
  return mslsim::atomic_compare<T>(&a->value, expected, x, line);
}

}  // namespace metal

typedef metal::atomic<int> atomic_int;
typedef metal::atomic<uint> atomic_uint;
typedef metal::atomic<float> atomic_float;
