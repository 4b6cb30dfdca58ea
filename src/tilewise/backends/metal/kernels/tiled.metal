// Attention of one tile of BM query rows over the keys that it sees, by 8x8 simdgroup matrices.
//
//   s = q k^T    [BM, BK]   K goes through threadgroup memory transposed, DC of its DP columns at a time
//   p = exp(s - m)          online softmax in registers: a lane has two cells of each matrix, all in one row
//   o = o * alpha + p v    [BM, DVP]  V goes through the same memory, DVC columns at a time; o stays in registers
//
// A threadgroup is SG_ROWS x SG_COLS simdgroups. Each owns 8 rows and every SG_COLS-th block of 8 columns of s and o;
// where SG_COLS is more than 1, the blocks of s pass through threadgroup memory, so that all have the whole row.
//
// Tiles in threadgroup memory are of K's and V's own types if these are plain, else of floats; products are of floats.
// Rows are padded by 16 bytes and K's blocks of 8 keys are permuted (`swizzled`), so that no two lanes meet in a bank.
// How a matrix lies in its lanes (`Lane`) is what MLX and torch rely on too.
//
// A value under a hidden cell must not reach a row, not even as 0 * NaN. Values that are not finite are cleared in the
// tile; in the end, if there was one, rows that see one are written again (nonfinite_sum).
//
// The grid is (tiles of queries, heads / PACK, splits). With splits, (m, l, o) goes to the workspace, for combine.metal.

#define BM (8 * SG_ROWS)
#define S_BLOCKS (BK / 8)
#define O_BLOCKS (DVP / 8 / SG_COLS)
#define SLICE_BLOCKS (DVC / 8 / SG_COLS) // those of them in one slice of V
#define PART 2 // blocks of keys at a time in p v
#define SOME _Pragma("clang loop unroll_count(2)") // more loads at a time would cost registers
#define PAD(T) (16 / int(sizeof(T)))
#define Q_ROW (DP + PAD(QT)) // elements from a row of a tile to the next
#define K_ROW (BK + PAD(KT))
#define V_ROW (DVC + PAD(VT))
#define S_ROW (BK + 4)
#define K_BYTES (DC * K_ROW * int(sizeof(KT)))
#define V_BYTES (BK * V_ROW * int(sizeof(VT)))
#define HIDES (CAUSAL || LEFT || RIGHT || CHUNK || MASK != MASK_NONE) // of the keys that are staged

enum {
  STAGE = (K_BYTES > V_BYTES ? K_BYTES : V_BYTES) / 2, // K and V, one after the other: memory of their larger tile
  SCORES = SG_COLS > 1 ? BM * S_ROW : 1,
};

typedef simdgroup_matrix<float, 8, 8> Matrix;

// Threadgroup memory.
struct Shared {
  threadgroup QT* q;          // [BM, Q_ROW]
  threadgroup KT* k;          // [DC, K_ROW]
  threadgroup VT* v;          // [BK, V_ROW], the same memory
  threadgroup float* s;       // [BM, S_ROW], if SG_COLS > 1
  threadgroup int* nonfinite; // [SIMDGROUPS]: whether a simdgroup has met values that are not finite
};

// A lane's cells of a matrix: (row, column) and (row, column + 1).
struct Lane {
  int row;
  int column;
};

inline Lane lane_at(int lane) {
  Lane at;
  at.row = (lane >> 1 & 3) + (lane >> 2 & 4);
  at.column = (lane & 1) * 2 + (lane >> 1 & 4);
  return at;
}

// Two neighbours in a tile, at an even place, as floats.
inline float2 pair(threadgroup const float* at) { return float2(at[0], at[1]); }
inline float2 pair(threadgroup const half* at) {
  const uint both = *(threadgroup const uint*)at;
  return float2(float(as_type<half>(ushort(both))), float(as_type<half>(ushort(both >> 16))));
}
inline float2 pair(threadgroup const bfloat* at) {
  const uint both = *(threadgroup const uint*)at;
  return float2(as_type<float>(both << 16), as_type<float>(both & 0xffff0000u));
}

