// Threads take turns: each lane runs until it waits for others, then the next lane of its simdgroup; the last lane to
// come does what they waited for. A simdgroup goes on alone up to a threadgroup_barrier, then the next simdgroup runs.
#include <cstdio>
#include <cstring>

#include "worker.h"

namespace mslsim {

__attribute__((tls_model("initial-exec"))) thread_local Worker* worker = nullptr;

constexpr uint kDeviceFlag = 1, kThreadgroupFlag = 2;  // of mem_flags

// 0, 1, 2, ... in an order of the seed's; seed 0 keeps them.
void Worker::shuffle(uchar* items, int count) {
  for (int i = 0; i < count; i++) items[i] = uchar(i);
  for (int i = launch->seed ? count - 1 : 0; i > 0; i--) {
    const int j = int(next_random(random) % uint64_t(i + 1));
    const uchar kept = items[i];
    items[i] = items[j];
    items[j] = kept;
  }
}

void Worker::resume(int thread) {
  const int before = self;
  self = thread;
  if (before != thread) change(fibers[size_t(before)].context, fibers[size_t(thread)].context);
}

void Worker::leave() {
  change(fibers[size_t(self)].context, main);
  __builtin_unreachable();
}

void Worker::fail(Fault fault, uint where, const char* text, int thread) {
  report.fault = fault;
  report.where = where;
  report.thread = uint(thread);
  std::memcpy(report.group, position, sizeof position);
  report.linear_group = group - launch->first_group;
  if (report.memory == 1) {
    const Array& array = arrays[report.slot];
    report.unit = array.element;
    std::snprintf(report.name, sizeof report.name, "%s", array.name ? array.name : "an array not declared yet");
  }
  std::snprintf(report.text, sizeof report.text, "%s", text);
  leave();
}

// A thread stopped at another place than the first of simdgroup `a` did. Names one place that is not the end.
void Worker::divergence(const Simdgroup& a, Stop stop, int line, int thread) {
  static const char* const kStops[] = {"", "a simdgroup operation", "simdgroup_barrier", "threadgroup_barrier", "end"};
  const bool ended = a.stop == Stop::finished;
  const Stop here = ended ? stop : a.stop, there = ended ? a.stop : stop;
  const int here_line = ended ? line : a.line, there_line = ended ? a.line : line;
  const int who = ended ? thread : a.leader, other = ended ? a.leader : thread;
  report.memory = 0;
  report.other_where = kIsLine | uint(there_line);
  report.other_thread = uint(other);
  char text[200];
  if (there == Stop::finished)
    std::snprintf(text, sizeof text, "%s is reached by thread %d, but thread %d has ended", kStops[int(here)], who, other);
  else
    std::snprintf(text, sizeof text, "%s is reached by thread %d, while thread %d is at %s of line %d",
                  kStops[int(here)], who, other, kStops[int(there)], there_line);
  fail(Fault::divergence, kIsLine | uint(here_line), text, who);
}

void Worker::arrive(Stop stop, int line, Together together, void* arguments) {
  Simdgroup& g = *mine;
  if (g.noted != g.notes.size()) {  // a lane that came to fewer matrices than the first
    g.stop = Stop::together;
    g.line = g.notes[g.noted].line;
    divergence(g, stop, line, self);
  }
  g.noted = 0;
  if (g.turn == 0) {
    g.stop = stop;
    g.line = line;
    g.leader = self;
    g.together = together;
  } else if (g.stop != stop || g.line != line || g.together != together) {
    divergence(g, stop, line, self);
  }
  g.arguments[self % kLanes] = arguments;
  if (++g.turn < g.lanes) return resume(g.first + g.order[g.turn]);

  g.notes.clear();
  if (stop == Stop::threadgroup_barrier || stop == Stop::finished) return next_simdgroup();
  if (stop == Stop::together) together(g.arguments, g.lanes);
  if (stop == Stop::simdgroup_barrier) {
    const uint flags = *static_cast<uint*>(arguments);
    if (flags & kDeviceFlag) g.device_step++;
    if (flags & kThreadgroupFlag) g.threadgroup_step++;
  }
  g.turn = 0;
  resume(g.first + g.order[0]);
}

// Called by the last lane of a simdgroup that cannot go on alone.
void Worker::next_simdgroup() {
  if (++turn == groups_of_lanes) {
    const Simdgroup& a = simdgroups[0];
    for (int i = 1; i < groups_of_lanes; i++) {
      const Simdgroup& b = simdgroups[i];
      if (a.stop != b.stop || a.line != b.line) divergence(a, b.stop, b.line, b.leader);
    }
    if (a.stop == Stop::finished) leave();
    const uint flags = *static_cast<uint*>(a.arguments[0]);
    if (flags & kDeviceFlag) device_stretch++;
    if (flags & kThreadgroupFlag) threadgroup_stretch++;
    shuffle(order, groups_of_lanes);
    turn = 0;
  }
  mine = &simdgroups[order[turn]];
  mine->turn = 0;
  resume(mine->first + mine->order[0]);
}

void barrier(Scope scope, uint memory, int line) {
  const Stop stop = scope == Scope::threadgroup ? Stop::threadgroup_barrier : Stop::simdgroup_barrier;
  worker->arrive(stop, line, nullptr, &memory);
}

const Here& here() { return worker->heres[size_t(worker->self)]; }

static void start() {
  worker->launch->entry();
  worker->arrive(Stop::finished, 0, nullptr, nullptr);
}

static Position at(const uint* v) { return Position{{v[0], v[1], v[2]}}; }

bool Worker::run(uint linear) {
  worker = this;
  const Launch& l = *launch;
  group = (*l.next_group)++;
  random = l.seed * 1000003u + linear;
  position[0] = linear % l.groups[0];
  position[1] = linear / l.groups[0] % l.groups[1];
  position[2] = linear / l.groups[0] / l.groups[1];
  uint size[3];  // smaller than asked at the grid's edges
  for (int i = 0; i < 3; i++) {
    const uint left = l.threads[i] - position[i] * l.group[i];
    size[i] = left < l.group[i] ? left : l.group[i];
  }
  threads = int(size[0] * size[1] * size[2]);
  groups_of_lanes = (threads + kLanes - 1) / kLanes;
  device_stretch = threadgroup_stretch = 0;
  shared_bytes = cells_used = 0;
  for (Array& array : arrays) array.name = nullptr;
  report = Report{};

  if (fibers.size() < size_t(threads)) {
    if (stacks) munmap(stacks, stacks_span);
    fibers.resize(size_t(threads));
    heres.resize(size_t(threads));
    stacks = new_stacks(fibers.size());
    stacks_span = fibers.size() * kStack;
    for (size_t i = 0; i < fibers.size(); i++) fibers[i].top = top_of(stacks, i);
  }
  for (int t = 0; t < threads; t++) {
    Fiber& f = fibers[size_t(t)];
    const uint i = uint(t), inside[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
    uint grid[3];
    for (int d = 0; d < 3; d++) grid[d] = position[d] * l.group[d] + inside[d];
    const uint whole = l.group[0] * l.group[1] * l.group[2];
    heres[i] = Here{at(grid), at(inside), at(position), at(l.threads), at(size), at(l.groups), at(l.group),
                  i, i % kLanes, i / kLanes, uint(groups_of_lanes), (whole + kLanes - 1) / kLanes, kLanes, kLanes};
    prepare(f.context, f.top, start);
  }
  for (int s = 0; s < groups_of_lanes; s++) {
    Simdgroup& g = simdgroups[s];
    g.turn = 0;
    g.device_step = g.threadgroup_step = 0;
    g.notes.clear();
    g.noted = 0;
    g.first = s * kLanes;
    g.lanes = threads - g.first < kLanes ? threads - g.first : kLanes;
    shuffle(g.order, g.lanes);
  }
  shuffle(order, groups_of_lanes);
  turn = 0;
  mine = &simdgroups[order[0]];
  self = mine->first + mine->order[0];
  change(main, fibers[size_t(self)].context);
  worker = nullptr;
  return report.fault == Fault::none;
}

// A group's threadgroup memory is at most 32 KiB, so that its cells are at most as many.
Worker::Worker() {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  arena = static_cast<char*>(mmap(nullptr, kArenaSpan, PROT_READ | PROT_WRITE, flags, -1, 0));
  cells = static_cast<Cell*>(mmap(nullptr, kArenaSpan / 1024 * sizeof(Cell), PROT_READ | PROT_WRITE, flags, -1, 0));
}

}  // namespace mslsim
