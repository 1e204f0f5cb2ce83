"""adatom: GPU kernels for PyTorch that can prove they are right, and that can be differentiated twice."""

from adatom.ops.attention.api import attention, attention_varlen
from adatom.ops.gated.api import geglu, mlp, swiglu
from adatom.ops.linear.api import linear
from adatom.ops.norm.api import layer_norm, rms_norm
from adatom.registry import explain

__version__ = "0.1.0"
__all__ = ["attention", "attention_varlen", "explain", "geglu", "layer_norm", "linear", "mlp", "rms_norm", "swiglu"]
