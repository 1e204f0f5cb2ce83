"""The kernel for few queries over many keys: what it takes, how it splits keys, and that it is right under Triton's
interpreter, where every tile of two blocks of keys and more is split."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from adatom.device import Device, pretend
from adatom.ops.attention import api
from adatom.ops.attention.problem import Inputs, Options
from adatom.registry import PASSES, choose

HOPPER = Device("cuda", 90, 132, 232448)
AMPERE = Device("cuda", 80, 108, 166912)


def posed(queries=1, kv_heads=8, keys=8192, batch=16, dim=128, dtype=torch.bfloat16, machine=HOPPER, **options):
    with pretend(machine):
        q = torch.empty(1, dtype=dtype).expand(batch, 32, queries, dim)
        k = torch.empty(1, dtype=dtype).expand(batch, kv_heads, keys, dim)
        return api.problem_of(q, k, k, **options)[0]


def chosen(problem):
    return {op.removeprefix("attention_"): choose(op, problem).backend for op in PASSES["attention"]}


@pytest.mark.parametrize("machine", [HOPPER, AMPERE])
def test_decoding_takes_it_and_its_derivatives_do_not(machine):
    for queries, kv_heads in ((1, 32), (1, 8), (1, 1), (4, 8), (16, 8), (16, 1), (64, 8)):
        backends = chosen(posed(queries, kv_heads=kv_heads, machine=machine, causal=True))
        assert backends.pop("fwd") == "short"
        assert "short" not in backends.values()
    for more in ({"dtype": torch.float32}, {"bias": torch.empty(16, 1, 1, 8192)}, {"dim": 64}, {"dim": 256}):
        assert choose("attention_fwd", posed(16, machine=machine, **more)).backend == "short"
    assert choose("attention_fwd", posed(128, batch=1, machine=machine)).backend == "short"


@pytest.mark.parametrize(
    "problem, words",
    [
        (posed(128), "at most 64 queries"),
        (posed(64, dim=64), "at most 16 queries"),
        (posed(17, dtype=torch.float32, batch=1), "at most 16 queries"),
        (posed(64, bias=torch.empty(16, 1, 1, 8192)), "at most 16 queries"),
        (posed(129, batch=1), "at most 128 queries"),
        (posed()._replace(varlen=True, kv_heads=1), "packed sequences of at most 16 query heads"),
        (posed()._replace(varlen=True, seqlen_q=128), "at most 4 queries of a packed"),
        (posed(0), "empty tensors"),
        (posed(dim=264), "multiple of 8 from 8 to 256; got 264"),
        (posed(dtype=torch.float64), "float16, bfloat16 and float32"),
    ],
)
def test_refusals_are_words(problem, words):
    with pytest.raises(NotImplementedError, match=words):
        choose("attention_fwd", problem, "short")
    assert choose("attention_fwd", problem).backend != "short"


def planned(batch, heads, kv_heads, queries, keys, lens=False, dim=128, machine=HOPPER, window=-1):
    """How the launcher cuts such a call: (programs for each split, splits, blocks of keys, stages)."""
    pytest.importorskip("triton")
    from adatom.ops.attention.triton_short import _Short

    q, k = (
        torch.empty(1, dtype=torch.bfloat16).expand(batch, h, n, dim) for h, n in ((heads, queries), (kv_heads, keys))
    )
    with pretend(machine):
        x = Inputs(q, k, k, kv_lens=torch.empty(batch, dtype=torch.int32) if lens else None)
        call = _Short(x, Options(1.0, True, window, -1, 0.0, "tf32x3"))
    return batch * kv_heads * call.tiles, call.splits, -(-keys // call.config.block_n), call.config.num_stages


@pytest.mark.parametrize("machine", [HOPPER, AMPERE])
def test_splits_fill_the_machine(machine):
    for batch, heads, kv_heads, queries, keys in (
        (1, 32, 8, 1, 32768),
        (1, 32, 1, 1, 32768),
        (4, 32, 8, 1, 4096),
        (1, 16, 16, 64, 8192),
        (16, 32, 8, 1, 8192),
    ):
        programs, splits, blocks, _ = planned(batch, heads, kv_heads, queries, keys, machine=machine)
        assert programs * splits >= 0.4 * machine.sms and splits <= blocks
    for lens in (False, True):  # enough without, or nothing to split
        assert planned(2048, 32, 8, 1, 512, lens, machine=machine)[1] == 1
        assert planned(64, 32, 32, 1, 48, lens, machine=machine)[1] == 1
    assert planned(64, 32, 8, 1, 65536, True, machine=machine)[1] >= 32  # one of them may be that long, alone
    assert planned(1, 8, 8, 1, 65536, window=255, machine=machine)[1] <= 256 // 32 + 1


def test_many_long_programs_have_a_stage_more():
    assert planned(16, 32, 32, 1, 4096)[3] == planned(16, 32, 8, 1, 8192)[3] + 1
    assert planned(64, 32, 8, 1, 512)[3] == planned(256, 32, 8, 1, 128)[3] == 3


def test_every_key_is_in_one_split():
    pytest.importorskip("triton")
    from adatom.ops.attention.triton_short import splits_of

    for programs in (1, 3, 8, 100, 131, 500):
        for blocks in (1, 2, 3, 7, 16, 61, 128, 1000):
            splits = splits_of(programs, blocks, 32768, 132, 3)
            per = -(-blocks // splits)
            assert 1 <= splits <= blocks and per * (splits - 1) < blocks <= per * splits


def interpreted(*command):
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "COLUMNS": "120"}
    done = subprocess.run([sys.executable, "-W", "ignore", *command], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


EVERY = """
from adatom import registry, verify
from adatom.ops.attention import cases, limits
row = next(row for row in registry.ROWS if row.backend == "short")._replace(unfit=limits.triton)
results = verify.run("attention_fwd", cases.SMALL, [row], "cpu")
assert len(results) > 55 and all(result.ok for result in results), [r for r in results if not r.ok]
"""


def test_every_small_case_passes_under_the_interpreter():
    """Those too that it leaves to others."""
    interpreted("-c", EVERY)


SHAPES = """
import math, torch, adatom

