// Attention of few query rows: decode. ROWS rows of one KV head (its query heads, and some queries) read its keys once.
//
// Each simdgroup takes every SIMDGROUPS-th key. Each of its 32 lanes has COLUMNS neighbouring columns of a row: K and V
// go from device memory to registers, a dot product is a sum over the lanes, and no barrier stands in the loop. At the
// end the simdgroups' states (m, l, o) are combined through threadgroup memory. A row skips the keys that are hidden from
// it, so that nothing of them reaches it.
//
// The grid is (tiles of queries, KV heads, splits); tiles of ROWS / PACK queries, PACK being the whole group.

#define COLUMNS (DP / 32)    // of q and K in each lane
#define V_COLUMNS (DVP / 32) // of V and o

struct Shared {
  threadgroup float* o;   // [SIMDGROUPS, ROWS, DVP]
  threadgroup float* ml;  // [SIMDGROUPS, ROWS, 2]
};

// 16 bits as a number of the type that a row has; other rows are not read by words.
inline float number(ushort bits, device const half*) { return float(as_type<half>(bits)); }
inline float number(ushort bits, device const bfloat*) { return float(as_type<bfloat>(bits)); }
template <class T> inline float number(ushort bits, device const T*) { return 0.0f; }

// Elements c .. c + N of a row: by words of 32 bits where these are whole, which a compiler makes one load of.
template <int N, int KIND, bool WORDS, class T, class S>
inline void some(device const T* row, device const S* scales, int c, int width, int group, thread float* x) {
  if (KIND == PLAIN && WORDS && N % 2 == 0) {
    device const uint* words = (device const uint*)(row + c);
    UNROLL
    for (int i = 0; i < N / 2; i++) {
      const uint word = c < width ? words[i] : 0u;
      x[2 * i] = number(ushort(word), row);
      x[2 * i + 1] = number(ushort(word >> 16), row);
    }
    return;
  }
  if (KIND != PLAIN && WIDE && N % 4 == 0 && width % (2 * N) == 0) {
    device const uint* words = (device const uint*)(row + byte_of<KIND>(c, width));
    const float by = c < width ? float(scales[c / group]) : 0.0f;
    UNROLL
    for (int i = 0; i < N; i++) {
      const uint word = c < width ? words[i / 4] : 0u;
      x[i] = decoded<KIND>(word >> (8 * (i & 3)) & 255u, c >= width / 2) * by;
    }
    return;
  }
  UNROLL
  for (int i = 0; i < N; i++) x[i] = c + i < width ? element<KIND>(row, scales, c + i, width, group) : 0.0f;
}

