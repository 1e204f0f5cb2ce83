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
    entering, leaving = (getattr(hook, "calls", hook) for hook in hooks)
    behind = (packed, None, None, None)
    if _passes_on(run):  # what the launcher would add to its arguments follows from the kernel
        flags = run.launch_cooperative_grid, run.launch_pdl
        run, behind = run.launch, (*flags, None, None, *behind)

    def launch(args):
        if entering or leaving:
            compiled[programs, 1, 1](*args, *rest)
        else:
            run(programs, 1, 1, stream_of(device), function, *behind, *args, *rest)

    return launch


def _passes_on(run):
    """Whether Triton's launcher only hands its arguments on to its C function: that of 3.6, for a kernel that needs no
    memory from the host."""
    needs = [getattr(run, f"{kind}_scratch_size", 1) for kind in ("global", "profile")]
    return not any(needs) and hasattr(run, "launch_pdl") and not hasattr(run, "arg_annotations")


def _mend_interpreter() -> None:
    """What Triton's interpreter does unlike a GPU: it truncates to bfloat16 (round to nearest), and multiplies bfloat16
    as the raw 16-bit integers it keeps (widen them)."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot

    def operand(builder, x):
        return builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def mended(self, a, b, *rest):
        return create_dot(self, operand(self, a), operand(self, b), *rest)

    cast_impl = InterpreterBuilder.cast_impl

    def nearest(self, src, dst_type):
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            bits = src.data.astype(np.float32).view(np.uint32)
            up = ((bits >> 16) & np.uint32(1)) + np.uint32(0x7FFF)
            bits = np.where(np.isnan(src.data), np.uint32(0x7FC00000), bits + up)
            return TensorHandle((bits >> 16).astype(np.uint16), tl.bfloat16)
        return cast_impl(self, src, dst_type)

    InterpreterBuilder.create_dot = mended
    InterpreterBuilder.cast_impl = nearest


if interpreting():
    _mend_interpreter()
