"""What FlopCounterMode counts of adatom's operators, beside what it counts of PyTorch's."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import adatom


def counted(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as mode:
        call()
    return mode.get_total_flops()


def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def test_attention_counts_as_pytorchs_does() -> None:
    x = leaves((2, 4, 16, 8), (2, 4, 24, 8), (2, 4, 24, 8))
    mine = counted(lambda: adatom.attention(*x))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert mine == counted(lambda: scaled_dot_product_attention(*x)) == 2 * 2 * 4 * 16 * 24 * 16
    assert counted(lambda: adatom.attention(*x).sum().backward()) == mine * 7 // 2  # 2 and 5 products


def test_all_orders_of_attention() -> None:
    q, k, v = leaves((1, 2, 16, 8), (1, 1, 16, 8), (1, 1, 16, 4))
    one, one_v = 2 * 2 * 16 * 16 * 8, 2 * 2 * 16 * 16 * 4

    def both() -> None:
        (first,) = torch.autograd.grad(adatom.attention(q, k, v).square().sum(), q, create_graph=True)
        first.square().sum().backward()

    # dout depends on the inputs too, so the forward is differentiated again: 1 + 3 + 7 + 3 and 1 + 2 + 5 + 2 products
    assert counted(both) == 14 * one + 10 * one_v
    x, t = (q.detach(), k.detach(), v.detach()), (torch.ones_like(q), torch.ones_like(k), torch.ones_like(v))
    assert counted(lambda: torch.func.jvp(adatom.attention, x, t)) == 4 * one + 3 * one_v


def test_packed_sequences_are_counted_each() -> None:
    (q,) = leaves((12, 2, 8))
    cu = torch.tensor([0, 4, 4, 12], dtype=torch.int32)
    assert counted(lambda: adatom.attention_varlen(q, q, q, cu, cu)) == 2 * 2 * (16 + 64) * 16


def test_a_long_packed_sequence() -> None:
    """Its square is beyond int32, which lengths are in."""
    from adatom.flops import _attention

    q = torch.empty(1, 1, 16).expand(65536, 1, 16)
    cu = torch.tensor([0, 65536], dtype=torch.int32)
    assert _attention("attention")(q, q, q, None, None, None, cu, cu) == 2 * 65536**2 * 32


_PEACE = """
import importlib, importlib.util, sys
import adatom
importlib.reload(adatom)
assert importlib.util.find_spec("torch.utils.flop_counter").name == "torch.utils.flop_counter"
import torch.utils.flop_counter as counter
import torch
assert torch.ops.adatom.attention_fwd in counter.flop_registry
importlib.reload(adatom)
from adatom.flops import _FINDER
assert _FINDER not in sys.meta_path and type(counter.__loader__) is type(torch.utils.data.__loader__)
print(*[name for name in ("typer", "rich", "adatom.bench") if name in sys.modules])
"""


def test_the_finder_leaves_imports_in_peace() -> None:
    done = subprocess.run([sys.executable, "-c", _PEACE], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "", done.stdout + done.stderr


@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_linear_counts_as_pytorchs_does(activation: str) -> None:
    x, w, b = leaves((5, 6, 16), (24, 16), (24,))
    mine = counted(lambda: adatom.linear(x, w, b, activation=activation).sum().backward())
    assert mine == counted(lambda: linear(x, w, b).sum().backward()) == 3 * 2 * 30 * 16 * 24


def test_experts() -> None:
    x, w, gate_up, down = leaves((10, 16), (10, 2), (4, 24, 16), (4, 16, 12))
    indices = torch.randint(4, (10, 2))
    one = 2 * 20 * 12 * 16
    forward = counted(lambda: adatom.moe_routed(x, w, indices, gate_up, down))
    assert forward == 3 * one
    assert counted(lambda: adatom.moe_routed(x, w, indices, gate_up, down).sum().backward()) == 3 * one + 6 * one


_ORDER = """
import torch
{}
from torch.utils.flop_counter import FlopCounterMode
import adatom
q = torch.randn(1, 1, 8, 8)
with FlopCounterMode(display=False) as mode:
    adatom.attention(q, q, q)
print(mode.get_total_flops())
"""


@pytest.mark.parametrize("first", ["import adatom", ""])
def test_whichever_is_imported_first(first: str) -> None:
    code = _ORDER.format(first)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 2 * 2 * 8 * 8 * 8
