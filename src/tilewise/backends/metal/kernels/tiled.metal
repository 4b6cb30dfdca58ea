// Attention of one tile of BM query rows over the keys that it sees, by 8x8 simdgroup matrices.
//
//   s = q k^T    [BM, BK]   K goes through threadgroup memory, DC of its DP columns at a time
//   p = exp(s - m)          online softmax, THREADS / BM threads a row; m and l in their registers
//   o = o * alpha + p v    [BM, DVP]  V likewise, DVC columns at a time; o stays in registers
//
// A threadgroup is SG_ROWS x SG_COLS simdgroups: each owns 8 rows and every SG_COLS-th block of 8 columns of s and o.
// All matrices are of floats. They are loaded, stored and multiplied whole, or combined element by element with others
// that lie in the same way, so that it does not matter how a matrix lies in its lanes.
//
// A value under a hidden cell must not reach a row, not even as 0 * NaN. Values that are not finite are left out of the
// products; where a tile held one, the rows that see it get it added afterwards (add_nonfinite).
//
// The grid is (tiles of queries, heads / pack, splits). With splits, (m, l, o) goes to the workspace, for combine.metal.

#define BM (8 * SG_ROWS)
#define EACH_ROW (THREADS / BM) // threads that share a row's softmax, all in one simdgroup
#define S_BLOCKS (BK / 8 / SG_COLS) // blocks of s that a simdgroup owns
#define O_BLOCKS (DVP / 8 / SG_COLS) // and of o
#define SLICE_BLOCKS (DVC / 8 / SG_COLS) // those of them in one slice of V
#define STAGE (BK * (DC > DVC ? DC : DVC))

typedef simdgroup_matrix<float, 8, 8> Matrix;

// Threadgroup memory.
struct Shared {
  threadgroup float* q;      // [BM, DP]
  threadgroup float* kv;     // [BK, DC] or [BK, DVC]
  threadgroup float* s;      // [BM, BK]: scores, then weights
  threadgroup float* rows;   // [BM, 8]: a number for each row, in every column of a matrix
  threadgroup float* block;  // [SIMDGROUPS, 8, 8]: for each simdgroup's own use
  threadgroup int* nonfinite;   // [SIMDGROUPS]: whether a simdgroup has met values that are not finite
};

inline void scale_by(thread Matrix& x, thread Matrix& by) {
  x.thread_elements()[0] *= by.thread_elements()[0];
  x.thread_elements()[1] *= by.thread_elements()[1];
}

inline void add_to(thread Matrix& x, thread Matrix& other) {
  x.thread_elements()[0] += other.thread_elements()[0];
  x.thread_elements()[1] += other.thread_elements()[1];
}

inline void stage_queries(thread const Tensors& t, thread const Params& p, thread const Sequence& s,
                          threadgroup float* to, int queries, int first, int head, int thread_id) {
  for (int i = thread_id; i < BM * DP; i += THREADS) {
    const int c = i % DP;
    const Row row = row_at(p, s, i / DP, queries, first, head);
    float x = 0.0f;
    if (row.there && c < p.head_dim) x = float(t.q[q_row(p, s, row) + c]);
    to[i] = x;
  }
}

// Columns c0 .. c0 + DC of keys n0 .. n0 + BK; zeros for keys outside [lo, hi), which are never read.
inline void stage_keys(thread const Tensors& t, thread const Params& p, thread const Sequence& s, threadgroup float* to,
                       int kv_head, int n0, int lo, int hi, int c0, int thread_id) {
  const int c = c0 + thread_id % DC; // a thread stays in its column
  for (int r = thread_id / DC; r < BK; r += THREADS / DC) {
    const int n = n0 + r;
    float x = 0.0f;
    if (n >= lo && n < hi && c < p.head_dim) x = key_element(t, p, place_of(t, p, s, n), kv_head, c);
    to[r * DC + thread_id % DC] = x;
  }
}

// The same of values; and whether this thread met one that is not finite, which is left out.
inline bool stage_values(thread const Tensors& t, thread const Params& p, thread const Sequence& s,
                         threadgroup float* to, int kv_head, int n0, int lo, int hi, int c0, int thread_id) {
  const int c = c0 + thread_id % DVC;
  bool nonfinite = false;
  for (int r = thread_id / DVC; r < BK; r += THREADS / DVC) {
    const int n = n0 + r;
    float x = 0.0f;
    if (n >= lo && n < hi && c < p.value_dim) x = value_element(t, p, place_of(t, p, s, n), kv_head, c);
    if (!is_finite(x)) {
      nonfinite = true;
      x = 0.0f;
    }
    to[r * DVC + thread_id % DVC] = x;
  }
  return nonfinite;
}

