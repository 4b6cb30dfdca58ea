// One operating-system thread, which executes one threadgroup at a time.
#pragma once
#include <atomic>
#include <vector>

#include "fiber.h"
#include "memory.h"
#include "mslsim/runtime.h"

namespace mslsim {

enum class Stop : int { running, together, simdgroup_barrier, threadgroup_barrier, finished };
constexpr int kRead = 1, kWrite = 2, kAtomic = 4;  // modes of an access
typedef void (*Together)(void** arguments, int lanes);  // runs once, when all lanes have come

struct Fiber {
  Context context;
  char* top = nullptr;  // of its stack
};

// A matrix loaded or stored: no lane waits for it, but all must come to it. The first lane to run does the checking and
// leaves a note, the others find theirs the same.
struct Note {
  int line;
  bool store;
  Tile tile;
};

struct Simdgroup {
  int first, lanes;
  int turn;            // how many of its lanes have come to the next stop
  uchar order[kLanes];
  uint device_step, threadgroup_step;
  // The stop that its first lane came to: the others must come to the same.
  Stop stop;
  int line, leader;
  Together together;
  void* arguments[kLanes];
  std::vector<Note> notes;  // since the last stop
  size_t noted;             // how many of them the running lane has come to
};

inline uint64_t next_random(uint64_t& state) {  // splitmix64
  uint64_t z = state += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

struct Launch;

struct Worker {
  const Launch* launch = nullptr;
  int self = 0;                   // the thread that runs
  Simdgroup* mine = simdgroups;   // its simdgroup
  Context main;
  std::vector<Fiber> fibers;
  std::vector<Here> heres;
  char* stacks = nullptr;
  size_t stacks_span = 0;
  Simdgroup simdgroups[kLanes];
  int threads = 0, groups_of_lanes = 0, turn = 0;
  uchar order[kLanes];
  uint group = 0, position[3] = {0, 0, 0};
  uint device_stretch = 0, threadgroup_stretch = 0;
  uint64_t random = 0;

  char* arena = nullptr;
  Array arrays[kArrays];
  size_t shared_bytes = 0, cells_used = 0;
  Cell* cells = nullptr;

  Report report;

  Worker();
  bool run(uint linear);  // a whole threadgroup; false if it failed
  void move_tile(const Note& note, char* elements);
  void arrive(Stop stop, int line, Together together, void* arguments);
  void announced(uintptr_t address, size_t bytes, int mode, void* caller);
  void access(uintptr_t address, size_t bytes, int mode, ushort who, uint where);

  [[noreturn]] void fail(Fault fault, uint where, const char* text) { fail(fault, where, text, self); }
  [[noreturn]] void fail(Fault fault, uint where, const char* text, int thread);
  [[noreturn]] void leave();
  void shuffle(uchar* items, int count);

 private:
  void touch_array(uintptr_t offset, size_t bytes, Access& is, int mode);
  void touch_buffer(uintptr_t offset, size_t bytes, Access& is, int mode);
  Fault note_in_buffer(Region& region, size_t at, size_t bytes, const Access& is, int mode, Access& was);
  const Access* touch(Cell* cell, Cell* end, const Access& is, uint first);
  [[noreturn]] void race(const Access& was, const Access& is);
  void resume(int thread);
  void next_simdgroup();
  [[noreturn]] void divergence(const Simdgroup& a, Stop stop, int line, int thread);
};

extern thread_local Worker* worker;

struct Launch {
  void (*entry)();
  Region* regions;
  char* buffers[kSlots];
  uint threads[3], group[3], groups[3];
  uint first_group;                // numbers of this launch's groups begin here, in the order in which they run
  std::atomic<uint>* next_group;
  uint64_t seed;
  bool hostile_layout, races, several_workers;
  uint shared_limit;
  uintptr_t image, image_end;
};

}  // namespace mslsim
