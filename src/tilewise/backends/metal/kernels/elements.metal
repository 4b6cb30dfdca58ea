// Elements of K and V, from dense, packed or paged memory, plain or quantised, one by one or eight at a time.

inline bool is_finite(float x) { return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u; }

inline float fp8_value(uint bits) {
  const uint exponent = (bits >> 3) & 15u;
  const uint fraction = bits & 7u;
  float x = exponent == 0u ? float(fraction) * 0.001953125f // 2^-9
                           : as_type<float>((exponent + 120u) << 23 | fraction << 20);
  if ((bits & 127u) == 127u) x = as_type<float>(0x7fc00000u);
  return (bits & 128u) != 0u ? -x : x;
}

// A byte as a number; of 4 bits the high ones if `high`.
template <int KIND> inline float decoded(uint byte, bool high) {
  if (KIND == INT8) return float((int(byte) ^ 128) - 128);
  if (KIND == FP8) return fp8_value(byte);
  const uint nibble = high ? byte >> 4 : byte & 15u;
  if (KIND == INT4) return float((int(nibble) ^ 8) - 8);
  const uint word = (nibble & 4u) != 0u ? LEVELS_HIGH : LEVELS_LOW; // a level is a byte of one of two words
  const float level = float((word >> (8u * (nibble & 3u))) & 255u);
  return (nibble & 8u) != 0u ? -level : level;
}

// The byte that holds element c of a row of `width`: 4 bits lie in the low halves of all bytes, then in the high ones.
template <int KIND> inline int byte_of(int c, int width) {
  return (KIND == INT4 || KIND == CODEBOOK4) && c >= width / 2 ? c - width / 2 : c;
}

// Element c of a row.
template <int KIND, class T, class S>
inline float element(device const T* row, device const S* scales, int c, int width, int group) {
  if (KIND == PLAIN) return float(row[c]);
  const uint byte = uint(uchar(row[byte_of<KIND>(c, width)]));
  return decoded<KIND>(byte, c >= width / 2) * float(scales[c / group]);
}

// Elements c .. c + 8, where c is a multiple of 8; zeros past the row's end.
template <int KIND, class T, class S>
inline void eight(device const T* row, device const S* scales, int c, int width, int group, thread float* x) {
  if (KIND == PLAIN || !WIDE || width % 16 != 0) {
    UNROLL
    for (int e = 0; e < 8; e++) x[e] = c + e < width ? element<KIND>(row, scales, c + e, width, group) : 0.0f;
    return;
  }
  const uint2 bytes = *(device const uint2*)(row + byte_of<KIND>(c, width));
  const float by = float(scales[c / group]);
  UNROLL
  for (int e = 0; e < 8; e++) {
    x[e] = decoded<KIND>((e < 4 ? bytes.x : bytes.y) >> (8 * (e & 3)) & 255u, c >= width / 2) * by;
  }
}

// At an address that is a multiple of 16.
template <class T> inline uint4 sixteen_bytes(device const T* at) {
  const uint4 all = *(device const uint4*)at;
  return all;
}

// Where the rows of a KV head begin; with pages, those of page 0.
struct Heads {
  device const TK* k;
  device const TV* v;
  device const TKS* k_scales;
  device const TVS* v_scales;
};

inline Heads heads_of(thread const Tensors& t, thread const Params& p, thread const Sequence& s, int head) {
  const long outer = VARLEN || PAGE > 0 ? 0 : s.b;
  const long first = VARLEN ? s.kv_first : 0;
  Heads h;
  h.k = t.k + outer * p.k_b + head * p.k_h + first * p.k_l;
  h.v = t.v + outer * p.v_b + head * p.v_h + first * p.v_l;
#if K_SCALED
  h.k_scales = t.k_scales + outer * p.ks_b + head * p.ks_h + first * p.ks_l;
#else
  h.k_scales = 0;
#endif
#if V_SCALED
  h.v_scales = t.v_scales + outer * p.vs_b + head * p.vs_h + first * p.vs_l;
#else
  h.v_scales = 0;
#endif
  return h;
}

// From there to key n0 + r, where n0 is the same for all threads. `page` and `row` are strides.
inline long to_key(thread const Tensors& t, thread const Params& p, thread const Sequence& s, int n0, int r, long page,
                   long row) {
#if PAGE
  const int n = n0 + r;
  return t.table[s.b * p.table_b + n / PAGE] * page + n % PAGE * row;
#else
  return n0 * row + Step(r) * Step(row);
#endif
}
