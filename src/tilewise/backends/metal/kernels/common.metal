// What all kernels share: constants, spans of keys, cells of a mask, and a row's last step.
//
// Before this text stand the types (TQ, TK, TV, TKS, TVS), the options that it is made for (CAUSAL, MASK, ... : 0 or 1,
// or a number; options.py), and the structs Params and Tensors (text.py). What is not asked for is not compiled: branches
// on an option are decided by the compiler. Whether a cell is visible is known apart from its score, and floats are
// looked at by their bits, so that nothing rests on arithmetic with infinity.
//
// Logits are in units of log 2 (NATURAL: of log e, since a float mask may hold numbers that would overflow).

#define LOG2E 1.4426950408889634f
#define LN2 0.69314718055994531f
#define TANH_3 (-0.33333241f) // tanh(x) = x + x^3 (TANH_3 + x^2 (TANH_5 + x^2 TANH_7)) up to |x| = 1/4
#define TANH_5 0.13324266f
#define TANH_7 (-0.051433504f)
#define LOWEST (-3.402823466e38f) // the maximum of a row that has seen nothing yet; not a sign of it, see `l`
#define UNIT (NATURAL ? LOG2E : 1.0f) // log 2's units of a logit

// Loops over arrays in registers: an index that is not known when compiled would put the array into memory.
#define UNROLL _Pragma("clang loop unroll(full)")
#define ROLLED _Pragma("clang loop unroll(disable)") // code that rarely runs is kept small

#define MASK_NONE 0
#define MASK_BOOL 1
#define MASK_F32 2
#define MASK_F16 3
#define MASK_BF16 4

struct Span {
  int lo;
  int hi;
};

struct Cell {
  float bias;
  bool seen;
};

// The keys that a query at `position` sees: causal, window and chunk each leave an interval (core/mask_rules.py), within
// 0 .. keys. No sum overflows, whatever position, side or chunk is given: numbers of one sign are first made small.
inline Span key_span(thread const Params& p, int position, int keys) {
  Span s;
  s.lo = 0;
  s.hi = keys;
  const int ahead = max(position, 0); // `lo` is the same for all positions before the first key
  const int near = min(position, keys); // and `hi` for all past the last
  if (CAUSAL) s.hi = min(s.hi, near + 1);
  if (LEFT) s.lo = max(s.lo, ahead - p.left);
  if (RIGHT) {
    const int reach = near < 0 ? p.right : min(p.right, keys - near);
    s.hi = min(s.hi, reach + (near + 1));
  }
  if (CHUNK) {
    const int start = ahead - ahead % p.chunk;
    s.lo = max(s.lo, start);
    s.hi = position < 0 ? 0 : min(s.hi, start + min(p.chunk, keys - start));
  }
  s.lo = min(s.lo, keys);
  s.hi = max(s.hi, 0);
  return s;
}

inline Cell mask_cell(device const uchar* mask, long at) {
  Cell cell;
  cell.bias = 0.0f;
  if (MASK == MASK_BOOL) {
    cell.seen = mask[at] != 0;
    return cell;
  }
  if (MASK == MASK_F32) cell.bias = ((device const float*)mask)[at];
  if (MASK == MASK_F16) cell.bias = float(((device const half*)mask)[at]);
  if (MASK == MASK_BF16) cell.bias = float(((device const bfloat*)mask)[at]);
  cell.seen = as_type<uint>(cell.bias) != 0xff800000u; // only -inf hides
  return cell;
}

// A row's running state with its sink: what the output is multiplied and divided by, and its lse.
struct Normalised {
  float factor;
  float sum;
  float lse;
};

// 2^x, x in units of a logit.
inline float power(float x) { return fast::exp2(x * UNIT); }

// m in units of a logit, sink in those of log e.
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
    const float logit = NATURAL ? sink : clamp(sink * LOG2E, LOWEST, -LOWEST);
    top = max(m, logit);
    f.factor = power(m - top);
    l = l * f.factor + power(logit - top);
  }
  f.sum = l > 0.0f ? l : 1.0f;
  f.lse = l > 0.0f ? (NATURAL ? top : top * LN2) + log(l) : -INFINITY;
  if (!(l > 0.0f) && !(l <= 0.0f)) { // NaN: a visible score was
    f.sum = l;
    f.lse = l;
  }
  return f;
}
