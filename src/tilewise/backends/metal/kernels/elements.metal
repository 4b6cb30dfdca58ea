// Elements of K and V, from dense, packed or paged memory, plain or quantised, as floats.

inline bool is_finite(float x) { return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u; }

inline float fp8_value(uchar bits) {
  const int exponent = (bits >> 3) & 15;
  const int fraction = bits & 7;
  float x = exponent == 0 ? float(fraction) * 0.001953125f // 2^-9
                          : as_type<float>(uint(exponent + 120) << 23 | uint(fraction) << 20);
  if ((bits & 127) == 127) x = as_type<float>(0x7fc00000u);
  return (bits & 128) != 0 ? -x : x;
}

// Element c of a stored row of `width` elements. `row` and `scales` lead to the row's first element and scale.
template <int KIND, class T, class S>
inline float element(device const T* x, device const S* scale, long row, long scales, int c, int width, int group) {
  if (KIND == PLAIN) return float(x[row + c]);
  const float by = float(scale[scales + c / group]);
  if (KIND == INT8) return float(x[row + c]) * by;
  if (KIND == FP8) return fp8_value(uchar(x[row + c])) * by;
  const int half_width = width / 2; // 4 bits: low halves of all bytes, then high ones
  const int byte = int(uchar(x[row + (c < half_width ? c : c - half_width)]));
  const int nibble = c < half_width ? byte & 15 : byte >> 4;
  if (KIND == INT4) return float((nibble ^ 8) - 8) * by;
  const uint word = (nibble & 4) != 0 ? LEVELS_HIGH : LEVELS_LOW; // a level is a byte of one of two words
  const float level = float((word >> (8 * (nibble & 3))) & 255u);
  return ((nibble & 8) != 0 ? -level : level) * by;
}

// Where key row n lies: its page or batch row, and its place there.
struct Place {
  long outer;
  long inner;
};

inline Place place_of(thread const Tensors& t, thread const Params& p, thread const Sequence& s, int n) {
  Place at;
  at.outer = p.varlen ? 0 : s.b;
  at.inner = s.kv_first + n;
  if (p.page_size > 0) {
    at.outer = t.table[s.b * p.table_b + n / p.page_size];
    at.inner = n % p.page_size;
  }
  return at;
}

inline float key_element(thread const Tensors& t, thread const Params& p, Place at, int head, int c) {
  const long row = at.outer * p.k_b + head * p.k_h + at.inner * p.k_l;
  const long scales = at.outer * p.ks_b + head * p.ks_h + at.inner * p.ks_l;
  return element<K_KIND>(t.k, t.k_scales, row, scales, c, p.head_dim, p.k_group);
}

inline float value_element(thread const Tensors& t, thread const Params& p, Place at, int head, int c) {
  const long row = at.outer * p.v_b + head * p.v_h + at.inner * p.v_l;
  const long scales = at.outer * p.vs_b + head * p.vs_h + at.inner * p.vs_l;
  return element<V_KIND>(t.v, t.v_scales, row, scales, c, p.value_dim, p.v_group);
}
