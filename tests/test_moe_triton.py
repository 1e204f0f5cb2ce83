"""The Triton kernels of moe: in Triton's interpreter, in a process of its own, and which tiles they pick."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adatom.compile import DEVICES
from adatom.device import Device, pretend
from adatom.ops.moe import cases, trial
from adatom.ops.moe.problem import Inputs, Options, problem
from adatom.registry import choose
from adatom.tiles.launch import observed

ROOT = Path(__file__).parent.parent

ORDER = """
import itertools, torch
from adatom.ops.moe import triton_order
from adatom.ops.moe.problem import inverse_of, plan
from adatom.ops.moe.triton_combine import combine
torch.manual_seed(0)
shapes = ((1, 1, 1), (1, 8, 40), (30, 3, 9), (140, 2, 31), (0, 3, 4))
for few, (tokens, top_k, experts), dtype in itertools.product((0, 4096), shapes, (torch.int32, torch.int64)):
    triton_order.FEW = few if tokens else 4096
    indices = torch.randint(-1, experts + 1, (top_k, tokens), dtype=dtype).T
    order, offsets, places = triton_order.order(indices, experts)
    want, bounds = plan(indices, experts)
    assert torch.equal(order, want) and torch.equal(offsets, bounds), (few, tokens, top_k, experts)
    assert torch.equal(places.long(), inverse_of(want)) and torch.equal(triton_order.places_of(order), places)
for hidden, top_k in ((24, 3), (130, 9)):
    indices = torch.randint(-1, 6, (11, top_k))
    order, offsets, places = triton_order.order(indices, 5)
    present, y = (indices >= 0) & (indices < 5), torch.randn(indices.numel(), hidden)
    y[offsets[-1] :] = torch.nan  # rows of dropped pairs are not read
    weights = torch.where(present, torch.rand(top_k, 11, dtype=torch.float64).T, torch.nan)
    rows = torch.where(present[..., None], y.double()[places.long()].view(11, top_k, hidden), 0)
    want = (rows * torch.where(present, weights, 0)[..., None]).sum(1)
    assert torch.allclose(combine(y, places, top_k, weights, offsets=offsets).double(), want, atol=1e-5)
    assert torch.allclose(combine(y, places, top_k, offsets=offsets).double(), rows.sum(1), atol=1e-5)
"""

ROWS = """
import sys, torch
from adatom import verify
from adatom.ops.moe import cases, trial
from adatom.registry import rows
mine = [row for row in rows("moe_fwd") + rows("moe_bwd") if row.backend == "triton"]
for case in cases.SMALL:
    if case.name in sys.argv[1:]:
        results = verify.examine_case(case, mine, torch.device("cpu"))
        assert len(results) == 2 and all(r.ok for r in results), results
"""


def test_order_and_sums(interpreted):
    interpreted(ORDER)


# each option once: every activation, the dtypes, routing, layouts, odd sizes
@pytest.mark.parametrize(
    "names",
    [
        ("f32 relu", "f32 gelu", "bf16 gelu_tanh", "bf16 none", "f16 even"),
        ("bf16 dropped", "bf16 all dropped", "bf16 twice", "bf16 skewed"),
        ("bf16 narrow", "f16 strides", "bf16 transposed", "bf16 odd", "bf16 one token", "f32 one expert"),
        ("bf16 recompute", "f32 recompute gelu_tanh", "bf16 one token recompute", "f16 one token dropped"),
    ],
    ids=("dtypes", "routing", "layouts", "recompute"),
)
def test_rows_in_the_interpreter(interpreted, names):
    assert set(names) <= {case.name for case in cases.SMALL}
    interpreted(ROWS, *names)


def posed(machine: Device, tokens: int, dtype: torch.dtype = torch.bfloat16, hidden: int = 64, experts: int = 8):
    x = Inputs(
        torch.empty(tokens, hidden, dtype=dtype, device="meta"), torch.empty(tokens, 2, device="meta"),
        torch.empty(tokens, 2, dtype=torch.int64, device="meta"),
        torch.empty(experts, 96, hidden, dtype=dtype, device="meta"),
        torch.empty(experts, hidden, 48, dtype=dtype, device="meta"),
    )  # fmt: skip
    with pretend(machine):
        return problem(x, Options("silu"))


@pytest.mark.parametrize("op", ["moe_fwd", "moe_bwd"])
def test_who_is_served(op):
    for arch in (80, 86, 89, 100, 120):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert choose(op, posed(DEVICES[arch], 100, dtype)).backend == "triton"
    a100 = DEVICES[80]
    assert choose(op, posed(DEVICES[90], 4096, torch.float32)).backend == "triton"
    assert choose(op, posed(a100, 0)).backend == choose(op, posed(a100, 9, torch.float64)).backend == "torch"
    assert choose(op, posed(a100, 9, experts=4096)).backend == "torch"
    for options, why in (({"hidden": 60}, "multiples of 8; got 60 and 48"), ({"tokens": 0}, "empty tensors")):
        with pytest.raises(NotImplementedError, match=why):
            choose(op, posed(DEVICES[90], **{"tokens": 9} | options), "hopper")
    for machine, why in ((Device("cuda", 75, 68, 65536), "sm_80"), (Device("cpu", 0, 0, 0), "CUDA")):
        with pytest.raises(NotImplementedError, match=why):
            choose(op, posed(machine, 9), "triton")


def test_tiles():
    """Few rows to an expert take small tiles; sizes that no tile divides take the tiles with masks."""
    moe = pytest.importorskip("adatom.ops.moe.triton_moe")
    a = torch.empty(1, dtype=torch.bfloat16, device="meta")
    for arch, device in DEVICES.items():
        with pretend(device):
            many, few = (moe.pick(a, "gate", pairs, 8, 1024, 512) for pairs in (2**14, 8))
            assert few.block_m == 16 < many.block_m, arch
            for kind in ("gate", "plain", "grad", "outer"):
                assert moe.pick(a, kind, 2**14, 8, 1001, 512) == moe.UNEVEN[kind]
                assert moe.pick(a, kind, 2**14, 8, 2880, 2880) != moe.UNEVEN[kind]
                assert moe.pick(a.float(), kind, 2**14, 8, 1024, 512) == moe.FLOAT32[kind]


def test_cases_reach_every_configuration():
    moe = pytest.importorskip("adatom.ops.moe.triton_moe")
    seen = set()

    def observer(kernel, args, meta, spill):
        if "BLOCK_K" in meta:
            blocks = (meta["BLOCK_M"], meta["BLOCK_N"], meta["BLOCK_K"], meta["num_warps"], meta["num_stages"])
            seen.add((meta.get("KIND", "outer"), moe.Config(*blocks, spill)))

    for arch in (80, 90):
        for case in cases.COMPILE:
            with pretend(DEVICES[arch]), observed(observer):
                _, arguments = trial.blank(case)
                moe.forward(*arguments["moe_fwd"])
                moe.backward(*arguments["moe_bwd"])
    tables = (moe.LARGE, moe.SMALL)
    every = {(kind, config) for table in tables for kind, rows in table.items() for _, config in rows}
    for table in (moe.FLOAT32, moe.UNEVEN):
        every |= set(table.items())
    assert seen == every
