// Atomics: one at a time, whichever worker.
#include <mutex>

#include "worker.h"

namespace mslsim {

static std::mutex all_atomics;

template <class T> static T updated(T old, Update how, T value) {
  switch (how) {
    case Update::load: return old;
    case Update::add: return T(old + value);
    case Update::sub: return T(old - value);
    case Update::max: return old > value ? old : value;
    case Update::min: return old < value ? old : value;
    default: return value;
  }
}
template <class T> static T bits(T old, Update how, T value) {
  if (how == Update::bit_and) return T(old & value);
  if (how == Update::bit_or) return T(old | value);
  return T(old ^ value);
}
template <class T> static T result(T old, Update how, T value) {
  return how >= Update::bit_and ? bits(old, how, value) : updated(old, how, value);
}
template <> float result(float old, Update how, float value) { return updated(old, how, value); }

static void announce(void* where, size_t bytes, int mode, int line) {
  Worker& w = *worker;
  w.access(uintptr_t(where), bytes, mode | kAtomic, ushort(w.self), kIsLine | uint(line));
}

template <class T> T atomic(T* where, Update how, T value, int line) {
  announce(where, sizeof(T), how == Update::load ? kRead : how == Update::store ? kWrite : kRead | kWrite, line);
  std::lock_guard<std::mutex> lock(all_atomics);
  const T old = *where;
  *where = result(old, how, value);
  return old;
}

template <class T> bool atomic_compare(T* where, T* expected, T value, int line) {
  announce(where, sizeof(T), kRead | kWrite, line);
  std::lock_guard<std::mutex> lock(all_atomics);
  const T old = *where;
  const bool same = __builtin_memcmp(&old, expected, sizeof(T)) == 0;
  if (same) *where = value;
  *expected = old;
  return same;
}

#define MSLSIM_TYPE(T)                          \
  template T atomic<T>(T*, Update, T, int);     \
  template bool atomic_compare<T>(T*, T*, T, int);
MSLSIM_TYPE(int)
MSLSIM_TYPE(uint)
MSLSIM_TYPE(float)
#undef MSLSIM_TYPE

}  // namespace mslsim
