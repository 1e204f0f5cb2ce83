"""The only place that knows Triton versions: what differs between 3.6 and 3.9 is levelled here."""

from copy import copy

from adatom.device import interpreting


class Direct:
    """Launches a compiled kernel of one dimension of `programs` on a device's current stream, given addresses.

    compiled: what Triton returns from a launch. rest: the arguments after the tensors, in order, constexprs included.
    blocks: the places among the tensors that take a tensor descriptor, ascending. Profilers that hook into Triton are
    served.
    """

    def __init__(self, compiled, programs, device, rest, blocks=()):
        from triton import knobs
        from triton.runtime import driver

        self.compiled, self.programs, self.device, self.rest = compiled, programs, device, rest
        self.run, self.function = compiled.run, compiled.function
        self.stream_of = driver.active.get_current_stream
        hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        self.entering, self.leaving = (getattr(hook, "calls", hook) for hook in hooks)
        self.behind, self.listed = (compiled.packed_metadata, None, None, None), False
        self.blocks = dict.fromkeys(blocks)
        self.boxes = {}  # what stands for a descriptor among the arguments, by place and address
        passed_on = _passed_on(self.run, self.behind)
        if passed_on is not None:
            self.behind, self.listed = passed_on
            self.run = self.run.launch
            self._open(blocks)

    def _open(self, blocks):
        """Take the C function out of what makes descriptors for it on every launch."""
        code = getattr(self.run, "__code__", None) if blocks else None
        held = dict(zip(code.co_freevars, self.run.__closure__ or ())) if code else {}
        if {"launcher", "tensordesc_meta"} <= set(held):
            metas = held["tensordesc_meta"].cell_contents or ()
            if len(metas) == len(blocks) and all(metas):
                self.run, self.blocks = held["launcher"].cell_contents, dict(zip(blocks, metas))

    def __call__(self, addresses, describe):
        """describe(i) is the tensor descriptor of argument i, which `addresses` has the address of."""
        if self.entering or self.leaving:
            for i in self.blocks:
                addresses[i] = describe(i)
            self.compiled[self.programs, 1, 1](*addresses, *self.rest)
            return
        if self.blocks:
            addresses = self._boxed(addresses, describe)
        stream = self.stream_of(self.device)
        if self.listed:
            self.run(self.programs, 1, 1, stream, self.function, *self.behind, (*addresses, *self.rest))
        else:
            self.run(self.programs, 1, 1, stream, self.function, *self.behind, *addresses, *self.rest)

    def _boxed(self, addresses, describe):
        """The addresses with what the launcher takes for a descriptor, which is made once for each address."""
        found, start = [], 0
        for i, meta in self.blocks.items():
            box = self.boxes.get((i, addresses[i]))
            if box is None:
                box = [describe(i)]
                if meta is not None:
                    if len(self.boxes) >= 256:
                        self.boxes.clear()
                    box = self.boxes[i, addresses[i]] = _box(box[0], meta)
            found += addresses[start:i]
            found += box
            start = i + 1
        return found + addresses[start:]


def _passed_on(run, behind):
    """What Triton's launcher would have its C function take between the kernel and its arguments, and whether that
    takes these as one list (from 3.7 on), by asking a copy of it. None if it needs more than that for each launch."""
    needs = [getattr(run, f"{kind}_scratch_size", 1) for kind in ("global", "profile")]
    if any(needs) or getattr(run, "gsan_enabled", False) or not hasattr(run, "launch"):
        return None
    asked, taken, front, argument = copy(run), [], (1, 1, 1, object(), object()), object()
    asked.launch = lambda *given: taken.append(given)
    try:
        asked(*front, *behind, argument)
    except Exception:  # one of a later Triton may want a GPU, or other arguments
        return None
    if len(taken) != 1 or taken[0][:5] != front or taken[0][-1] not in (argument, (argument,)):
        return None
    return taken[0][5:-1], taken[0][-1] is not argument


def _box(descriptor, meta):
    """What the C function takes for a descriptor."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    more = make_tensordesc_arg.__code__.co_argcount - 2  # in 3.9, the arguments that go before, which it leaves alone
    return make_tensordesc_arg(descriptor, meta, *[None] * more)


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
