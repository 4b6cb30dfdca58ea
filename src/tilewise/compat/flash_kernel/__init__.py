"""The functions of flash-attn as a kernel of Hugging Face's `kernels` package, which loads this folder by its path.

`tilewise.compat.transformers.register_flash()` tells it where the folder is.
"""

from tilewise.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
