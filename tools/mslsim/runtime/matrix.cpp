// simdgroup_matrix. Its 64 elements lie in 32 lanes, two in each: as Apple's GPUs are seen to place them, or, in the
// hostile layout, scattered so that a kernel which relies on the former fails.
#include <cstring>

#include "worker.h"

namespace mslsim {

struct Layout {
  Place places[kLanes];
  explicit Layout(bool hostile) {
    for (int lane = 0; lane < kLanes; lane++)
      for (int i = 0; i < 2; i++) {
        const int scattered = (lane * 2 + i) * 37 % 64;
        places[lane].row[i] = hostile ? scattered / 8 : (lane / 16) * 4 + (lane / 2) % 4;
        places[lane].column[i] = hostile ? scattered % 8 : (lane / 8 % 2) * 4 + (lane % 2) * 2 + i;
      }
  }
};

static const Place* places() {
  static const Layout observed(false), hostile(true);
  return worker->launch->hostile_layout ? hostile.places : observed.places;
}

Place place() { return places()[worker->self % kLanes]; }

static void want_all(int lanes, int line) {
  if (lanes != kLanes)
    worker->fail(Fault::partial, kIsLine | uint(line), "a matrix operation in a simdgroup of fewer than 32 threads");
}

struct Product {
  const float *a, *b;
  float* out;
  int line;
  static void run(void** arguments, int lanes) {
    want_all(lanes, static_cast<Product*>(arguments[0])->line);
    const Place* where = places();
    float a[8][8], b[8][8], out[8][8] = {};
    for (int lane = 0; lane < kLanes; lane++)
      for (int i = 0; i < 2; i++) {
        a[where[lane].row[i]][where[lane].column[i]] = static_cast<Product*>(arguments[lane])->a[i];
        b[where[lane].row[i]][where[lane].column[i]] = static_cast<Product*>(arguments[lane])->b[i];
      }
    for (int row = 0; row < 8; row++)
      for (int k = 0; k < 8; k++)
        for (int column = 0; column < 8; column++) out[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < kLanes; lane++)
      for (int i = 0; i < 2; i++)
        static_cast<Product*>(arguments[lane])->out[i] = out[where[lane].row[i]][where[lane].column[i]];
  }
};

void multiply(const float a[2], const float b[2], float out[2], int line) {
  Product arguments = {a, b, out, line};
  worker->arrive(Stop::together, line, Product::run, &arguments);
}

struct Moved {
  char* elements;
  const Tile* tile;
  int line;
  template <bool Store> static void run(void** arguments, int lanes) {
    const Moved& first = *static_cast<Moved*>(arguments[0]);
    want_all(lanes, first.line);
    const Tile& t = *first.tile;
    Worker& w = *worker;
    const uint where = kIsLine | uint(first.line);
    for (int lane = 1; lane < kLanes; lane++) {
      const Tile& other = *static_cast<Moved*>(arguments[lane])->tile;
      if (other.origin != t.origin || other.stride != t.stride || other.column != t.column || other.row != t.row ||
          other.transpose != t.transpose)
        w.fail(Fault::uniform, where, "the lanes of a simdgroup give different addresses, strides or origins");
    }
    if (t.transpose && (t.row || t.column))
      w.fail(Fault::uniform, where, "an origin together with transpose: no document says what is meant; move the pointer");
    char* const origin = t.origin + (t.row * t.stride + t.column) * long(t.unit);
    const ushort who = ushort(kTogether | w.self / kLanes);
    for (int row = 0; row < 8; row++)
      w.access(uintptr_t(origin + row * t.stride * long(t.unit)), 8 * t.unit, Store ? kWrite : kRead, who, where);
    const Place* at = places();
    for (int lane = 0; lane < kLanes; lane++)
      for (int i = 0; i < 2; i++) {
        const int row = t.transpose ? at[lane].column[i] : at[lane].row[i];
        const int column = t.transpose ? at[lane].row[i] : at[lane].column[i];
        char* const element = static_cast<Moved*>(arguments[lane])->elements + size_t(i) * t.unit;
        char* const memory = origin + (row * t.stride + column) * long(t.unit);
        std::memcpy(Store ? memory : element, Store ? element : memory, t.unit);
      }
  }
};

void load_tile(void* elements, const Tile& tile, int line) {
  Moved arguments = {static_cast<char*>(elements), &tile, line};
  worker->arrive(Stop::together, line, Moved::run<false>, &arguments);
}

void store_tile(const void* elements, const Tile& tile, int line) {
  Moved arguments = {static_cast<char*>(const_cast<void*>(elements)), &tile, line};
  worker->arrive(Stop::together, line, Moved::run<true>, &arguments);
}

}  // namespace mslsim