// Adds to an 8x8 block of o, at row r0 of the tile and column c0 of the values, the values that were left out.
inline void add_nonfinite(thread const Tensors& t, thread const Params& p, thread const Sequence& s,
                       thread const Shared& mem, thread Matrix& o, int queries, int first, int head, int n0, int r0,
                       int c0, int lane, int sg) {
  threadgroup float* block = mem.block + sg * 64;
  for (int cell = lane; cell < 64; cell += 32) {
    const int r = r0 + cell / 8;
    const int c = c0 + cell % 8;
    const Row row = row_at(p, s, r, queries, first, head);
    const Span sees = key_span(p, s.offset + row.query, s.kv_len);
    float sum = 0.0f;
    for (int j = 0; j < BK && row.there && c < p.value_dim; j++) {
      const int n = n0 + j;
      if (n < sees.lo || n >= sees.hi) continue;
      const long at = mask_row(p, s, row) + n * p.mask_k;
      if (p.mask_kind != MASK_NONE && !mask_cell(t.mask, p.mask_kind, at).seen) continue;
      const float x = value_element(t, p, place_of(t, p, s, n), head / p.group, c);
      if (!is_finite(x)) sum += mem.s[r * BK + j] * x;
    }
    block[cell] = sum;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  Matrix found;
  simdgroup_load(found, block, 8);
  add_to(o, found);
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

inline void attend_tile(thread const Tensors& t, thread const Results& to, thread const Params& p,
                        thread const Shared& mem, int tile, int head_block, int split, int thread_id, int lane,
                        int sg) {
  const int queries = BM / p.pack;
  int nth;
  const Sequence s = sequence_of_tile(t, p, tile, queries, nth);
  const int first = nth * queries;
  if (first >= s.q_len) return; // packed tiles are counted generously
  const int head = head_block * p.pack;
  const int kv_head = head / p.group;
  const int r0 = sg / SG_COLS * 8;  // this simdgroup's rows
  const int column = sg % SG_COLS;  // and which of the blocks of columns

  // This thread's row of the softmax, with its share of the cells: part, part + EACH_ROW, ...
  const int r = thread_id / EACH_ROW;
  const int part = thread_id % EACH_ROW;
  const Row row = row_at(p, s, r, queries, first, head);
  const int position = s.offset + row.query;
  Span sees = key_span(p, position, s.kv_len);
  if (!row.there) sees.hi = 0;
  const float slope = row.there ? slope_of(t, p, s, row.head) : 0.0f;
  float top = LOWEST;
  float l = 0.0f;

  // Spans move right as rows go down: the first query has the leftmost start, the last one the rightmost end.
  const int lo = key_span(p, s.offset + first, s.kv_len).lo;
  const int hi = key_span(p, s.offset + min(first + queries, s.q_len) - 1, s.kv_len).hi;
  const Span tiles = split_tiles(p, lo, hi, split, BK);

  stage_queries(t, p, s, mem.q, queries, first, head, thread_id);
  Matrix o[O_BLOCKS];
  UNROLL
  for (int i = 0; i < O_BLOCKS; i++) o[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);

  for (int kt = tiles.lo; kt < tiles.hi; kt++) {
    int state = 1;
    if (p.has_states) {
      state = t.states[s.b * p.states_b + head * p.states_h + nth * p.states_q + kt * p.states_k];
      if (state == 0) continue;
    }
    const int n0 = kt * BK;

    // s = q k^T
    Matrix score[S_BLOCKS];
    UNROLL
    for (int i = 0; i < S_BLOCKS; i++) score[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int c0 = 0; c0 < DP; c0 += DC) {
      threadgroup_barrier(mem_flags::mem_threadgroup); // what was staged before has been used
      stage_keys(t, p, s, mem.kv, kv_head, n0, lo, hi, c0, thread_id);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int d = 0; d < DC; d += 8) {
        Matrix a;
        simdgroup_load(a, mem.q + r0 * DP + c0 + d, DP);
        UNROLL
        for (int i = 0; i < S_BLOCKS; i++) {
          Matrix b;
          simdgroup_load(b, mem.kv + (i * SG_COLS + column) * 8 * DC + d, DC, ulong2(0, 0), true);
          simdgroup_multiply_accumulate(score[i], a, b, score[i]);
        }
      }
    }
    UNROLL
    for (int i = 0; i < S_BLOCKS; i++) simdgroup_store(score[i], mem.s + r0 * BK + (i * SG_COLS + column) * 8, BK);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // p = exp(s - m)
    float cells[BK / EACH_ROW];
    bool seen[BK / EACH_ROW];
    float highest = top;
    UNROLL
    for (int i = 0; i < BK / EACH_ROW; i++) {
      const int n = n0 + part + i * EACH_ROW;
      float x = logit(p, mem.s[r * BK + part + i * EACH_ROW], slope, position - n);
      seen[i] = n >= sees.lo && n < sees.hi;
      if (p.mask_kind != MASK_NONE && state != 2 && seen[i]) {
        const Cell cell = mask_cell(t.mask, p.mask_kind, mask_row(p, s, row) + n * p.mask_k);
        x += cell.bias;
        seen[i] = cell.seen;
      }
      cells[i] = x;
      if (seen[i]) highest = max(highest, x);
    }
    for (ushort step = EACH_ROW / 2; step > 0; step /= 2) highest = max(highest, simd_shuffle_xor(highest, step));
    float sum = 0.0f;
    UNROLL
    for (int i = 0; i < BK / EACH_ROW; i++) {
      const float weight = seen[i] ? exp(cells[i] - highest) : 0.0f;
      mem.s[r * BK + part + i * EACH_ROW] = weight;
      sum += weight;
    }
    for (ushort step = EACH_ROW / 2; step > 0; step /= 2) sum += simd_shuffle_xor(sum, step);
    const float alpha = exp(top - highest);
    l = l * alpha + sum;
    top = highest;
    for (int i = part; i < 8; i += EACH_ROW) mem.rows[r * 8 + i] = alpha;
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // o = o * alpha + p v
    Matrix by;
    simdgroup_load(by, mem.rows + r0 * 8, 8);
    UNROLL
    for (int i = 0; i < O_BLOCKS; i++) scale_by(o[i], by);
    Matrix weights[BK / 8];
    UNROLL
    for (int j = 0; j < BK / 8; j++) simdgroup_load(weights[j], mem.s + r0 * BK + j * 8, BK);
    UNROLL
    for (int slice = 0; slice < DVP / DVC; slice++) {
      if (slice > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
      const bool mine = stage_values(t, p, s, mem.kv, kv_head, n0, lo, hi, slice * DVC, thread_id);
      const bool any = simd_any(mine);
      if (lane == 0) mem.nonfinite[sg] = any;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL
      for (int i = 0; i < SLICE_BLOCKS; i++) {
        UNROLL
        for (int j = 0; j < BK / 8; j++) {
          Matrix b;
          simdgroup_load(b, mem.kv + j * 8 * DVC + (i * SG_COLS + column) * 8, DVC);
          simdgroup_multiply_accumulate(o[slice * SLICE_BLOCKS + i], weights[j], b, o[slice * SLICE_BLOCKS + i]);
        }
      }
      if (mem.nonfinite[0] + mem.nonfinite[1] + mem.nonfinite[2] + mem.nonfinite[3] > 0) {
        UNROLL
        for (int i = 0; i < SLICE_BLOCKS; i++) {
          const int c0 = slice * DVC + (i * SG_COLS + column) * 8;
          add_nonfinite(t, p, s, mem, o[slice * SLICE_BLOCKS + i], queries, first, head, n0, r0, c0, lane, sg);
        }
      }
    }
  }

  // Rows: with splits as they are, else with their sink and divided by their sum.
  const bool divides = p.splits == 1;
  const bool sinks = p.has_sinks && divides && s.real && row.there;
  const Normalised f = normalise(top, l, sinks, sinks ? t.sinks[row.head] : 0.0f);
  if (part == 0) {
    mem.rows[r * 8] = f.factor;
    mem.rows[r * 8 + 1] = f.sum;
    if (row.there && !divides) {
      to.partial_ml[partial_row(p, s, row, split) * 2] = top;
      to.partial_ml[partial_row(p, s, row, split) * 2 + 1] = l;
    }
    if (row.there && divides && p.has_lse) to.lse[lse_row(p, s, row)] = f.lse;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int i = 0; i < O_BLOCKS; i++) {
    const int c0 = (i / SLICE_BLOCKS) * DVC + (i % SLICE_BLOCKS * SG_COLS + column) * 8;
    simdgroup_store(o[i], mem.block + sg * 64, 8);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int cell = lane; cell < 64; cell += 32) {
      const int c = c0 + cell % 8;
      const int at = r0 + cell / 8;
      const Row to_row = row_at(p, s, at, queries, first, head);
      const float x = mem.block[sg * 64 + cell];
      if (!to_row.there || c >= p.value_dim) continue;
      if (divides) {
        to.out[out_row(p, s, to_row) + c] = TQ(x * mem.rows[at * 8] / mem.rows[at * 8 + 1]);
      } else {
        to.partial[partial_row(p, s, to_row, split) * p.value_dim + c] = x;
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

//: entry
threadgroup float shared_q[BM * DP];
threadgroup float shared_kv[STAGE];
threadgroup float shared_s[BM * BK];
threadgroup float shared_rows[BM * 8];
threadgroup float shared_block[SIMDGROUPS * 64];
threadgroup int shared_nonfinite[SIMDGROUPS];
const Params p = read_params(ints, strides, floats);
const Tensors t = {q, k, v, k_scales, v_scales, mask, states, slopes, sinks, lengths, offsets, cu_q, cu_k, table};
const Results to = {out, lse, partial, partial_ml};
const Shared mem = {shared_q, shared_kv, shared_s, shared_rows, shared_block, shared_nonfinite};
attend_tile(t, to, p, mem, int(threadgroup_position_in_grid.x), int(threadgroup_position_in_grid.y),
            int(threadgroup_position_in_grid.z), int(thread_index_in_threadgroup), int(thread_index_in_simdgroup),
            int(simdgroup_index_in_threadgroup));
