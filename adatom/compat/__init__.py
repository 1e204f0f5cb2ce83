"""Other libraries' functions, by adatom's kernels."""

from adatom.compat import flash_attn

__all__ = ["flash_attn"]
