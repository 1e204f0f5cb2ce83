"""The other implementations of gated layers that adatom is timed against: those of linear."""

from adatom.bench.rivals_linear import RIVALS, passes

__all__ = ["RIVALS", "TENSORS", "passes"]

TENSORS = ("x", "w_gate", "w_up")