inline void attend_rows(thread const Tensors& t, thread const Params& p, thread const Shared& mem, int tile, int kv_head,
                        int split, int thread_id, int lane, int sg) {
  const int queries = ROWS / PACK;
  int nth;
  const Sequence s = sequence_of_tile(t, p, tile, queries, nth);
  const int first = nth * queries;
  if (first >= s.q_len) return; // packed tiles are counted generously
  const int head = kv_head * PACK;
  const Heads h = heads_of(t, p, s, kv_head);

  float q[ROWS][COLUMNS];
  float o[ROWS][V_COLUMNS];
  float top[ROWS];
  float l[ROWS];
  float slope[ROWS];
  Span sees[ROWS];
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    const Row row = row_at(p, s, r, queries, first, head);
    device const TQ* from = t.q + (row.there ? q_row(p, s, row) : 0);
    UNROLL
    for (int i = 0; i < COLUMNS; i++) {
      const int c = lane * COLUMNS + i;
      q[r][i] = row.there && c < HEAD_DIM ? float(from[c]) : 0.0f;
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
    float key[COLUMNS];
    float value[V_COLUMNS];
    device const TKS* k_scales = h.k_scales;
#if K_SCALED
    k_scales += to_key(t, p, s, n, 0, p.ks_b, p.ks_l);
#endif
    device const TK* k = h.k + to_key(t, p, s, n, 0, p.k_b, p.k_l);
    some<COLUMNS, K_KIND, K_WIDE>(k, k_scales, lane * COLUMNS, HEAD_DIM, K_GROUP, key);
#if V_IN_K
    UNROLL
    for (int i = 0; i < V_COLUMNS; i++) value[i] = lane * COLUMNS + i < VALUE_DIM ? key[i] : 0.0f;
#else
    device const TVS* v_scales = h.v_scales;
#if V_SCALED
    v_scales += to_key(t, p, s, n, 0, p.vs_b, p.vs_l);
#endif
    device const TV* v = h.v + to_key(t, p, s, n, 0, p.v_b, p.v_l);
    some<V_COLUMNS, V_KIND, V_WIDE>(v, v_scales, lane * V_COLUMNS, VALUE_DIM, V_GROUP, value);
#endif
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      if (n < sees[r].lo || n >= sees[r].hi) continue;
      const Row row = row_at(p, s, r, queries, first, head);
      float bias = 0.0f;
#if MASK != MASK_NONE
      const Cell cell = mask_cell(t.mask, mask_row(p, s, row) + n * p.mask_k);
      if (!cell.seen) continue;
      bias = cell.bias;
#endif
      float dot = 0.0f;
      UNROLL
      for (int i = 0; i < COLUMNS; i++) dot += q[r][i] * key[i];
      const float x = logit(p, simd_sum(dot), slope[r], s.offset + row.query - n) + bias;
      const float highest = max(top[r], x);
      const float alpha = power(top[r] - highest);
      const float weight = power(x - highest);
      top[r] = highest;
      l[r] = l[r] * alpha + weight;
      UNROLL
      for (int i = 0; i < V_COLUMNS; i++) o[r][i] = o[r][i] * alpha + weight * value[i];
    }
  }

  UNROLL
  for (int r = 0; r < ROWS; r++) {
    UNROLL
    for (int i = 0; i < V_COLUMNS; i++) mem.o[(sg * ROWS + r) * DVP + lane * V_COLUMNS + i] = o[r][i];
    if (lane == 0) {
      mem.ml[(sg * ROWS + r) * 2] = top[r];
      mem.ml[(sg * ROWS + r) * 2 + 1] = l[r];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
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
      weight[g] = power(mem.ml[(g * ROWS + r) * 2] - highest);
      sum += weight[g] * mem.ml[(g * ROWS + r) * 2 + 1];
    }
    const Normalised f = normalised_row(t, s, row, highest, sum);
    for (int c = thread_id; c < VALUE_DIM; c += THREADS) {
      float x = 0.0f;
      UNROLL
      for (int g = 0; g < SIMDGROUPS; g++) x += weight[g] * mem.o[(g * ROWS + r) * DVP + c];
#if SPLITS
      t.partial[partial_row(p, s, row, split) * VALUE_DIM + c] = x;
#else
      t.out[out_row(p, s, row) + c] = TQ(x * f.factor / f.sum);
#endif
    }
    if (thread_id != 0) continue;
#if SPLITS
    t.partial_ml[partial_row(p, s, row, split) * 2] = highest;
    t.partial_ml[partial_row(p, s, row, split) * 2 + 1] = sum;
#elif LSE
    t.lse[lse_row(p, s, row)] = f.lse;
#endif
  }
}

//: entry
using namespace tilewise;
threadgroup float shared_o[SIMDGROUPS * ROWS * DVP];
threadgroup float shared_ml[SIMDGROUPS * ROWS * 2];
const Params p = read_params(ints, strides, floats);
const Shared mem = {shared_o, shared_ml};
attend_rows(t, p, mem, int(threadgroup_position_in_grid.x), int(threadgroup_position_in_grid.y),
            int(threadgroup_position_in_grid.z), int(thread_index_in_threadgroup), int(thread_index_in_simdgroup),
            int(simdgroup_index_in_threadgroup));
