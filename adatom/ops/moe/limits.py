"""Which problems each backend of moe takes: None, or the reason in words."""

from __future__ import annotations

from adatom.ops.moe.problem import Problem


def reference(p: Problem) -> str | None:
    """Every expert on every token, in PyTorch: everything."""
    return None


def torch_moe(p: Problem) -> str | None:
    """PyTorch's grouped product where there is one, else products of padded blocks, or of each expert on a CPU."""
    return None
