// What 32 lanes do together. Each hands over the address of its arguments; one of them does the work for all.
#include <cstring>

#include "worker.h"

namespace mslsim {

template <class T> static T larger(T a, T b) { return a != a || b > a ? b : a; }  // passes over a NaN
template <class T> static T smaller(T a, T b) { return a != a || b < a ? b : a; }

template <class T> static T combine(T a, T b, Fold how) {
  switch (how) {
    case Fold::sum: return a + b;
    case Fold::product: return a * b;
    case Fold::max: return larger(a, b);
    default: return smaller(a, b);
  }
}

template <class T> struct Folded {
  T value;
  Fold how;
  static void run(void** arguments, int lanes) {
    T all[kLanes];
    for (int i = 0; i < lanes; i++) all[i] = static_cast<Folded*>(arguments[i])->value;
    const Fold how = static_cast<Folded*>(arguments[0])->how;
    for (int step = 1; step < lanes; step *= 2)  // neighbours, then their neighbours
      for (int i = 0; i + step < lanes; i += 2 * step) all[i] = combine(all[i], all[i + step], how);
    for (int i = 0; i < lanes; i++) static_cast<Folded*>(arguments[i])->value = all[0];
  }
};

template <class T> T fold(T mine, Fold how, int line) {
  Folded<T> arguments = {mine, how};
  worker->arrive(Stop::together, line, Folded<T>::run, &arguments);
  return arguments.value;
}

template <class T> struct Scanned {
  T value;
  bool inclusive;
  static void run(void** arguments, int lanes) {
    T sum = T(0);
    for (int i = 0; i < lanes; i++) {
      Scanned& lane = *static_cast<Scanned*>(arguments[i]);
      const T before = sum;
      sum = sum + lane.value;
      lane.value = lane.inclusive ? sum : before;
    }
  }
};

template <class T> T scan(T mine, bool inclusive, int line) {
  Scanned<T> arguments = {mine, inclusive};
  worker->arrive(Stop::together, line, Scanned<T>::run, &arguments);
  return arguments.value;
}

#define MSLSIM_TYPE(T)                    \
  template T fold<T>(T, Fold, int);       \
  template T scan<T>(T, bool, int);
MSLSIM_TYPE(float)
MSLSIM_TYPE(half)
MSLSIM_TYPE(int)
MSLSIM_TYPE(uint)
#undef MSLSIM_TYPE

struct Exchanged {
  const void* mine;
  void* theirs;
  size_t bytes;
  int from;
  static void run(void** arguments, int lanes) {
    for (int i = 0; i < lanes; i++) {
      const Exchanged& to = *static_cast<Exchanged*>(arguments[i]);
      if (to.from < 0 || to.from >= lanes)
        std::memset(to.theirs, 0xff, to.bytes);  // undefined: a NaN, or -1
      else
        std::memcpy(to.theirs, static_cast<Exchanged*>(arguments[to.from])->mine, to.bytes);
    }
  }
};

void exchange(const void* mine, void* theirs, size_t bytes, int from, int line) {
  Exchanged arguments = {mine, theirs, bytes, from};
  worker->arrive(Stop::together, line, Exchanged::run, &arguments);
}

struct Ballot {
  bool mine;
  ulong all;
  static void run(void** arguments, int lanes) {
    ulong all = 0;
    for (int i = 0; i < lanes; i++) all |= ulong(static_cast<Ballot*>(arguments[i])->mine) << i;
    for (int i = 0; i < lanes; i++) static_cast<Ballot*>(arguments[i])->all = all;
  }
};

ulong ballot(bool mine, int line) {
  Ballot arguments = {mine, 0};
  worker->arrive(Stop::together, line, Ballot::run, &arguments);
  return arguments.all;
}

}  // namespace mslsim
