// Memory as a kernel sees it, and who has touched it. Buffers are copied to addresses of their own, so far apart that
// no 32-bit index leads from one into another; the arrays of a threadgroup likewise, a mebibyte apart. An access is
// judged before it happens.
#pragma once
#include <cstddef>
#include <cstdint>

#include "mslsim/vectors.h"

namespace mslsim {

constexpr uintptr_t kDevice = 0x200000000000;  // 32 TiB: nothing else lives there
constexpr int kSlotBits = 36;                  // 64 GiB a buffer, which begins in the middle
constexpr int kSlots = 32;
constexpr uintptr_t kMiddle = uintptr_t(1) << (kSlotBits - 1);
constexpr uintptr_t kDeviceSpan = uintptr_t(kSlots) << kSlotBits;

constexpr int kArrayBits = 20;
constexpr int kArrays = 64;
constexpr uintptr_t kArrayMiddle = uintptr_t(1) << (kArrayBits - 1);
constexpr uintptr_t kArenaSpan = uintptr_t(kArrays) << kArrayBits;

// Who: a thread of its group, or a simdgroup as a whole (which lane touches what is not told of its matrices).
constexpr ushort kTogether = 0x8000;
inline int simdgroup_of(ushort who) { return who & kTogether ? who & 0x7fff : who / 32; }

// When: the group (a number never used again), the stretch between two of its barriers, the stretch between two of the
// simdgroup's. Where: an offset in the library's code, or a line with the top bit set.
struct Access {
  uint group, stretch, step, where;
  ushort who;
  bool wrote, atomic, several_groups, several_simdgroups;
};
constexpr uint kIsLine = 0x80000000u;

// Of each unit of memory: who wrote it last, who has read it since.
struct Cell { Access write, read; };

// Without order between them: `first` group of this launch, so that older accesses do not count.
inline bool conflict(const Access& was, const Access& is, uint first) {
  if (was.group < first || (was.atomic && is.atomic)) return false;
  if (was.group != is.group || was.several_groups) return true;
  if (was.stretch != is.stretch) return false;
  if (was.several_simdgroups) return true;
  if (was.who == is.who && !(was.who & kTogether)) return false;
  return simdgroup_of(was.who) != simdgroup_of(is.who) || was.step == is.step;
}

// Remembers a read beside the earlier ones: only as much as a later write must know.
inline void remember(Access& last, const Access& is, uint first) {
  const Access was = last;
  last = is;
  if (was.group < first) return;
  last.atomic = was.atomic && is.atomic;
  last.several_groups = was.several_groups || was.group != is.group;
  if (was.group != is.group || was.stretch != is.stretch) return;
  last.several_simdgroups = was.several_simdgroups || simdgroup_of(was.who) != simdgroup_of(is.who);
  if (was.step == is.step && was.who != is.who) last.who = ushort(kTogether | simdgroup_of(is.who));
}

// A buffer of the device's memory while a launch lasts.
struct Region {
  char* base = nullptr;      // where kernels see it
  size_t bytes = 0;
  uint unit = 4;             // bytes of a cell
  bool writable = false;
  uint8_t* written = nullptr;  // of each byte, if its reading before any writing is a mistake
  Cell* cells = nullptr;
  size_t mapped = 0, cells_mapped = 0;
};

// A threadgroup array of one group.
struct Array {
  const char* name = nullptr;
  size_t bytes = 0;
  uint unit = 4, element = 4;  // bytes of a cell, and of an element
  size_t first_cell = 0;
  int line = 0;
};

enum class Fault : int {
  none, race, uninitialised, bounds, divergence, unbound, size, read_only, pointer, uniform, partial, arithmetic,
  alignment, setup
};

// What went wrong, for Python to put into words.
struct Report {
  Fault fault;
  int memory;  // 0 none, 1 threadgroup array, 2 buffer's region
  int slot;
  int write;
  uint where, other_where;
  long offset;
  ulong size, extent;
  uint thread, other_thread;
  uint group[3], linear_group, other_group;
  int other_write;
  uint unit;       // bytes of an element
  char name[64];   // of an array
  char text[256];
};

}  // namespace mslsim
