// What the attention kernels share: where a row's queries and keys lie, which keys it sees, and its logits.
//
// Before this text stand the types TQ, TK, TV (elements), TKS, TVS (scales), the kinds K_KIND and V_KIND, and the
// struct Params with its reader (text.py). Offsets into tensors are 64-bit. Whether a cell is visible is known apart
// from its score, and floats are looked at by their bits, so that nothing rests on arithmetic with infinity.

#define THREADS 128 // a threadgroup: four simdgroups
#define SIMDGROUPS 4
#define BK 32 // keys of a tile, and the unit in which keys are split
#define LOG2E 1.4426950408889634f
#define TANH_3 (-0.33333241f) // tanh(x) = x + x^3 (TANH_3 + x^2 (TANH_5 + x^2 TANH_7)) up to |x| = 1/4
#define TANH_5 0.13324266f
#define TANH_7 (-0.051433504f)
#define LOWEST (-3.402823466e38f) // the maximum of a row that has seen nothing yet; not a sign of it, see `l`

// Loops over arrays in registers: an index that is not known when compiled would put the array into memory.
#define UNROLL _Pragma("clang loop unroll(full)")

#define MASK_NONE 0
#define MASK_BOOL 1
#define MASK_F32 2
#define MASK_F16 3
#define MASK_BF16 4

struct Tensors {
  device const TQ* q;
  device const TK* k;
  device const TV* v;
  device const TKS* k_scales;
  device const TVS* v_scales;
  device const uchar* mask;
  device const uchar* states;
  device const float* slopes;
  device const float* sinks;
  device const int* lengths;
  device const int* offsets;
  device const int* cu_q;
  device const int* cu_k;
  device const int* table;
};

// What is written: the output, or, where keys are split, a partial with its maximum and sum.
struct Results {
  device TQ* out;
  device float* lse;
  device float* partial;
  device float* partial_ml;
};

struct Sequence {
  int b;
  int q_first; // its first row in q
  int q_len;
  int kv_first; // its first row in k and v, if they are packed
  int kv_len;
  int offset; // the position of its first query
  bool real;  // not the rows past the last sequence
};

struct Span {
  int lo;
  int hi;
};

// A row of a tile: a query and a head. Rows that are not `there` belong to no query.
struct Row {
  int query; // in its sequence
  int head;
  bool there;
};

struct Cell {
  float bias;
  bool seen;
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
  if (p.packed) {
    s.q_first = t.cu_q[b];
    s.q_len = (s.real ? t.cu_q[b + 1] : p.total_q) - s.q_first;
  }
  if (!s.real) {
    s.kv_len = 0;
    return s;
  }
  if (p.varlen) {
    s.kv_first = t.cu_k[b];
    s.kv_len = t.cu_k[b + 1] - s.kv_first;
  }
  if (p.has_lengths) s.kv_len = t.lengths[b];
  s.offset = p.q_offset;
  if (p.offset_kind == OFFSET_ROWS) s.offset = t.offsets[b];
  if (p.offset_kind == OFFSET_END) s.offset = s.kv_len - s.q_len;
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
  if (!p.packed) {
    const int tiles = (p.q_len + queries - 1) / queries;
    nth = tile % tiles;
    return sequence_at(t, p, tile / tiles);
  }
  const int b = find_sequence(t.cu_q, tile, p.batch, queries);
  const Sequence s = sequence_at(t, p, b);
  nth = tile - (s.q_first / queries + b);
  return s;
}

// The keys that a query at `position` sees: causal, window and chunk each leave an interval (core/mask_rules.py), within
// 0 .. keys. No sum overflows, whatever position, side or chunk is given: numbers of one sign are first made small.
inline Span key_span(thread const Params& p, int position, int keys) {
  Span s;
  s.lo = 0;
  s.hi = keys;
  const int ahead = max(position, 0); // `lo` is the same for all positions before the first key
  const int near = min(position, keys); // and `hi` for all past the last
  if (p.causal) s.hi = min(s.hi, near + 1);
  if (p.has_left) s.lo = max(s.lo, ahead - p.left);
  if (p.has_right) {
    const int reach = near < 0 ? p.right : min(p.right, keys - near);
    s.hi = min(s.hi, reach + (near + 1));
  }
  if (p.chunk > 0) {
    const int start = ahead - ahead % p.chunk;
    s.lo = max(s.lo, start);
    s.hi = position < 0 ? 0 : min(s.hi, start + min(p.chunk, keys - start));
  }
  s.lo = min(s.lo, keys);
  s.hi = max(s.hi, 0);
  return s;
}

// Row r of a tile that begins at query `first`: `pack` heads of a KV head share each query.
inline Row row_at(thread const Params& p, thread const Sequence& s, int r, int queries, int first, int head) {
  Row row;
  row.query = first + r / p.pack;
  row.head = head + r % p.pack;
  row.there = r < queries * p.pack && row.query < s.q_len;
  return row;
}

