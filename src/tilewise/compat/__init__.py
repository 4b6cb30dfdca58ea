"""Other libraries' attention functions, by their own names and signatures, served by tilewise.

`sdpa`: torch's `scaled_dot_product_attention`. `flash_attn`: the functions of the flash-attn package.
Import the module that you need; none is loaded with tilewise itself.
"""
