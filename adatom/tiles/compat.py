"""The only place that knows Triton versions: what differs between 3.6 and 3.9 is levelled here."""

from adatom.device import interpreting


def direct(compiled, programs, device, rest):
    """A function of the first arguments of a compiled kernel that launches it on a device's current stream.

    compiled: what Triton returns from a launch, which has one dimension of `programs`. rest: the other arguments, in
    order, constexprs included. Pointers may be tensors or addresses. Profilers that hook into Triton are served.
    """
    from triton import knobs
    from triton.runtime import driver

    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    stream_of = driver.active.get_current_stream
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook

    def launch(args):
        if any(getattr(hook, "calls", hook) for hook in hooks):
            compiled[programs, 1, 1](*args, *rest)
        else:
            run(programs, 1, 1, stream_of(device), function, packed, None, None, None, *args, *rest)

    return launch


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