def close(**given):
    found = [adatom.attention(**given, backend=b, return_lse=True) for b in ("short", "reference")]
    for a, b in zip(*found):
        assert torch.equal(a.isinf(), b.isinf()) and not a.isnan().any()
        assert (a - b).nan_to_num(0, 0, 0).norm() <= 1e-5 * b.nan_to_num(0, 0, 0).norm() + 1e-6

torch.manual_seed(0)
lens = torch.tensor([70, 0, 37], dtype=torch.int32)
beyond = torch.arange(71)[None, None, :, None] >= lens[:, None, None, None]
for heads, kv_heads, queries in ((6, 2, 3), (2, 2, 1), (6, 1, 5)):
    q = torch.randn(3, queries, heads, 24).transpose(1, 2)
    cache = torch.randn(2, 3, 200, kv_heads, 40).transpose(2, 3)  # a cache longer and wider than what is used of it
    k, v = cache[0, :, :, :71, :24], cache[1, :, :, :71, 8:24]
    for options in (
        {}, {"window": (20, None), "causal": True}, {"window": (3, 2)}, {"window": (0, 0), "kv_lens": lens},
        {"softcap": 2.0, "sinks": torch.randn(heads), "scale": -0.5, "kv_lens": lens, "causal": True},
        {"bias": torch.randn(3, heads, queries, 71)}, {"bias": torch.randn(1, heads, 1, 71), "kv_lens": lens},
        {"bias": torch.randn(3, 1, 1, 71) - 1e9}, {"bias": torch.rand(1, heads, queries, 71) > 0.5, "causal": True},
    ):
        close(q=q, k=k, v=v, **options)
    hidden = [x.masked_fill(beyond, math.nan) for x in (k, v)]
    a = adatom.attention(q, *hidden, kv_lens=lens, causal=True, backend="short")
    assert torch.equal(a, adatom.attention(q, k, v, kv_lens=lens, causal=True, backend="short"))
"""


def test_heads_masks_and_caches():
    interpreted("-c", SHAPES)


GRADIENTS = """
import torch, adatom
assert adatom.explain("attention", *(torch.randn(2, h, n, 16) for h, n in ((4, 3), (2, 130), (2, 130))))[2].chosen
found = []
for backend in (None, "reference"):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 16, requires_grad=True) for h, n in ((4, 3), (2, 130), (2, 130)))
    out = adatom.attention(q, k, v, causal=True, backend=backend)
    grads = torch.autograd.grad(out.sin().sum(), (q, k, v), create_graph=True)
    found.append([out, *grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), (q, k, v))])
for a, b in zip(*found):
    assert (a - b).norm() <= 1e-5 * b.norm()
"""


def test_gradients_come_from_other_rows():
    interpreted("-c", GRADIENTS)
