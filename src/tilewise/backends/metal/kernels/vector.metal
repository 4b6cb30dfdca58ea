// Attention of few query rows: decode. ROWS rows of one KV head (its query heads, and some queries) read its keys once.
//
// Each simdgroup takes every SIMDGROUPS-th key. Its 32 lanes share the columns of a row (lane, lane + 32, ...): K and V
// go from device memory to registers, a dot product is a sum over the lanes, and no barrier stands in the loop. At the
// end the simdgroups' states (m, l, o) are combined through threadgroup memory. A row skips the keys that are hidden from
// it, so that nothing of them reaches it.
//
// The grid is (tiles of queries, KV heads, splits); tiles of ROWS / pack queries, pack being the whole group.

#define COLUMNS (DP / 32)   // of q and K in each lane
#define V_COLUMNS (DVP / 32) // of V and o

struct Shared {
  threadgroup float* o;   // [SIMDGROUPS, ROWS, DVP]
  threadgroup float* ml;  // [SIMDGROUPS, ROWS, 2]
};

inline void attend_rows(thread const Tensors& t, thread const Results& to, thread const Params& p,
                        thread const Shared& mem, int tile, int kv_head, int split, int thread_id, int lane, int sg) {
  const int queries = ROWS / p.pack;
  int nth;
  const Sequence s = sequence_of_tile(t, p, tile, queries, nth);
  const int first = nth * queries;
  if (first >= s.q_len) return; // packed tiles are counted generously
  const int head = kv_head * p.pack;

  float q[ROWS][COLUMNS];
  float o[ROWS][V_COLUMNS];
  float top[ROWS];
  float l[ROWS];
  float slope[ROWS];
  Span sees[ROWS];
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    const Row row = row_at(p, s, r, queries, first, head);
    UNROLL
    for (int i = 0; i < COLUMNS; i++) {
      const int c = lane + 32 * i;
      q[r][i] = row.there && c < p.head_dim ? float(t.q[q_row(p, s, row) + c]) : 0.0f;
    }
    UNROLL
    for (int i = 0; i < V_COLUMNS; i++) o[r][i] = 0.0f;
    top[r] = LOWEST;
    l[r] = 0.0f;
    slope[r] = row.there ? slope_of(t, p, s, row.head) : 0.0f;
    sees[r] = key_span(p, s.offset + row.query, s.kv_len);
    if (!row.there) sees[r].hi = 0;
  }

  const int lo = key_span(p, s.offset + first, s.kv_len).lo;
  const int hi = key_span(p, s.offset + min(first + queries, s.q_len) - 1, s.kv_len).hi;
  const Span tiles = split_tiles(p, lo, hi, split, BK);
  const int end = min(hi, tiles.hi * BK);
  for (int n = max(lo, tiles.lo * BK) + sg; n < end; n += SIMDGROUPS) {
    const Place at = place_of(t, p, s, n);
    float key[COLUMNS];
    float value[V_COLUMNS];
    UNROLL
    for (int i = 0; i < COLUMNS; i++) {
      const int c = lane + 32 * i;
      key[i] = c < p.head_dim ? key_element(t, p, at, kv_head, c) : 0.0f;
    }
    UNROLL
    for (int i = 0; i < V_COLUMNS; i++) {
      const int c = lane + 32 * i;
      value[i] = c >= p.value_dim ? 0.0f : V_IN_K ? key[i] : value_element(t, p, at, kv_head, c);
    }
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      if (n < sees[r].lo || n >= sees[r].hi) continue;
      const Row row = row_at(p, s, r, queries, first, head);
      Cell cell;
      cell.bias = 0.0f;
      cell.seen = true;
      if (p.mask_kind != MASK_NONE) cell = mask_cell(t.mask, p.mask_kind, mask_row(p, s, row) + n * p.mask_k);
      if (!cell.seen) continue;
      float dot = 0.0f;
      UNROLL
      for (int i = 0; i < COLUMNS; i++) dot += q[r][i] * key[i];
      const float x = logit(p, simd_sum(dot), slope[r], s.offset + row.query - n) + cell.bias;
      const float highest = max(top[r], x);
      const float alpha = exp(top[r] - highest);
      const float weight = exp(x - highest);
      top[r] = highest;
      l[r] = l[r] * alpha + weight;
      UNROLL
      for (int i = 0; i < V_COLUMNS; i++) o[r][i] = o[r][i] * alpha + weight * value[i];
    }
  }

  UNROLL
  for (int r = 0; r < ROWS; r++) {
    UNROLL
    for (int i = 0; i < V_COLUMNS; i++) mem.o[(sg * ROWS + r) * DVP + lane + 32 * i] = o[r][i];
    if (lane == 0) {
      mem.ml[(sg * ROWS + r) * 2] = top[r];
      mem.ml[(sg * ROWS + r) * 2 + 1] = l[r];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    const Row row = row_at(p, s, r, queries, first, head);
    if (!row.there) continue;
    float highest = LOWEST;
    UNROLL
    for (int g = 0; g < SIMDGROUPS; g++) highest = max(highest, mem.ml[(g * ROWS + r) * 2]);
    float sum = 0.0f;
    float weight[SIMDGROUPS];
    UNROLL
    for (int g = 0; g < SIMDGROUPS; g++) {
      weight[g] = exp(mem.ml[(g * ROWS + r) * 2] - highest);
      sum += weight[g] * mem.ml[(g * ROWS + r) * 2 + 1];
    }
    const bool divides = p.splits == 1;
    const Normalised f = normalise(highest, sum, p.has_sinks && s.real && divides, p.has_sinks ? t.sinks[row.head] : 0.0f);
    for (int c = thread_id; c < p.value_dim; c += THREADS) {
      float x = 0.0f;
      UNROLL
      for (int g = 0; g < SIMDGROUPS; g++) x += weight[g] * mem.o[(g * ROWS + r) * DVP + c];
      if (divides) {
        to.out[out_row(p, s, row) + c] = TQ(x * f.factor / f.sum);
      } else {
        to.partial[partial_row(p, s, row, split) * p.value_dim + c] = x;
      }
    }
    if (thread_id == 0 && divides && p.has_lse) to.lse[lse_row(p, s, row)] = f.lse;
    if (thread_id == 0 && !divides) {
      to.partial_ml[partial_row(p, s, row, split) * 2] = highest;
      to.partial_ml[partial_row(p, s, row, split) * 2 + 1] = sum;
    }
  }
}

//: entry
threadgroup float shared_o[SIMDGROUPS * ROWS * DVP];
threadgroup float shared_ml[SIMDGROUPS * ROWS * 2];
const Params p = read_params(ints, strides, floats);
const Tensors t = {q, k, v, k_scales, v_scales, mask, states, slopes, sinks, lengths, offsets, cu_q, cu_k, table};
const Results to = {out, lse, partial, partial_ml};
const Shared mem = {shared_o, shared_ml};
attend_rows(t, to, p, mem, int(threadgroup_position_in_grid.x), int(threadgroup_position_in_grid.y),
            int(threadgroup_position_in_grid.z), int(thread_index_in_threadgroup), int(thread_index_in_simdgroup),
            int(simdgroup_index_in_threadgroup));
