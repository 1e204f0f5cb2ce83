"""adatom: GPU kernels for PyTorch that can prove they are right, and that can be differentiated twice."""

from adatom.ops.attention.api import attention, attention_varlen
from adatom.ops.linear.api import linear
from adatom.registry import explain

__version__ = "0.1.0"
__all__ = ["attention", "attention_varlen", "explain", "linear"]
