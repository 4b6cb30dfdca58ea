// Every access of a kernel to memory comes here first.
#include "memory.h"

#include <cstdio>
#include <mutex>

#include "worker.h"

namespace mslsim {

static std::mutex device_cells;  // taken only where several workers share them

// Notes an access, unless another one is not ordered before it: that is given back.
// Accesses of groups before `first` are over.
const Access* Worker::touch(Cell* cell, Cell* end, const Access& is, uint first) {
  for (; cell < end; cell++) {
    if (conflict(cell->write, is, first)) return &cell->write;
    if (is.wrote && conflict(cell->read, is, first)) return &cell->read;
    if (is.wrote)
      cell->write = is;
    else
      remember(cell->read, is, first);
  }
  return nullptr;
}

void Worker::race(const Access& was, const Access& is) {
  report.other_where = was.where;
  report.other_thread = was.who;
  report.other_group = was.group - launch->first_group;
  report.other_write = was.wrote;
  fail(Fault::race, is.where, "");
}

void Worker::touch_array(uintptr_t offset, size_t bytes, Access& is, int mode) {
  const int slot = int(offset >> kArrayBits);
  const Array& array = arrays[slot];
  const long at = long(offset & (2 * kArrayMiddle - 1)) - long(kArrayMiddle);
  report.memory = 1;
  report.slot = slot;
  report.offset = at;
  report.size = bytes;
  report.extent = array.bytes;
  if (!array.name || at < 0 || size_t(at) + bytes > array.bytes) fail(Fault::bounds, is.where, "");
  if (!launch->races) return;
  is.stretch = threadgroup_stretch;
  is.step = mine->threadgroup_step;
  Cell* const cell = cells + array.first_cell + size_t(at) / array.unit;
  Cell* const end = cells + array.first_cell + (size_t(at) + bytes - 1) / array.unit + 1;
  if (mode & kRead)
    for (Cell* c = cell; c < end; c++)
      if (c->write.group != is.group) fail(Fault::uninitialised, is.where, "");
  const Access* was = touch(cell, end, is, is.group);
  if (was) race(*was, is);
}

void Worker::touch_buffer(uintptr_t offset, size_t bytes, Access& is, int mode) {
  const int slot = int(offset >> kSlotBits);
  Region& region = launch->regions[slot];
  const long at = long(offset) + long(kDevice) - long(region.base);
  report.memory = 2;
  report.slot = slot;
  report.offset = at;
  report.size = bytes;
  report.extent = region.bytes;
  if (at < 0 || size_t(at) + bytes > region.bytes) fail(Fault::bounds, is.where, "");
  if (!region.writable && is.wrote) fail(Fault::read_only, is.where, "");
  if (!region.writable) return;
  is.stretch = device_stretch;
  is.step = mine->device_step;
  Access was;
  switch (note_in_buffer(region, size_t(at), bytes, is, mode, was)) {
    case Fault::uninitialised: fail(Fault::uninitialised, is.where, "");
    case Fault::race: race(was, is);
    default: return;
  }
}

// Gives back what is wrong instead of leaving at once: the lock must be free by then.
Fault Worker::note_in_buffer(Region& region, size_t at, size_t bytes, const Access& is, int mode, Access& was) {
  std::unique_lock<std::mutex> lock(device_cells, std::defer_lock);
  if (launch->several_workers) lock.lock();
  for (size_t i = at; region.written && i < at + bytes; i++) {
    if ((mode & kRead) && !region.written[i]) return Fault::uninitialised;
    if (mode & kWrite) region.written[i] = 1;
  }
  if (!launch->races) return Fault::none;
  Cell* const first = region.cells + at / region.unit;
  const Access* other = touch(first, region.cells + (at + bytes - 1) / region.unit + 1, is, launch->first_group);
  if (!other) return Fault::none;
  was = *other;
  return Fault::race;
}

void Worker::access(uintptr_t address, size_t bytes, int mode, ushort who, uint where) {
  report.write = (mode & kWrite) != 0;
  Access is = {group, 0, 0, where, who, (mode & kWrite) != 0, (mode & kAtomic) != 0, false, false};
  if (address - uintptr_t(arena) < kArenaSpan) return touch_array(address - uintptr_t(arena), bytes, is, mode);
  if (address - kDevice < kDeviceSpan) return touch_buffer(address - kDevice, bytes, is, mode);
  if (address - uintptr_t(stacks) < stacks_span) return;
  if (address - uintptr_t(heres.data()) < heres.size() * sizeof(Here)) return;  // `here()`
  if (address - launch->image < launch->image_end - launch->image) return;  // constants of the text
  report.memory = 0;
  char text[64];
  std::snprintf(text, sizeof text, "address %#lx", ulong(address));
  fail(Fault::pointer, where, text);
}

void Worker::announced(uintptr_t address, size_t bytes, int mode, void* caller) {
  access(address, bytes, mode, ushort(self), uint(uintptr_t(caller) - launch->image));
}

void* buffer(int index) { return worker->launch->buffers[index]; }

void* shared(int id, size_t bytes, size_t unit, const char* name, int line) {
  Worker& w = *worker;
  if (id >= kArrays) w.fail(Fault::size, kIsLine | uint(line), "more threadgroup arrays than the simulator has room for");
  Array& array = w.arrays[id];
  if (!array.name) {
    w.shared_bytes += (bytes + 15) / 16 * 16;
    if (w.shared_bytes > w.launch->shared_limit) {
      char text[160];
      std::snprintf(text, sizeof text, "threadgroup memory comes to %zu bytes with %s, more than %u", w.shared_bytes,
                    name, w.launch->shared_limit);
      w.fail(Fault::size, kIsLine | uint(line), text);
    }
    array.name = name;
    array.bytes = bytes;
    array.element = uint(unit);
    array.unit = uint(unit % 4 == 0 ? 4 : unit % 2 == 0 ? 2 : 1);
    array.line = line;
    array.first_cell = w.cells_used;
    w.cells_used += (bytes + array.unit - 1) / array.unit;
    // What was there before must not look like a number.
    __builtin_memset(w.arena + (size_t(id) << kArrayBits) + kArrayMiddle, 0xff, bytes);
  }
  return w.arena + (size_t(id) << kArrayBits) + kArrayMiddle;
}

}  // namespace mslsim

