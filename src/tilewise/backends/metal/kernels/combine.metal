// Merges the parts of split keys: one simdgroup for each row of the output. Parts are added in order, so that the same
// call gives the same bits, and empty ones (l = 0, o = 0) change none.

inline void combine_row(thread const Tensors& t, thread const Params& p, int token, int head, int lane) {
  const long at = (long(token) * p.heads + head) * p.splits;
  float top = LOWEST;
  for (int i = 0; i < p.splits; i++) top = max(top, t.partial_ml[(at + i) * 2]);
  float sum = 0.0f;
  for (int i = 0; i < p.splits; i++) sum += power(t.partial_ml[(at + i) * 2] - top) * t.partial_ml[(at + i) * 2 + 1];

  bool real = true;
#if PACKED
  real = token < t.cu_q[p.batch];
#endif
#if SINKS
  const Normalised f = normalise(top, sum, real, t.sinks[head]);
#else
  const Normalised f = normalise(top, sum, false, 0.0f);
#endif
  const long b = PACKED ? 0 : token / p.q_len;
  const long row = PACKED ? token : token % p.q_len;
  for (int c = lane; c < p.value_dim; c += 32) {
    float x = 0.0f;
    for (int i = 0; i < p.splits; i++) {
      x += power(t.partial_ml[(at + i) * 2] - top) * t.partial[(at + i) * p.value_dim + c];
    }
    t.out[b * p.o_b + head * p.o_h + row * p.o_l + c] = TQ(x * f.factor / f.sum);
  }
#if LSE
  if (lane == 0) t.lse[b * p.lse_b + head * p.lse_h + row * p.lse_l] = f.lse;
#endif
}

//: entry
using namespace tilewise;
const Params p = read_params(ints, strides, floats);
combine_row(t, p, int(threadgroup_position_in_grid.x), int(threadgroup_position_in_grid.y),
            int(thread_index_in_simdgroup));
