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

void Worker::resume(Fiber& fiber) {
  Fiber& before = *self;
  self = &fiber;
  if (&before != &fiber) change(before.context, fiber.context);
}

void Worker::leave() {
  change(self->context, main);
  __builtin_unreachable();
}

void Worker::fail(Fault fault, uint where, const char* text, const Fiber& who) {
  report.fault = fault;
  report.where = where;
  report.thread = who.here.thread_index_in_threadgroup;
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

// Two threads stopped at different places: names one that is not the end.
void Worker::divergence(const Fiber& a, const Fiber& b) {
  static const char* const kStops[] = {"", "a simdgroup operation", "simdgroup_barrier", "threadgroup_barrier", "end"};
  report.memory = 0;
  const Fiber& here = a.stop == Stop::finished ? b : a;
  const Fiber& there = &here == &a ? b : a;
  report.other_where = kIsLine | uint(there.line);
  report.other_thread = there.here.thread_index_in_threadgroup;
  char text[200];
  if (there.stop == Stop::finished)
    std::snprintf(text, sizeof text, "%s is reached by thread %u, but thread %u has ended", kStops[int(here.stop)],
                  here.here.thread_index_in_threadgroup, report.other_thread);
  else
    std::snprintf(text, sizeof text, "%s is reached by thread %u, while thread %u is at the %s of line %d",
                  kStops[int(here.stop)], here.here.thread_index_in_threadgroup, report.other_thread,
                  kStops[int(there.stop)], there.line);
  fail(Fault::divergence, kIsLine | uint(here.line), text, here);
}

void Worker::arrive(Stop stop, int line, Together work, void* arguments) {
  Fiber& me = *self;
  me.stop = stop;
  me.line = line;
  me.together = work;
  me.arguments = arguments;
  Simdgroup& g = mine();
  if (++g.turn < g.lanes) return resume(fibers[size_t(g.first + g.order[g.turn])]);

  const Fiber& a = fibers[size_t(g.first)];
  for (int i = 1; i < g.lanes; i++) {
    const Fiber& b = fibers[size_t(g.first + i)];
    if (a.stop != b.stop || a.line != b.line || a.together != b.together) divergence(a, b);
  }
  if (stop == Stop::threadgroup_barrier || stop == Stop::finished) return next_simdgroup();
  if (stop == Stop::together) together(g);
  if (stop == Stop::simdgroup_barrier) {
    const uint flags = *static_cast<uint*>(arguments);
    if (flags & kDeviceFlag) g.device_step++;
    if (flags & kThreadgroupFlag) g.threadgroup_step++;
  }
  g.turn = 0;
  resume(fibers[size_t(g.first + g.order[0])]);
}

void Worker::together(Simdgroup& g) {
  void* all[kLanes];
  for (int i = 0; i < g.lanes; i++) all[i] = fibers[size_t(g.first + i)].arguments;
  fibers[size_t(g.first)].together(all, g.lanes);
}

// Called by the last lane of a simdgroup that cannot go on alone.
void Worker::next_simdgroup() {
  if (++turn == groups_of_lanes) {
    const Fiber& a = fibers[0];
    for (int i = 1; i < groups_of_lanes; i++) {
      const Fiber& b = fibers[size_t(i * kLanes)];
      if (a.stop != b.stop || a.line != b.line) divergence(a, b);
    }
    if (a.stop == Stop::finished) leave();
    const uint flags = *static_cast<uint*>(a.arguments);
    if (flags & kDeviceFlag) device_stretch++;
    if (flags & kThreadgroupFlag) threadgroup_stretch++;
    shuffle(order, groups_of_lanes);
    turn = 0;
  }
  Simdgroup& g = simdgroups[order[turn]];
  g.turn = 0;
  resume(fibers[size_t(g.first + g.order[0])]);
}

void barrier(Scope scope, uint memory, int line) {
  const Stop stop = scope == Scope::threadgroup ? Stop::threadgroup_barrier : Stop::simdgroup_barrier;
  worker->arrive(stop, line, nullptr, &memory);
}

const Here& here() { return worker->self->here; }

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
    if (stacks) munmap(stacks, fibers.size() * kStack);
    fibers.resize(size_t(threads));
    stacks = new_stacks(fibers.size());
    for (size_t i = 0; i < fibers.size(); i++) fibers[i].stack = stacks + i * kStack;
  }
  for (int t = 0; t < threads; t++) {
    Fiber& f = fibers[size_t(t)];
    const uint i = uint(t), inside[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
    uint grid[3];
    for (int d = 0; d < 3; d++) grid[d] = position[d] * l.group[d] + inside[d];
    const uint whole = l.group[0] * l.group[1] * l.group[2];
    f.here = Here{at(grid), at(inside), at(position), at(l.threads), at(size), at(l.groups), at(l.group),
                  i, i % kLanes, i / kLanes, uint(groups_of_lanes), (whole + kLanes - 1) / kLanes, kLanes, kLanes};
    f.stop = Stop::running;
    prepare(f.context, f.stack, start);
  }
  for (int s = 0; s < groups_of_lanes; s++) {
    Simdgroup& g = simdgroups[s];
    g = Simdgroup{};
    g.first = s * kLanes;
    g.lanes = threads - g.first < kLanes ? threads - g.first : kLanes;
    shuffle(g.order, g.lanes);
  }
  shuffle(order, groups_of_lanes);
  turn = 0;
  const Simdgroup& g = simdgroups[order[0]];
  self = &fibers[size_t(g.first + g.order[0])];
  change(main, self->context);
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
