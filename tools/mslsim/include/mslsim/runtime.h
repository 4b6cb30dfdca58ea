// What a compiled kernel asks of the runtime. Accesses to memory are not here: g++ reports each of them by itself
// (-fsanitize=thread calls __tsan_read4 and its like, which the runtime defines).
#pragma once
#include "vectors.h"

// A function of ours that touches no memory but a lane's own: nothing to announce.
#define MSLSIM_OWN __attribute__((noinline, no_sanitize("thread", "undefined")))
#define MSLSIM_LINE int line = __builtin_LINE()

namespace mslsim {

constexpr int kLanes = 32;

// Where a thread stands. Converts to whatever type a kernel's parameter has.
struct Position {
  uint v[3];
  operator uint() const { return v[0]; }
  operator ushort() const { return ushort(v[0]); }
  operator uint2() const { return uint2(v[0], v[1]); }
  operator ushort2() const { return ushort2(ushort(v[0]), ushort(v[1])); }
  operator uint3() const { return uint3(v[0], v[1], v[2]); }
  operator ushort3() const { return ushort3(ushort(v[0]), ushort(v[1]), ushort(v[2])); }
};

struct Here {
  Position thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
  Position threads_per_grid, threads_per_threadgroup, threadgroups_per_grid, dispatch_threads_per_threadgroup;
  uint thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  uint simdgroups_per_threadgroup, dispatch_simdgroups_per_threadgroup, threads_per_simdgroup, thread_execution_width;
};
const Here& here();

void* buffer(int index);
void* shared(int id, size_t bytes, size_t unit, const char* name, int line);
void size_of_shared(int id, size_t bytes, int line);

enum class Scope { simdgroup, threadgroup };
void barrier(Scope scope, uint memory, int line);

// Lanes exchange values; defined in the runtime for the types of simdgroup.h.
enum class Fold { sum, product, max, min };
template <class T> T fold(T mine, Fold how, int line);
template <class T> T scan(T mine, bool inclusive, int line);
// Each lane gives `bytes` at `mine` and takes those of lane `from`.
void exchange(const void* mine, void* theirs, size_t bytes, int from, int line);
ulong ballot(bool mine, int line);

// A lane's two elements of an 8 x 8 matrix, where the layout puts them.
struct Place { int row[2], column[2]; };
Place place();
void multiply(const float a[2], const float b[2], float out[2], int line);
struct Tile { char* origin; size_t unit; long stride, column, row; bool transpose; };
void load_tile(void* elements, const Tile& tile, int line);
void store_tile(const void* elements, const Tile& tile, int line);

enum class Update { load, store, exchange, add, sub, max, min, bit_and, bit_or, bit_xor };
template <class T> T atomic(T* where, Update how, T value, int line);
template <class T> bool atomic_compare(T* where, T* expected, T value, int line);

}  // namespace mslsim