template <class T> inline Matrix matrix(threadgroup const T* at) {
  const float2 both = pair(at);
  Matrix m;
  m.thread_elements()[0] = both.x;
  m.thread_elements()[1] = both.y;
  return m;
}

// Where key r lies in row c of the transposed tile: threads of neighbouring chunks write to other banks.
inline int swizzled(int r, int c) { return r ^ (c & 24); }

inline void stage_queries(thread const Tensors& t, thread const Params& p, thread const Sequence& s, threadgroup QT* to,
                          int queries, int first, int head, int thread_id) {
  for (int i = thread_id; i < BM * (DP / 8); i += THREADS) {
    const int r = i / (DP / 8);
    const int c = i % (DP / 8) * 8;
    const Row row = row_at(p, s, r, queries, first, head);
    threadgroup QT* at = to + r * Q_ROW + c;
#if Q_WIDE
    uint4 all = uint4(0u, 0u, 0u, 0u);
    if (row.there && c < HEAD_DIM) all = sixteen_bytes(t.q + q_row(p, s, row) + c);
    *(threadgroup uint4*)(at) = all;
#else
    device const TQ* from = t.q + q_row(p, s, row) + c;
    UNROLL
    for (int e = 0; e < 8; e++) at[e] = row.there && c + e < HEAD_DIM ? QT(from[e]) : QT(0.0f);
#endif
  }
}

