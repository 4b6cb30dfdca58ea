// Merges the parts of split keys: one simdgroup for each row of the output. Parts are added in order, so that the same
// call gives the same bits, and empty ones (l = 0, o = 0) change none.

inline void combine_row(thread const Params& p, thread const Results& to, device const float* partial,
                      device const float* partial_ml, device const float* sinks, device const int* cu_q, int token,
                      int head, int lane) {
  const long at = (long(token) * p.heads + head) * p.splits;
  float top = LOWEST;
  for (int i = 0; i < p.splits; i++) top = max(top, partial_ml[(at + i) * 2]);
  float sum = 0.0f;
  for (int i = 0; i < p.splits; i++) sum += exp(partial_ml[(at + i) * 2] - top) * partial_ml[(at + i) * 2 + 1];

  const bool real = !p.packed || token < cu_q[p.batch];
  const Normalised f = normalise(top, sum, p.has_sinks && real, p.has_sinks ? sinks[head] : 0.0f);
  const long b = p.packed ? 0 : token / p.q_len;
  const long row = p.packed ? token : token % p.q_len;
  for (int c = lane; c < p.value_dim; c += 32) {
    float x = 0.0f;
    for (int i = 0; i < p.splits; i++) {
      x += exp(partial_ml[(at + i) * 2] - top) * partial[(at + i) * p.value_dim + c];
    }
    to.out[b * p.o_b + head * p.o_h + row * p.o_l + c] = TQ(x * f.factor / f.sum);
  }
  if (lane == 0 && p.has_lse) to.lse[b * p.lse_b + head * p.lse_h + row * p.lse_l] = f.lse;
}

//: entry
const Params p = read_params(ints, strides, floats);
const Results to = {out, lse};
combine_row(p, to, partial, partial_ml, sinks, cu_q, int(threadgroup_position_in_grid.x), int(threadgroup_position_in_grid.y),
          int(thread_index_in_simdgroup));
