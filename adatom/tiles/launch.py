"""The one place from which Triton kernels are launched, so that they can also be compiled without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from adatom.tiles.compat import Direct

Observer = Callable[[Any, tuple[Any, ...], dict[str, Any], int], None]
_observer: Observer | None = None


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """While active, `launch` hands (kernel, args, meta, spill) to `observer` and runs nothing."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


def launch(kernel: Any, programs: int, args: tuple[Any, ...], meta: dict[str, Any], spill: int = 0) -> Any:
    """Run `kernel` with that many programs. `meta` holds its constexprs and num_warps, num_stages.

    Nothing is launched for 0 programs. spill: bytes of registers it may spill, for `adatom compile` to check. Returns
    what Triton compiled, or None.
    """
    if _observer is not None:
        return _observer(kernel, args, meta | {"enable_fp_fusion": True}, spill)
    if not programs:
        return None
    while True:
        try:  # Triton 3.10 fuses multiply-adds only on request; 3.9 warns of it
            return kernel[(programs,)](*args, enable_fp_fusion=True, **meta)
        except Exception as error:
            # options may cost more shared memory than the tile was chosen for
            if type(error).__name__ != "OutOfResources" or meta.get("num_stages", 1) == 1:
                raise
            meta = meta | {"num_stages": meta["num_stages"] - 1}


_last: dict[int, torch.cuda.Stream] = {}  # of each device: in which stream `take_turn` was called last


def take_turn(device: torch.device) -> None:
    """Ahead of kernels whose programs wait for each other: the current stream waits for all that was given until now to
    the one in which such kernels were launched last, if it is another. Those of many streams at once could each hold a
    part of the GPU, and wait for the rest for ever. A stream that is alone is given nothing to do. CUDA graphs are not
    looked after, nor are streams that are not PyTorch's waited for: they may be gone by the next call."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return
    stream = torch.cuda.current_stream(device)
    last = _last.get(stream.device_index)
    if last is not None and last != stream:
        with torch.cuda.stream(last):
            captured = torch.cuda.is_current_stream_capturing()
        if not captured:
            stream.wait_stream(last)
    if stream.stream_id & 1 or not stream.stream_id:  # PyTorch's: odd, and 0 the default one
        _last[stream.device_index] = stream


class Launch:
    """A kernel with all that follows from the shapes of its tensors; call it with the tensors, its first parameters.

    It serves tensors of the dtypes, shapes, strides, alignment to 16 bytes and device that it was made for, and no
    others: it launches again without looking at them, which Triton does for each of some 50 arguments.

    scalars: the parameters after the tensors. blocks: by name, the parameters that take a tensor descriptor instead of
    a tensor, and how many rows of one (batch, head) it loads. parts: how many sums of the result the programs write,
    for the caller to add.
    """

    def __init__(
        self, kernel: Any, programs: int, scalars: tuple[Any, ...], meta: dict[str, Any], spill: int = 0,
        blocks: dict[str, Any] | None = None, parts: int = 1,
    ) -> None:  # fmt: skip
        self.kernel, self.programs, self.scalars, self.meta, self.spill = kernel, programs, scalars, meta, spill
        self.parts = parts
        self.blocks = {kernel.arg_names.index(name): block for name, block in (blocks or {}).items()}
        self._direct: Any = None
        self._like: dict[int, tuple[type, dict[str, Any]]] = {}  # what the descriptors of the blocks hold

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """None stands for a tensor that the kernel does not look at."""
        q = tensors[0]
        assert q is not None
        if self._direct is not None and _observer is None:
            somewhere = q.data_ptr()
            addresses = [somewhere if t is None else t.data_ptr() for t in tensors]
            self._direct(addresses, lambda i: self._descriptor(i, q if tensors[i] is None else tensors[i]))
            return
        given = [q if t is None else t for t in tensors]
        args = tuple(self._descriptor(i, t) if i in self.blocks else t for i, t in enumerate(given))
        compiled = launch(self.kernel, self.programs, (*args, *self.scalars), self.meta, self.spill)
        if compiled is not None:
            constexprs = [self.meta[name] for name in self.kernel.arg_names[len(args) + len(self.scalars) :]]
            rest, blocks = (*self.scalars, *constexprs), tuple(sorted(self.blocks))
            self._direct = Direct(compiled, self.programs, q.get_device(), rest, blocks)

    def _descriptor(self, i: int, x: Any) -> Any:
        """A descriptor of argument i. Shapes are those of the first call, so all its fields but one are too."""
        if i not in self._like:
            made = self.describe(x, self.blocks[i])
            self._like[i] = type(made), {**vars(made), "base": None}
            return made
        kind, fields = self._like[i]
        descriptor: Any = object.__new__(kind)  # without its checks
        vars(descriptor).update(fields, base=x)
        return descriptor

    @staticmethod
    def describe(x: torch.Tensor, block: Any) -> Any:
        """The tensor descriptor of x (batch, heads, length[, dim]) for what `blocks` says of it."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        box = [1, 1, *block] if isinstance(block, tuple) else [1, 1, block, *(tile_dim(n) for n in x.shape[3:])]
        return TensorDescriptor(x, list(x.shape), list(x.stride()), box)


def tile_dim(n: int) -> int:
    """The length of a tile along a dimension of n: a power of two, at least 16."""
    return max(16, 1 << (n - 1).bit_length())
