"""Keys and values that come in parts: which calls make them, and that they are right under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from adatom.compile import DEVICES
from adatom.device import pretend
from adatom.ops.attention.problem import Inputs, Options

pytest.importorskip("triton")

from adatom.ops.attention.triton_call import Call  # noqa: E402
from adatom.ops.attention.triton_parts import pay  # noqa: E402


def pays(
    heads: int = 8, kv_heads: int = 8, queries: int = 512, dim: int = 64, dim_v: int = 64, **options: object
) -> bool:
    tma = bool(options.pop("tma", True))
    dtype = options.pop("dtype", torch.float32)
    q, k, v = (
        torch.empty(1, h, n, d, dtype=dtype, device="meta")
        for h, n, d in ((heads, queries, dim), (kv_heads, 512, dim), (kv_heads, 512, dim_v))
    )
    o = Options(1.0, False, -1, -1, 0.0, str(options.pop("precision", "tf32x3")))
    with pretend(DEVICES[90]):
        return pay(Call(Inputs(q, k, v), o), tma)


def test_which_calls_make_parts() -> None:
    assert pays() and pays(precision="tf32") and pays(dim=16, dim_v=16) and pays(dim=64, dim_v=24)
    assert pays(queries=128, kv_heads=2) and not pays(queries=128)  # each is read by too few queries
    assert not pays(precision="ieee") and not pays(dtype=torch.bfloat16) and not pays(dim=72, dim_v=72)
    assert not pays(tma=False)


SOME = """
import torch
from adatom import registry
from adatom.ops.attention import triton_jvp
from adatom.ops.attention.cases import SMALL, F32
from adatom.verify import examine_case

made = []
def pay(call, tma):
    made.append(not call.varlen and call.x.kv_lens is None and call.kind in ("tf32", "tf32x3"))
    return made[-1]
triton_jvp.pay = pay

fit = [c for c in SMALL if c.dtype == F32 and not c.varlen and not c.kv_lens and c.head_dim <= 64]
for op, some in (("attention_jvp", fit[::2]), ("attention_bwd_bwd", fit[1::6])):
    rows = [row for row in registry.rows(op) if row.backend == "triton"]
    for case in some:
        for result in examine_case(case, rows, torch.device("cpu")):
            assert result.ok, result
assert sum(made) >= 12, made
"""


def test_small_cases_pass_under_the_interpreter() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SOME], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
