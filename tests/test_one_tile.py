"""The one-tile kernels: which problems they take, and that they are right under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from adatom.device import Device, pretend
from adatom.ops.attention import api
from adatom.ops.attention.cases import SMALL
from adatom.registry import PASSES, choose

HOPPER = Device("cuda", 90, 132, 232448)


def posed(batch=1000, heads=8, queries=64, keys=64, dim=16, dtype=torch.float32, **options):
    with pretend(HOPPER):
        q, k = (torch.empty(batch, heads, n, dim, dtype=dtype) for n in (queries, keys))
        return api.problem_of(q, k, k, **options)[0]


def chosen(problem):
    return {choose(op, problem).backend for op in PASSES["attention"]}


def test_neighbour_attention_runs_in_one_tile():
    for keys in (16, 24, 32, 64, 88, 128):
        bias = torch.empty(1000, 1, 1, keys, requires_grad=True)
        assert chosen(posed(queries=keys, keys=keys, bias=bias)) == {"one_tile"}
        assert chosen(posed(queries=keys, keys=keys, dtype=torch.bfloat16)) == {"one_tile"}


@pytest.mark.parametrize(
    "problem, words",
    [
        (posed(keys=129), "at most 128 queries and 128 keys"),
        (posed(queries=129), "at most 128 queries and 128 keys"),
        (posed(dim=72), "head_dim up to 64; got 72"),
        (posed(dtype=torch.float64), "float16, bfloat16 and float32"),
        (posed(bias=torch.empty(8, 64, 64, requires_grad=True)), "no gradient of a full bias"),
    ],
)
def test_refusals_are_words(problem, words):
    with pytest.raises(NotImplementedError, match=words):
        choose("attention_bwd", problem, "one_tile")
    assert chosen(problem) != {"one_tile"}


def test_small_problems_share_a_program():
    """Two (batch, head) of at most 512 bytes of keys, if many, in the forward and the backward; others one each."""
    triton_tile = pytest.importorskip("adatom.ops.attention.triton_tile")

    def per(keys, dim, dtype=torch.float32, batch=3000, heads=3):
        with pretend(HOPPER):
            x, o, _ = api.inputs_of(*(torch.empty(batch, heads, keys, dim, dtype=dtype) for _ in range(3)))
            launches = triton_tile._forward(x, o, x.q), triton_tile._backward(x, o, x.q, False, False, x[:3])
        for launch in launches:
            assert launch.programs * launch.meta["PER"] == batch * heads
        (found,) = {launch.meta["PER"] for launch in launches}
        return found

    assert per(8, 16) == per(16, 8) == per(16, 16, torch.bfloat16) == 2
    assert per(16, 16) == per(32, 8) == per(17, 16, torch.bfloat16) == 1
    assert per(8, 16, batch=3001, heads=3) == 1  # an odd number of them
    assert per(8, 16, batch=2000, heads=4) == 1 and per(8, 16, batch=2112, heads=4) == 2  # so few have programs at once


def interpreted(*command):
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "COLUMNS": "120"}
    done = subprocess.run([sys.executable, "-W", "ignore", *command], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("op", PASSES["attention"])
def test_every_small_case_passes_under_the_interpreter(op):
    code = "from adatom.verify import command; import typer; typer.run(command)"
    out = interpreted("-c", code, "--backend", "one_tile", "--device", "cpu", op)
    shared = ("1hqk", "11qk", "b1qk")  # a full bias that several share, which only the forward takes with its gradient
    refused = [
        c for c in SMALL if c.dtype == torch.float64 or c.varlen or c.bias in shared and c.bias_grad and c.batch > 0
    ]
    assert "FAILED" not in out
    assert len(refused) < len(SMALL) // 2


PADDING = """
import math, torch, adatom

def three_orders(backend, tensors, **options):
    torch.manual_seed(1)
    leaves = [x.detach().requires_grad_() for x in tensors]
    q, k, v, *bias = leaves
    out = adatom.attention(q, k, v, bias=bias[0] if bias else None, backend=backend, **options)
    grads = torch.autograd.grad(out, leaves, torch.randn(out.shape), create_graph=True)
    seconds = torch.autograd.grad(grads, leaves, [torch.randn(g.shape) for g in grads])
    return [x.detach() for x in (out, *grads, *seconds)]

torch.manual_seed(0)
leaves = [torch.randn(3, 2, n, 16) for n in (19, 37, 37)]
lens = torch.tensor([21, 0, 37])
beyond = torch.arange(37)[None, None, :, None] >= lens[:, None, None, None]
for bias in ([], [torch.randn(3, 1, 1, 37)], [torch.randn(3, 2, 1, 37) + 14], [torch.randn(3, 2, 19, 37)]):
    expected = three_orders("reference", [*leaves, *bias], kv_lens=lens)
    q, k, v = leaves
    hidden = [q, k.masked_fill(beyond, math.nan), v.masked_fill(beyond, math.nan)]
    for a, b in zip(three_orders("one_tile", [*hidden, *bias], kv_lens=lens), expected, strict=True):
        assert a.isfinite().all() and (a - b).norm() <= 1e-5 * b.norm() + 1e-6, (a - b).norm() / b.norm()
"""


def test_padding_is_never_read():
    interpreted("-c", PADDING)


UNITS = """
import torch, adatom
torch.manual_seed(0)
for factor in (1e-12, 1e12):  # gradients of any size keep their digits
    q, k, v, bias = (torch.randn(2, 2, n, 16) for n in (20, 20, 20, 1))
    bias = torch.randn(2, 1, 1, 20)
    found = []
    for backend, dtype in (("one_tile", torch.float32), ("reference", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, bias)]
        torch.manual_seed(1)
        out = adatom.attention(*leaves[:3], bias=leaves[3], backend=backend)
        grads = torch.autograd.grad(out, leaves, factor * torch.randn(out.shape).to(dtype), create_graph=True)
        along = [factor * torch.randn(g.shape).to(dtype) for g in grads]
        found.append([out, *grads, *torch.autograd.grad(grads, leaves, along)])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm(), (factor, (a - b).norm() / b.norm())
"""


def test_gradients_of_any_size():
    interpreted("-c", UNITS)


PIECES = """
import torch, adatom
from adatom.ops.attention import triton_tile_call
torch.manual_seed(0)
q, k, v = (torch.randn(18, n, heads, 8).transpose(1, 2) for n, heads in ((2, 2), (5, 1), (5, 1)))
lens = torch.arange(18, dtype=torch.int32) % 6
for bias in (torch.randn(18, 2, 1, 5), torch.randn(1, 1, 1, 5)):
    found = []
    for size in (2**22, 1):  # the whole batch, and pieces of 16
        triton_tile_call.PIECE = size
        leaves = [x.detach().requires_grad_() for x in (q, k, v, bias, torch.ones(2))]
        out = adatom.attention(*leaves[:3], bias=leaves[3], sinks=leaves[4], kv_lens=lens, backend="one_tile")
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        found.append([*grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)])
        assert grads[1].stride() == k.stride()
    assert all(torch.equal(a, b) for a, b in zip(*found)), [(a - b).abs().max() for a, b in zip(*found)]
with_parts, whole = (triton_tile_call.pieces(adatom.ops.attention.problem.Inputs(q, x, x)) for x in (k, q))
assert [here.stop for _, here in with_parts] == [16, 18] and whole[0][1] is None
"""


def test_a_batch_in_pieces_gives_the_same():
    interpreted("-c", PIECES)
