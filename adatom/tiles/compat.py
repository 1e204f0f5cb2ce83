"""The only place that knows Triton versions: what differs between 3.6 and 3.9 is levelled here."""

from adatom.device import interpreting


def _mend_interpreter() -> None:
    """Triton's interpreter keeps bfloat16 as raw 16-bit integers and multiplies those in a dot: widen them first."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    create_dot = InterpreterBuilder.create_dot

    def widened(self, a, b, d, *rest):
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return create_dot(self, a, b, d, *rest)

    InterpreterBuilder.create_dot = widened


if interpreting():
    _mend_interpreter()