// Columns c0 .. c0 + DC of keys n0 .. n0 + BK, transposed; zeros for keys outside [lo, hi), which are never read.
inline void stage_keys(thread const Tensors& t, thread const Params& p, thread const Sequence& s, thread const Heads& h,
                       threadgroup KT* to, int n0, int lo, int hi, int c0, int thread_id) {
  SOME
  for (int i = 0; i < BK * DC / 8; i += THREADS) {
    const int r = (i + thread_id) / (DC / 8);
    const int c = (i + thread_id) % (DC / 8) * 8;
    if (BK * DC / 8 % THREADS != 0 && r >= BK) break;
    const bool there = n0 + r >= lo && n0 + r < hi && c0 + c < HEAD_DIM;
    const long row = there ? to_key(t, p, s, n0, r, p.k_b, p.k_l) : 0;
    threadgroup KT* at = to + c * K_ROW + swizzled(r, c);
#if K_WIDE
    uint4 all = uint4(0u, 0u, 0u, 0u);
    if (there) all = sixteen_bytes(h.k + row + (c0 + c));
    threadgroup ushort* bits = (threadgroup ushort*)at;
    bits[0] = ushort(all.x);
    bits[K_ROW] = ushort(all.x >> 16);
    bits[2 * K_ROW] = ushort(all.y);
    bits[3 * K_ROW] = ushort(all.y >> 16);
    bits[4 * K_ROW] = ushort(all.z);
    bits[5 * K_ROW] = ushort(all.z >> 16);
    bits[6 * K_ROW] = ushort(all.w);
    bits[7 * K_ROW] = ushort(all.w >> 16);
#else
    float x[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    device const TKS* scales = h.k_scales;
#if K_SCALED
    if (there) scales += to_key(t, p, s, n0, r, p.ks_b, p.ks_l);
#endif
    if (there) eight<K_KIND>(h.k + row, scales, c0 + c, HEAD_DIM, K_GROUP, x);
    UNROLL
    for (int e = 0; e < 8; e++) at[e * K_ROW] = KT(x[e]);
#endif
  }
}

// The same of values, not transposed; and whether this thread met one that is not finite.
inline bool stage_values(thread const Tensors& t, thread const Params& p, thread const Sequence& s,
                         thread const Heads& h, threadgroup VT* to, int n0, int lo, int hi, int c0, int thread_id) {
  uint nonfinite = 0u;
  SOME
  for (int i = 0; i < BK * DVC / 8; i += THREADS) {
    const int r = (i + thread_id) / (DVC / 8);
    const int c = (i + thread_id) % (DVC / 8) * 8;
    if (BK * DVC / 8 % THREADS != 0 && r >= BK) break;
    const bool there = n0 + r >= lo && n0 + r < hi && c0 + c < VALUE_DIM;
    const long row = there ? to_key(t, p, s, n0, r, p.v_b, p.v_l) : 0;
    threadgroup VT* at = to + r * V_ROW + c;
#if V_WIDE
    uint4 all = uint4(0u, 0u, 0u, 0u);
    if (there) all = sixteen_bytes(h.v + row + (c0 + c));
    *(threadgroup uint4*)(at) = all;
    // An exponent of ones carries into the sign's place.
    nonfinite |= ((all.x & V_EXPONENTS) + V_LOWEST_BITS) | ((all.y & V_EXPONENTS) + V_LOWEST_BITS) |
                 ((all.z & V_EXPONENTS) + V_LOWEST_BITS) | ((all.w & V_EXPONENTS) + V_LOWEST_BITS);
#else
    float x[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    device const TVS* scales = h.v_scales;
#if V_SCALED
    if (there) scales += to_key(t, p, s, n0, r, p.vs_b, p.vs_l);
#endif
    if (there) eight<V_KIND>(h.v + row, scales, c0 + c, VALUE_DIM, V_GROUP, x);
    UNROLL
    for (int e = 0; e < 8; e++) {
      at[e] = VT(x[e]);
      if (!is_finite(x[e])) nonfinite = 0x80008000u;
    }
#endif
  }
  return (nonfinite & 0x80008000u) != 0u;
}

// What a row gets in column c of values that are not finite and that it sees: their sum; 0 if there are none. The row's
// other values do not matter then, nor do weights.
inline float nonfinite_sum(thread const Tensors& t, thread const Params& p, thread const Sequence& s,
                           thread const Heads& h, Span tiles, Span sees, long mask_at, int c) {
  float sum = 0.0f;
  ROLLED
  for (int n = max(sees.lo, tiles.lo * BK); n < min(sees.hi, tiles.hi * BK); n++) {
#if MASK != MASK_NONE
    if (!mask_cell(t.mask, mask_at + n * p.mask_k).seen) continue;
#endif
    device const TVS* scales = h.v_scales;
#if V_SCALED
    scales += to_key(t, p, s, n, 0, p.vs_b, p.vs_l);
#endif
    const float x = element<V_KIND>(h.v + to_key(t, p, s, n, 0, p.v_b, p.v_l), scales, c, VALUE_DIM, V_GROUP);
    if (!is_finite(x)) sum += x;
  }
  return sum;
}

// The first column of block i of o.
inline int column_of(int i, int column) { return i / SLICE_BLOCKS * DVC + (i % SLICE_BLOCKS * SG_COLS + column) * 8; }

inline void clear_nonfinite(threadgroup VT* v, int thread_id) {
  ROLLED
  for (int i = thread_id; i < BK * DVC; i += THREADS) {
    threadgroup VT* at = v + i / DVC * V_ROW + i % DVC;
    if (!is_finite(float(*at))) *at = VT(0.0f);
  }
}

inline void attend_tile(thread const Tensors& t, thread const Params& p, thread const Shared& mem, int tile,
                        int head_block, int split, int thread_id, int lane, int sg) {
  const int queries = BM / PACK;
  int nth;
  const Sequence s = sequence_of_tile(t, p, tile, queries, nth);
  const int first = nth * queries;
  if (first >= s.q_len) return; // packed tiles are counted generously
  const int head = head_block * PACK;
  const Heads h = heads_of(t, p, s, head / p.group);
  const int r0 = sg / SG_COLS * 8; // this simdgroup's rows
  const int column = sg % SG_COLS; // and which of the blocks of columns
  const Lane mine = lane_at(lane);

  const Row row = row_at(p, s, r0 + mine.row, queries, first, head);
  const int position = s.offset + row.query;
  Span sees = key_span(p, position, s.kv_len);
  if (!row.there) sees.hi = 0;
  const float slope = row.there ? slope_of(t, p, s, row.head) : 0.0f;
  const long mask_at = MASK != MASK_NONE && row.there ? mask_row(p, s, row) : 0;
  float top = LOWEST;
  float l = 0.0f;
  bool repair = false; // whether a value was not finite

  // Spans move right as rows go down: the first query has the leftmost start, the last one the rightmost end.
  const int lo = key_span(p, s.offset + first, s.kv_len).lo;
  const int hi = key_span(p, s.offset + min(first + queries, s.q_len) - 1, s.kv_len).hi;
  const Span tiles = split_tiles(p, lo, hi, split, BK);

  stage_queries(t, p, s, mem.q, queries, first, head, thread_id);
  Matrix o[O_BLOCKS];
  UNROLL
  for (int i = 0; i < O_BLOCKS; i++) o[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);

  for (int kt = tiles.lo; kt < tiles.hi; kt++) {
#if STATES
    const int state = t.states[s.b * p.states_b + head * p.states_h + nth * p.states_q + kt * p.states_k];
    if (state == 0) continue;
#else
    const int state = 1;
#endif
    const int n0 = kt * BK;

    // s = q k^T
    Matrix score[S_BLOCKS];
    UNROLL
    for (int i = 0; i < S_BLOCKS / SG_COLS; i++) score[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int c0 = 0; c0 < DP; c0 += DC) {
      threadgroup_barrier(mem_flags::mem_threadgroup); // what was staged before has been used
      stage_keys(t, p, s, h, mem.k, n0, lo, hi, c0, thread_id);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      threadgroup const QT* q = mem.q + (r0 + mine.row) * Q_ROW + c0 + mine.column;
      threadgroup const KT* k = mem.k + mine.row * K_ROW + mine.column;
      _Pragma("clang loop unroll_count(4)")
      for (int d = 0; d < DC; d += 8) {
        const Matrix a = matrix(q + d);
        UNROLL
        for (int i = 0; i < S_BLOCKS / SG_COLS; i++) {
          const Matrix b = matrix(k + d * K_ROW + swizzled((i * SG_COLS + column) * 8, d));
          simdgroup_multiply_accumulate(score[i], a, b, score[i]);
        }
      }
    }
#if SG_COLS > 1
    threadgroup float* cells = mem.s + (r0 + mine.row) * S_ROW + mine.column;
    UNROLL
    for (int i = 0; i < S_BLOCKS / SG_COLS; i++) {
      cells[(i * SG_COLS + column) * 8] = score[i].thread_elements()[0];
      cells[(i * SG_COLS + column) * 8 + 1] = score[i].thread_elements()[1];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL
    for (int i = 0; i < S_BLOCKS; i++) score[i] = matrix(cells + i * 8);
#endif

    // p = exp(s - m)
    float highest = top;
    uint seen = 0u;
    UNROLL
    for (int i = 0; i < 2 * S_BLOCKS; i++) {
      const int n = n0 + i / 2 * 8 + i % 2 + mine.column;
      float x = logit(p, score[i / 2].thread_elements()[i % 2], slope, position - n);
      bool sees_it = n >= sees.lo && n < sees.hi;
#if MASK != MASK_NONE
      if (state != 2 && sees_it) {
        const Cell cell = mask_cell(t.mask, mask_at + n * p.mask_k);
        x += cell.bias;
        sees_it = cell.seen;
      }
#endif
      score[i / 2].thread_elements()[i % 2] = x;
      if (sees_it) highest = max(highest, x);
      seen |= uint(sees_it) << i;
    }
    highest = max(highest, simd_shuffle_xor(highest, ushort(1)));
    highest = max(highest, simd_shuffle_xor(highest, ushort(8)));
    float sum = 0.0f;
    UNROLL
    for (int i = 0; i < 2 * S_BLOCKS; i++) {
      const float weight = power(score[i / 2].thread_elements()[i % 2] - highest);
      score[i / 2].thread_elements()[i % 2] = (seen >> i & 1u) != 0u ? weight : 0.0f;
      sum += score[i / 2].thread_elements()[i % 2];
    }
    sum += simd_shuffle_xor(sum, ushort(1));
    sum += simd_shuffle_xor(sum, ushort(8));
    const float alpha = power(top - highest);
    l = l * alpha + sum;
    top = highest;

    // o = o * alpha + p v
    UNROLL
    for (int i = 0; i < O_BLOCKS; i++) {
      o[i].thread_elements()[0] *= alpha;
      o[i].thread_elements()[1] *= alpha;
    }
    UNROLL
    for (int slice = 0; slice < DVP / DVC; slice++) {
      threadgroup_barrier(mem_flags::mem_threadgroup); // what was staged before has been used
      const bool found = stage_values(t, p, s, h, mem.v, n0, lo, hi, slice * DVC, thread_id);
      if (HIDES) {
        const bool any = simd_any(found);
        if (lane == 0) mem.nonfinite[sg] = any;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (HIDES && (mem.nonfinite[0] | mem.nonfinite[1] | mem.nonfinite[2] | mem.nonfinite[3]) != 0) {
        repair = true;
        clear_nonfinite(mem.v, thread_id);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      // PART blocks of keys at a time, which saves code: weights move up, so that they are indexed by constants.
      threadgroup const VT* v = mem.v + mine.row * V_ROW + mine.column;
      ROLLED
      for (int part = 0; part < S_BLOCKS / PART; part++) {
        UNROLL
        for (int i = 0; i < SLICE_BLOCKS; i++) {
          UNROLL
          for (int j = 0; j < PART; j++) {
            const Matrix b = matrix(v + j * 8 * V_ROW + (i * SG_COLS + column) * 8);
            simdgroup_multiply_accumulate(o[slice * SLICE_BLOCKS + i], score[j], b, o[slice * SLICE_BLOCKS + i]);
          }
        }
        UNROLL
        for (int j = 0; j < PART; j++) {
          const Matrix first = score[j];
          UNROLL
          for (int i = j; i + PART < S_BLOCKS; i += PART) score[i] = score[i + PART];
          score[S_BLOCKS - PART + j] = first;
        }
        v += PART * 8 * V_ROW;
      }
    }
  }

  // Rows: with splits as they are, else with their sink and divided by their sum.
  if (!row.there) return;
  const Normalised f = normalised_row(t, s, row, top, l);
#if SPLITS
  device float* to = t.partial + partial_row(p, s, row, split) * VALUE_DIM + mine.column;
  if (column == 0 && mine.column == 0) {
    t.partial_ml[partial_row(p, s, row, split) * 2] = top;
    t.partial_ml[partial_row(p, s, row, split) * 2 + 1] = l;
  }
#else
  device TQ* to = t.out + out_row(p, s, row) + mine.column;
#if LSE
  if (column == 0 && mine.column == 0) t.lse[lse_row(p, s, row)] = f.lse;
#endif
#endif
  const float by = SPLITS ? 1.0f : f.factor / f.sum;
  UNROLL
  for (int i = 0; i < O_BLOCKS; i++) {
    const int c = column_of(i, column);
    const float x = o[i].thread_elements()[0] * by;
    const float y = o[i].thread_elements()[1] * by;
#if OUT_WIDE && !SPLITS
    if (c < VALUE_DIM) *(device uint*)(to + c) = uint(as_type<ushort>(TQ(x))) | uint(as_type<ushort>(TQ(y))) << 16;
#else
    if (c + mine.column < VALUE_DIM) to[c] = x;
    if (c + mine.column + 1 < VALUE_DIM) to[c + 1] = y;
#endif
  }
  if (!HIDES || !repair) return;
  ROLLED
  for (int i = 0; i < 2 * O_BLOCKS; i++) {
    const int c = column_of(i / 2, column) + i % 2;
    if (c + mine.column >= VALUE_DIM) continue;
    const float sum = nonfinite_sum(t, p, s, h, tiles, sees, mask_at, c + mine.column);
    if (!is_finite(sum)) to[c] = sum;
  }
}

//: entry
using namespace tilewise;
threadgroup QT shared_q[BM * Q_ROW];
threadgroup ushort shared_kv[STAGE];
threadgroup float shared_s[SCORES];
threadgroup int shared_nonfinite[SIMDGROUPS];
const Params p = read_params(ints, strides, floats);
const Shared mem = {shared_q, (threadgroup KT*)shared_kv, (threadgroup VT*)shared_kv, shared_s, shared_nonfinite};
attend_tile(t, p, mem, int(threadgroup_position_in_grid.x), int(threadgroup_position_in_grid.y),
            int(threadgroup_position_in_grid.z), int(thread_index_in_threadgroup), int(thread_index_in_simdgroup),
            int(simdgroup_index_in_threadgroup));