// The part of the keys [lo, hi) that split number `split` does, in tiles of `tile` keys: [t0, t1).
inline Span split_tiles(thread const Params& p, int lo, int hi, int split, int tile) {
  Span s;
  s.lo = lo / tile;
  s.hi = hi > lo ? (hi + tile - 1) / tile : s.lo;
  if (p.split_tiles > 0) { // at fixed places, whatever the rest of the batch
    s.lo = max(s.lo, split * p.split_tiles);
    s.hi = min(s.hi, (split + 1) * p.split_tiles);
  } else if (p.splits > 1) {
    const int each = (s.hi - s.lo + p.splits - 1) / p.splits;
    s.lo += split * each;
    s.hi = min(s.hi, s.lo + each);
  }
  return s;
}

// ---- scores

inline Cell mask_cell(device const uchar* mask, int kind, long at) {
  Cell cell;
  cell.bias = 0.0f;
  if (kind == MASK_BOOL) {
    cell.seen = mask[at] != 0;
    return cell;
  }
  if (kind == MASK_F32) cell.bias = ((device const float*)mask)[at];
  if (kind == MASK_F16) cell.bias = float(((device const half*)mask)[at]);
  if (kind == MASK_BF16) cell.bias = float(((device const bfloat*)mask)[at]);
  cell.seen = as_type<uint>(cell.bias) != 0xff800000u; // only -inf hides
  return cell;
}

inline long mask_row(thread const Params& p, thread const Sequence& s, Row row) {
  return s.b * p.mask_b + row.head * p.mask_h + row.query * p.mask_q;
}

// (1 - t) / (1 + t), t = exp(-2 |x|): no overflow. Near 0, where 1 - t would cancel, a polynomial.
inline float soft_tanh(float x) {
  const float u = x * x;
  if (u < 0.0625f) return x + x * u * (TANH_3 + u * (TANH_5 + u * TANH_7));
  const float t = exp2(fabs(x) * (-2.0f * LOG2E));
  const float y = (1.0f - t) / (1.0f + t);
  return x < 0.0f ? -y : y;
}

// A dot product to a logit, in natural units: scale, softcap, ALiBi, in this order.
inline float logit(thread const Params& p, float dot, float slope, int distance) {
  float s = dot * p.scale;
  if (p.softcap > 0.0f) s = p.softcap * soft_tanh(s / p.softcap);
  if (p.has_slopes) s -= slope * float(distance < 0 ? -distance : distance);
  return s;
}

inline float slope_of(thread const Tensors& t, thread const Params& p, thread const Sequence& s, int head) {
  return p.has_slopes && s.real ? t.slopes[s.b * p.slopes_b + head] : 0.0f;
}

// ---- results

// A row's running state with its sink: what the output is multiplied and divided by, and its lse.
struct Normalised {
  float factor;
  float sum;
  float lse;
};

inline Normalised normalise(float m, float l, bool has_sink, float sink) {
  Normalised f;
  f.factor = 1.0f;
  float top = m;
  const uint bits = as_type<uint>(sink); // compilers may assume that no number is infinite
  if (has_sink && bits == 0x7f800000u) { // +inf takes all weight
    f.factor = 0.0f;
    f.sum = 1.0f;
    f.lse = INFINITY;
    return f;
  }
  if (has_sink && bits != 0xff800000u) { // -inf is no sink
    top = max(m, sink);
    f.factor = exp(m - top);
    l = l * f.factor + exp(sink - top);
  }
  f.sum = l > 0.0f ? l : 1.0f;
  f.lse = l > 0.0f ? top + log(l) : -INFINITY;
  if (!(l > 0.0f) && !(l <= 0.0f)) { // NaN: a visible score was
    f.sum = l;
    f.lse = l;
  }
  return f;
}

inline long q_row(thread const Params& p, thread const Sequence& s, Row row) {
  return (p.packed ? 0 : s.b) * p.q_b + row.head * p.q_h + (s.q_first + row.query) * p.q_l;
}

inline long out_row(thread const Params& p, thread const Sequence& s, Row row) {
  return (p.packed ? 0 : s.b) * p.o_b + row.head * p.o_h + (s.q_first + row.query) * p.o_l;
}

inline long lse_row(thread const Params& p, thread const Sequence& s, Row row) {
  return (p.packed ? 0 : s.b) * p.lse_b + row.head * p.lse_h + (s.q_first + row.query) * p.lse_l;
}

// The place of a row's partial in the workspace: [tokens, heads, splits].
inline long partial_row(thread const Params& p, thread const Sequence& s, Row row, int split) {
  const long token = p.packed ? s.q_first + row.query : long(s.b) * p.q_len + row.query;
  return (token * p.heads + row.head) * p.splits + split;
}
