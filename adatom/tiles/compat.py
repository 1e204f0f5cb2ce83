"""The only place that knows Triton versions: what differs between 3.6 and 3.9 is levelled here."""

from adatom.device import interpreting


def _mend_interpreter() -> None:
    """What Triton's interpreter leaves out of a dot: it multiplies bfloat16 as the raw 16-bit integers it keeps, and
    TF32 operands with all their bits. Widen the first, cut the second as tensor cores do."""
    import numpy as np
    import triton.language as tl
    from triton._C.libtriton import ir
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot

    def operand(builder, x, precision):
        if x.dtype.scalar == tl.bfloat16:
            return builder.cast_impl(x, tl.float32)
        if x.dtype.scalar == tl.float32 and precision == ir.INPUT_PRECISION.TF32:
            return TensorHandle((x.data.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32), x.dtype)
        return x

    def mended(self, a, b, d, precision, *rest):
        return create_dot(self, operand(self, a, precision), operand(self, b, precision), d, precision, *rest)

    InterpreterBuilder.create_dot = mended


if interpreting():
    _mend_interpreter()
