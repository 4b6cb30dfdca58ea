"""The parts of `flash_attn` and `flash_attn_3`: options, inputs, the KV cache, installing under flash-attn's names."""
