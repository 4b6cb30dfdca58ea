// A kernel's rows: where a row's queries and keys lie, which keys it sees, its logits, and where its results go. Offsets
// into tensors are 64-bit; within a tile they are of type Step, of 32 bits where strides allow it.

#define THREADS 128 // a threadgroup: four simdgroups
#define SIMDGROUPS 4
#define BK 32 // keys of a tile, and the unit in which keys are split

struct Sequence {
  int b;
  int q_first; // its first row in q
  int q_len;
  int kv_first; // its first row in k and v, if they are packed
  int kv_len;
  int offset; // the position of its first query
  bool real;  // not the rows past the last sequence
};

// A row of a tile: a query and a head. Rows that are not `there` belong to no query.
struct Row {
  int query; // in its sequence
  int head;
  bool there;
};

// ---- positions

inline Sequence sequence_at(thread const Tensors& t, thread const Params& p, int b) {
  Sequence s;
  s.b = b;
  s.q_first = 0;
  s.q_len = p.q_len;
  s.kv_first = 0;
  s.kv_len = p.kv_len;
  s.offset = 0;
  s.real = b < p.batch;
#if PACKED
  s.q_first = t.cu_q[b];
  s.q_len = (s.real ? t.cu_q[b + 1] : p.total_q) - s.q_first;
#endif
  if (!s.real) {
    s.kv_len = 0;
    return s;
  }
#if VARLEN
  s.kv_first = t.cu_k[b];
  s.kv_len = t.cu_k[b + 1] - s.kv_first;
#endif
#if LENGTHS
  s.kv_len = t.lengths[b];
#endif
#if OFFSET == OFFSET_ROWS
  s.offset = t.offsets[b];
#elif OFFSET == OFFSET_END
  s.offset = s.kv_len - s.q_len;
#else
  s.offset = p.q_offset;
#endif
  return s;
}

// The sequence of packed tile number `tile`; `batch` for rows past the last one. Sequence b is given the tiles from
// cu_q[b] / queries + b on. That is never too few, so the grid needs no lengths.
inline int find_sequence(device const int* cu_q, int tile, int batch, int queries) {
  int low = 0;
  int high = batch + 1;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (cu_q[middle] / queries + middle <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The sequence of tile number `tile`, of so many queries each; and its number among the tiles of the sequence.
inline Sequence sequence_of_tile(thread const Tensors& t, thread const Params& p, int tile, int queries,
                                 thread int& nth) {
#if PACKED
  const int b = find_sequence(t.cu_q, tile, p.batch, queries);
  const Sequence s = sequence_at(t, p, b);
  nth = tile - (s.q_first / queries + b);
  return s;
#else
  const int tiles = (p.q_len + queries - 1) / queries;
  nth = tile % tiles;
  return sequence_at(t, p, tile / tiles);
#endif
}

// Row r of a tile that begins at query `first`: PACK heads of a KV head share each query.
inline Row row_at(thread const Params& p, thread const Sequence& s, int r, int queries, int first, int head) {
  Row row;
  row.query = first + r / PACK;
  row.head = head + r % PACK;
  row.there = r < queries * PACK && row.query < s.q_len;
  return row;
}

// The part of the keys [lo, hi) that split number `split` does, in tiles of `tile` keys: [t0, t1).
inline Span split_tiles(thread const Params& p, int lo, int hi, int split, int tile) {
  Span s;
  s.lo = lo / tile;
  s.hi = hi > lo ? (hi + tile - 1) / tile : s.lo;
  if (FIXED_SPLITS) { // at fixed places, whatever the rest of the batch
    s.lo = max(s.lo, split * p.split_tiles);
    s.hi = min(s.hi, (split + 1) * p.split_tiles);
  } else if (SPLITS) {
    const int each = (s.hi - s.lo + p.splits - 1) / p.splits;
    s.lo += split * each;
    s.hi = min(s.hi, s.lo + each);
  }
  return s;
}

// ---- scores

inline long mask_row(thread const Params& p, thread const Sequence& s, Row row) {
  return s.b * p.mask_b + row.head * p.mask_h + row.query * p.mask_q;
}

// (1 - t) / (1 + t), t = exp(-2 |x|): no overflow. Near 0, where 1 - t would cancel, a polynomial.
inline float soft_tanh(float x) {
  const float u = x * x;
  if (u < 0.0625f) return x + x * u * (TANH_3 + u * (TANH_5 + u * TANH_7));
  const float t = fast::exp2(fabs(x) * (-2.0f * LOG2E));
  const float y = (1.0f - t) / (1.0f + t);
  return x < 0.0f ? -y : y;
}

// A dot product to a logit: scale, softcap, ALiBi, in this order. Without a softcap, scale is in units of a logit.
inline float logit(thread const Params& p, float dot, float slope, int distance) {
  float s = dot * p.scale;
  if (SOFTCAP) s = p.softcap * soft_tanh(s / p.softcap) * (NATURAL ? 1.0f : LOG2E);
  if (SLOPES) s -= slope * float(distance < 0 ? -distance : distance);
  return s;
}

// A row's slope, in units of a logit.
inline float slope_of(thread const Tensors& t, thread const Params& p, thread const Sequence& s, int head) {
#if SLOPES
  return s.real ? t.slopes[s.b * p.slopes_b + head] * (NATURAL ? 1.0f : LOG2E) : 0.0f;
#else
  return 0.0f;
#endif
}

inline Normalised normalised_row(thread const Tensors& t, thread const Sequence& s, Row row, float m, float l) {
#if SINKS && !SPLITS
  if (s.real && row.there) return normalise(m, l, true, t.sinks[row.head]);
#endif
  return normalise(m, l, false, 0.0f);
}

// ---- results

inline long q_row(thread const Params& p, thread const Sequence& s, Row row) {
  return (PACKED ? 0 : s.b) * p.q_b + row.head * p.q_h + (s.q_first + row.query) * p.q_l;
}

inline long out_row(thread const Params& p, thread const Sequence& s, Row row) {
  return (PACKED ? 0 : s.b) * p.o_b + row.head * p.o_h + (s.q_first + row.query) * p.o_l;
}

inline long lse_row(thread const Params& p, thread const Sequence& s, Row row) {
  return (PACKED ? 0 : s.b) * p.lse_b + row.head * p.lse_h + (s.q_first + row.query) * p.lse_l;
}

// The place of a row's partial in the workspace: [tokens, heads, splits].
inline long partial_row(thread const Params& p, thread const Sequence& s, Row row, int split) {
  const long token = PACKED ? s.q_first + row.query : long(s.b) * p.q_len + row.query;
  return (token * p.heads + row.head) * p.splits + split;
}
