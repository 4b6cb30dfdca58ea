// Which tiles of a dense mask matter: 0 without a visible cell, 2 if every cell is visible and, in a float mask, is
// exactly 0, else 1. Cells past the edges count as neither. One simdgroup for each tile; the grid is (tiles of keys,
// tiles of queries, planes). Sizes are the mask's own: 1 where it is broadcast.

inline void classify_tile(thread const Tensors& t, thread const Params& p, int kt, int qt, int plane, int lane) {
  const long at = plane / p.plane_heads * p.mask_b + plane % p.plane_heads * p.mask_h;
  bool seen = false;
  bool partial = false;
  for (int i = lane; i < p.tile_q * p.tile_k; i += 32) {
    const int row = qt * p.tile_q + i / p.tile_k;
    const int n = kt * p.tile_k + i % p.tile_k;
    if (row >= p.plane_rows || n >= p.plane_keys) continue;
    const Cell cell = mask_cell(t.mask, at + row * p.mask_q + n * p.mask_k);
    seen = seen || cell.seen;
    partial = partial || !cell.seen || (as_type<uint>(cell.bias) & 0x7fffffffu) != 0u;
  }
  const bool any_seen = simd_any(seen);
  const bool any_partial = simd_any(partial);
  const int tiles_q = (p.plane_rows + p.tile_q - 1) / p.tile_q;
  const int tiles_k = (p.plane_keys + p.tile_k - 1) / p.tile_k;
  if (lane == 0) t.states[(long(plane) * tiles_q + qt) * tiles_k + kt] = !any_seen ? 0 : any_partial ? 1 : 2;
}

//: entry
using namespace tilewise;
const Params p = read_params(ints, strides, floats);
classify_tile(t, p, int(threadgroup_position_in_grid.x), int(threadgroup_position_in_grid.y),
              int(threadgroup_position_in_grid.z), int(thread_index_in_simdgroup));
