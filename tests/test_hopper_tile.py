"""The Hopper forward of one tile, run as Python (see test_hopper_deep.py), as its launcher launches it."""

from __future__ import annotations

import math
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from test_hopper_deep import PLAIN, Machine, Tensor4, shared, visible  # noqa: E402
from test_hopper_fwd import H100, Address, python  # noqa: E402

from adatom.device import pretend  # noqa: E402
from adatom.ops.attention import hopper_tile_fwd as tile  # noqa: E402
from adatom.ops.attention import limits, reference  # noqa: E402
from adatom.ops.attention.api import inputs_of  # noqa: E402
from adatom.ops.attention.problem import problem  # noqa: E402


class Box(Tensor4):
    """A descriptor of tiles of that shape."""

    def __init__(self, x: torch.Tensor, shape: tuple[int, int]) -> None:
        super().__init__(x)
        self.shape = shape
        self.block_type = SimpleNamespace(shape=[1, 1, *shape], nbytes=math.prod(shape) * x.element_size())


def run(x: Any, o: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with pretend(H100):
        launch = tile._launch(x, o)
    out, lse = torch.full_like(x.q, math.nan), torch.full(x.q.shape[:3], math.nan)
    boxes = [Box(t, launch.blocks[i]) for i, t in enumerate((x.q, x.k, x.v, out))]
    kernel = launch.kernel
    constants = {name: launch.meta[name] for name in kernel.arg_names[5 + len(launch.scalars) :]}
    for pid in range(launch.programs):
        names = python(pid, pid, []) | {
            "make_tiles": lambda box, n: shared(box.dtype, n, *box.shape, layout=PLAIN),
            "make_barriers": Machine(pid, pid).barriers,
            "visible": visible,
            "let_next": lambda early: None,
            "wait_for_previous": lambda early: None,
        }
        FunctionType(kernel.fn.__code__, names)(*boxes, Address(lse.view(-1)), *launch.scalars, **constants)
    return out, lse


@pytest.mark.parametrize(
    "lengths, dim, kv_heads, options",
    [
        ((128, 128), 64, 2, {}),
        ((64, 64), 128, 1, {}),
        ((100, 128), 40, 2, {"causal": True}),
        ((70, 101), 72, 1, {"window": (20, 5)}),
        ((128, 64), 128, 2, {"causal": True, "scale": -0.3}),  # the first rows see nothing
    ],
)
def test_program(lengths, dim, kv_heads, options):
    torch.manual_seed(0)
    heads = (2, kv_heads, kv_heads)
    q, k, v = (torch.randn(2, h, n, dim).to(torch.bfloat16) for h, n in zip(heads, (lengths[0], *lengths[1:] * 2)))
    x, o, _ = inputs_of(q=q, k=k, v=v, **options)
    want, want_lse = reference.forward(x._replace(q=q.double(), k=k.double(), v=v.double()), o)
    out, lse = run(x, o)
    assert ((out.double() - want).norm() / want.norm()).item() < 0.01
    torch.testing.assert_close(lse, want_lse.float(), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    "shape, options, word",
    [
        ((200, 8, 128, 64), {}, None),
        ((200, 8, 100, 128), {"causal": True, "window": (9, None)}, None),
        ((100, 8, 128, 64), {}, "heads in all"),
        ((200, 8, 129, 64), {}, "128 keys"),
        ((200, 8, 63, 128), {}, "below 64"),
        ((200, 8, 128, 32), {}, "head_dims"),
        ((200, 8, 128, 64), {"kv_lens": torch.ones(200, dtype=torch.int32)}, "kv_lens"),
        ((200, 8, 128, 64), {"softcap": 3.0}, "softcap"),
        ((200, 8, 128, 64), {"dtype": torch.float32}, "float32"),
    ],
)
def test_what_it_takes(shape, options, word):
    q = torch.empty(shape, dtype=options.get("dtype", torch.bfloat16))
    with pretend(H100):
        x, o, _ = inputs_of(q=q, k=q, v=q, **{key: value for key, value in options.items() if key != "dtype"})
        why = limits.hopper_tile_fwd(problem(x, o))
    assert why is None if word is None else word in why
