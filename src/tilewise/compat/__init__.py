"""Attention functions of other libraries, with their names and signatures, served by tilewise.

`sdpa`, `flex_attention`: torch's functions of these names (`scaled_dot_product_attention`). `flash_attn`: the functions
of the flash-attn package, and `flash_kernel`: those as a kernel for `kernels`. `xformers`: its
`memory_efficient_attention`. `transformers`, `vllm`, `sglang`: tilewise as an implementation there. `import tilewise`
loads `transformers` if the library is imported; the others are loaded when first used.
"""

from typing import TYPE_CHECKING

from ..core.lazy import modules

if TYPE_CHECKING:  # type checkers accept any name of a module with a __getattr__
    from . import flash_attn, flash_attn_3, flex_attention, sdpa, sglang, transformers, vllm, xformers  # noqa: F401
else:
    __getattr__ = modules(
        __name__, "flash_attn", "flash_attn_3", "flex_attention", "sdpa", "sglang", "transformers", "vllm", "xformers"
    )