// g++ -fsanitize=thread announces each load and store by one of these.
#define MSLSIM_ANNOUNCED(NAME, BYTES, MODE)                                                   \
  extern "C" void NAME(void* address) {                                                       \
    using namespace mslsim;                                                                   \
    Worker* const w = worker;                                                                 \
    if (!w) return; /* constructors, while the library is loaded */                           \
    if (uintptr_t(address) - uintptr_t(w->stacks) < w->stacks_span) return;                   \
    w->announced(uintptr_t(address), BYTES, MODE, __builtin_return_address(0));               \
  }
#define MSLSIM_SIZE(N)                                                  \
  MSLSIM_ANNOUNCED(__tsan_read##N, N, kRead)                 \
  MSLSIM_ANNOUNCED(__tsan_write##N, N, kWrite)               \
  MSLSIM_ANNOUNCED(__tsan_unaligned_read##N, N, kRead)                  \
  MSLSIM_ANNOUNCED(__tsan_unaligned_write##N, N, kWrite)
MSLSIM_SIZE(1)
MSLSIM_SIZE(2)
MSLSIM_SIZE(4)
MSLSIM_SIZE(8)
MSLSIM_SIZE(16)

#define MSLSIM_RANGE(NAME, MODE)                                                              \
  extern "C" void NAME(void* address, size_t bytes) {                                         \
    using namespace mslsim;                                                                   \
    if (worker && bytes) worker->announced(uintptr_t(address), bytes, MODE, __builtin_return_address(0)); \
  }
MSLSIM_RANGE(__tsan_read_range, kRead)
MSLSIM_RANGE(__tsan_write_range, kWrite)
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
