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

static bool same(const Tile& a, const Tile& b) {
  return a.origin == b.origin && a.stride == b.stride && a.column == b.column && a.row == b.row && a.transpose == b.transpose;
}

void Worker::move_tile(const Note& note, char* elements) {
  Simdgroup& g = *mine;
  const Tile& t = note.tile;
  const uint where = kIsLine | uint(note.line);
  char* const origin = t.origin + (t.row * t.stride + t.column) * long(t.unit);
  if (g.turn == 0) {
    want_all(g.lanes, note.line);
    if (t.transpose && (t.row || t.column))
      fail(Fault::uniform, where, "an origin together with transpose: no document says what is meant; move the pointer");
    for (int row = 0; row < 8; row++)
      access(uintptr_t(origin + row * t.stride * long(t.unit)), 8 * t.unit, note.store ? kWrite : kRead,
             ushort(kTogether | self / kLanes), where);
    g.notes.push_back(note);
  } else if (g.noted == g.notes.size() || g.notes[g.noted].line != note.line || g.notes[g.noted].store != note.store) {
    if (g.noted < g.notes.size()) {
      g.stop = Stop::together;
      g.line = g.notes[g.noted].line;
    }
    divergence(g, Stop::together, note.line, self);
  } else if (!same(g.notes[g.noted].tile, t)) {
    fail(Fault::uniform, where, "the lanes of a simdgroup give different addresses, strides or origins");
  }
  g.noted++;
  const Place at = place();
  for (int i = 0; i < 2; i++) {
    const int row = t.transpose ? at.column[i] : at.row[i], column = t.transpose ? at.row[i] : at.column[i];
    char* const element = elements + size_t(i) * t.unit;
    char* const memory = origin + (row * t.stride + column) * long(t.unit);
    if (t.unit == 4)
      std::memcpy(note.store ? memory : element, note.store ? element : memory, 4);
    else
      std::memcpy(note.store ? memory : element, note.store ? element : memory, 2);
  }
}

void load_tile(void* elements, const Tile& tile, int line) {
  worker->move_tile(Note{line, false, tile}, static_cast<char*>(elements));
}

void store_tile(const void* elements, const Tile& tile, int line) {
  worker->move_tile(Note{line, true, tile}, static_cast<char*>(const_cast<void*>(elements)));
}

}  // namespace mslsim
