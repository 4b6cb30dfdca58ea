// A dispatch: buffers are copied to their places, groups executed in an order of the seed's, buffers copied back, unless
// something went wrong: then the tensors stay as they were.
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>

#include "worker.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

namespace mslsim {

// As Python fills them in.
struct RegionIn {
  char* host;
  ulong bytes, phase;  // phase: the address modulo 256 that the region is to have
  uint unit, writable;
  uint8_t* written;
};
struct BufferIn { int region; ulong offset; };
struct LaunchIn {
  void (*entry)();
  RegionIn* regions;
  BufferIn* buffers;
  uint region_count, buffer_count;
  uint threads[3], group[3];
  ulong seed;
  uint workers, hostile_layout, races, shared_limit;
};

static std::mutex one_launch;
static Region regions[kSlots];
static std::vector<std::unique_ptr<Worker>> workers;
static std::atomic<uint> next_group{1};

// Memory that is there already is used again: fresh pages are what costs.
static bool place(Region& region, int slot, const RegionIn& in) {
  char* const start = reinterpret_cast<char*>(kDevice + (uintptr_t(slot) << kSlotBits) + kMiddle);
  const size_t wanted = in.bytes + 256, cells = (in.bytes / in.unit + 1) * sizeof(Cell);
  if (region.mapped < wanted) {
    if (region.mapped) munmap(start, region.mapped);
    region.mapped = (std::max(wanted, 2 * region.mapped) + 65535) & ~size_t(65535);
    if (mmap(start, region.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != start)
      return false;
  }
  if (in.writable && region.cells_mapped < cells) {
    if (region.cells_mapped) munmap(static_cast<void*>(region.cells), region.cells_mapped);
    region.cells_mapped = (std::max(cells, 2 * region.cells_mapped) + 65535) & ~size_t(65535);
    void* const all = mmap(nullptr, region.cells_mapped, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) return false;
    region.cells = static_cast<Cell*>(all);
  }
  region.base = start + in.phase;
  region.bytes = in.bytes;
  region.unit = in.unit;
  region.writable = in.writable;
  region.written = in.written;
  std::memcpy(region.base, in.host, in.bytes);
  return true;
}

// The library's code and constants.
static int find_image(dl_phdr_info* info, size_t, void* out) {
  Launch& l = *static_cast<Launch*>(out);
  uintptr_t end = 0;
  bool inside = false;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr)& part = info->dlpi_phdr[i];
    if (part.p_type != PT_LOAD) continue;
    const uintptr_t from = info->dlpi_addr + part.p_vaddr;
    inside |= uintptr_t(l.entry) - from < part.p_memsz;
    end = std::max(end, from + part.p_memsz);
  }
  if (!inside) return 0;
  l.image = info->dlpi_addr;
  l.image_end = end;
  return 1;
}

static int setup_error(Report* out, const char* text) {
  *out = Report{};
  out->fault = Fault::setup;
  std::snprintf(out->text, sizeof out->text, "%s", text);
  return 1;
}

extern "C" int mslsim_launch(const LaunchIn* in, Report* out) {
  std::lock_guard<std::mutex> lock(one_launch);
  Launch l{};
  l.entry = in->entry;
  l.regions = regions;
  l.seed = in->seed;
  l.hostile_layout = in->hostile_layout;
  l.races = in->races;
  l.shared_limit = in->shared_limit;
  if (!dl_iterate_phdr(find_image, &l)) return setup_error(out, "the library's own code was not found");
  if (in->region_count > kSlots || in->buffer_count > kSlots) return setup_error(out, "more than 32 buffers");
  for (Region& region : regions) region.bytes = 0;
  for (uint i = 0; i < in->region_count; i++)
    if (!place(regions[i], int(i), in->regions[i])) return setup_error(out, "no memory at the simulator's addresses");
  for (uint i = 0; i < in->buffer_count; i++) l.buffers[i] = regions[in->buffers[i].region].base + in->buffers[i].offset;
  uint total = 1;
  for (int i = 0; i < 3; i++) {
    l.threads[i] = in->threads[i];
    l.group[i] = in->group[i];
    l.groups[i] = (in->threads[i] + in->group[i] - 1) / in->group[i];
    total *= l.groups[i];
  }
  l.first_group = next_group;
  l.next_group = &next_group;

  const uint count = std::max(1u, std::min(in->workers, total));
  l.several_workers = count > 1;
  while (workers.size() < count) workers.emplace_back(new Worker);
  std::vector<uint> order(total);
  for (uint i = 0; i < total; i++) order[i] = i;
  uint64_t random = in->seed;
  for (uint i = in->seed ? total - 1 : 0; i > 0; i--) std::swap(order[i], order[next_random(random) % (i + 1)]);

  std::atomic<uint> next{0};
  std::atomic<bool> failed{false};
  auto work = [&](Worker& w) {
    w.launch = &l;
    for (uint i; !failed && (i = next++) < total;)
      if (!w.run(order[i]) && !failed.exchange(true)) *out = w.report;
  };
  std::vector<std::thread> threads;
  for (uint i = 1; i < count; i++) threads.emplace_back(work, std::ref(*workers[i]));
  work(*workers[0]);
  for (std::thread& t : threads) t.join();

  for (uint i = 0; i < in->region_count && !failed; i++)
    if (regions[i].writable) std::memcpy(in->regions[i].host, regions[i].base, regions[i].bytes);
  return failed;
}

// Sizes of threadgroup arrays, told by a library while it is loaded, asked for by Python right after.
struct Told { int id; int line; size_t bytes; };
static std::vector<Told> told;
void size_of_shared(int id, size_t bytes, int line) { told.push_back(Told{id, line, bytes}); }

extern "C" int mslsim_told(int* ids, ulong* bytes, int* lines, int room) {
  const int count = std::min(room, int(told.size()));
  for (int i = 0; i < count; i++) {
    ids[i] = told[size_t(i)].id;
    bytes[i] = told[size_t(i)].bytes;
    lines[i] = told[size_t(i)].line;
  }
  told.clear();
  return count;
}

}  // namespace mslsim
