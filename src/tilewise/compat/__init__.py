"""Other libraries' attention, by their own names and signatures, served by tilewise.

`sdpa`: torch's `scaled_dot_product_attention`. `flash_attn`: the functions of the flash-attn package, and
`flash_kernel`: those as a kernel for `kernels`. `transformers`, `vllm`, `sglang`: tilewise as an implementation there.
Import the module that you need; none is loaded with tilewise itself, but `transformers` where transformers is.
"""
