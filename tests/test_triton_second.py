"""Which tile the second derivative takes (a table may have lines for options, and the most special one counts), and in
what pieces its first pass runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from adatom.compile import DEVICES
from adatom.device import pretend
from adatom.ops.attention.api import inputs_of

pytest.importorskip("triton")

from adatom.ops.attention import triton_jvp  # noqa: E402
from adatom.ops.attention.triton_call import Call, Config, pick  # noqa: E402
from adatom.tiles.launch import observed  # noqa: E402

BF16, F32 = torch.bfloat16, torch.float32


def picked(table: dict[tuple[str, int], Config], dim: int = 64, dtype: torch.dtype = BF16, **options: object) -> Config:
    q = torch.empty(2, 4, 128, dim, dtype=dtype, device="meta")
    given = options.get("bias")
    k = torch.empty(2, 4, given.shape[3] if isinstance(given, torch.Tensor) else 128, dim, dtype=dtype, device="meta")
    with pretend(DEVICES[90]):
        x, o, _ = inputs_of(q=q, k=k, v=k, **options)
        return pick("bwd_bwd_q", {90: table}, Call(x, o))


def bias(dtype: torch.dtype, keys_only: bool = False, keys: int = 128) -> torch.Tensor:
    return torch.empty(2, 4, 1 if keys_only else 128, keys, dtype=dtype, device="meta")


def test_the_most_special_line_counts() -> None:
    names = ("half", "half bias", "half full bias", "half wide bias", "half ragged bias", "half softcap", "tf32x3")
    table = {(name, 64): Config(16, 16, 4, i) for i, name in enumerate(names)}

    def line(**options: object) -> str:
        return names[picked(table, **options).num_stages]  # type: ignore[arg-type]

    assert line() == "half" and line(softcap=5.0) == "half softcap"
    assert line(bias=bias(BF16)) == "half full bias" and line(bias=bias(F32)) == "half wide bias"
    assert line(bias=bias(F32, keys_only=True)) == "half bias"
    assert line(bias=bias(BF16), softcap=5.0) == "half full bias"
    assert line(bias=bias(BF16, keys=100)) == line(bias=bias(F32, keys=100)) == "half ragged bias"
    assert line(bias=bias(BF16, keys_only=True, keys=100)) == "half bias"
    assert line(dtype=F32, bias=bias(F32)) == "tf32x3"


def test_lines_for_options_serve_up_to_their_head_dim() -> None:
    small, large = Config(16, 16, 4, 1), Config(32, 16, 4, 1)
    table = {("half", 64): small, ("half", 128): small, ("half full bias", 128): large}
    assert picked(table, 64, bias=bias(BF16)) == small
    assert picked(table, 128, bias=bias(BF16)) == large and picked(table, 128) == small


def tangents(
    batch: int, heads: int, kv_heads: int = 0, length: int = 4096, keys: int = 0, **options: object
) -> list[tuple[str, tuple[int, ...]]]:
    """The kernels of the pass that the second derivative of float32 attention begins with on an H100, and of what shape
    their first tensors are."""
    q, out = (torch.empty(batch, heads, length, 64) for _ in range(2))
    k, lse = torch.empty(batch, kv_heads or heads, keys or length, 64), torch.empty(batch, heads, length)
    seen: list[tuple[str, tuple[int, ...]]] = []

    def observe(kernel: object, args: tuple[torch.Tensor, ...], meta: dict[str, object], _: object) -> None:
        assert meta.get("PARTS", True)
        seen.append((kernel.fn.__name__, tuple(args[0].shape)))  # type: ignore[attr-defined]

    with pretend(DEVICES[90]), observed(observe):
        x, o, _ = inputs_of(q=q, k=k, v=k, **options)
        triton_jvp.tangent_pass(x, o, triton_jvp.Directions(x, q, k, k, None, None), out, lse, out, None)
    return seen


def test_keys_and_values_are_in_parts_for_half_of_the_heads_at_a_time() -> None:
    def kernels(*shape: int) -> list[tuple[str, tuple[int, ...]]]:
        return [("_parts_kernel", shape), ("_tangent_kernel", shape)]

    assert tangents(1, 16) == 2 * kernels(1, 8, 4096, 64)
    assert tangents(4, 4) == 2 * kernels(2, 4, 4096, 64)
    # 128, 256 and 320 programs for 132 multiprocessors: half of them would be too few, or take a turn more
    assert tangents(1, 4) == kernels(1, 4, 4096, 64)
    assert tangents(1, 8) == kernels(1, 8, 4096, 64)
    assert tangents(1, 10) == kernels(1, 10, 4096, 64)
    assert tangents(128, 1, length=2048) == 2 * kernels(64, 1, 2048, 64)
    assert tangents(128, 1, length=512) == 2 * kernels(64, 1, 512, 64)
    # halves would be too small for descriptors, and so for parts
    assert [shape[0] for _, shape in tangents(128, 1, length=512, keys=64)] == [128, 128]
    assert tangents(1, 16, precision="tf32") == kernels(1, 16, 4096, 64)  # one part each
    assert len(tangents(1, 16, 1)) == 2  # parts of one head's keys cannot be halved
    assert len(tangents(1, 16, sinks=torch.zeros(16))) == 2
    assert len(tangents(2, 8, sinks=torch.zeros(8))) == 4


def halved() -> None:
    """In a process with Triton's interpreter: halves give what the whole does."""
    from adatom.ops.attention.triton_bwd_bwd import backward_backward
    from adatom.ops.attention.triton_fwd import forward

    tangents_of, asked, parts = triton_jvp._tangents, triton_jvp._halves_cost_nothing, []

    def noted(x: Any, *rest: Any) -> None:
        parts.append(x.q.shape)
        tangents_of(x, *rest)

    triton_jvp._tangents = noted
    for (batch, heads, kv_heads), shape, sinks in (
        ((1, 4, 2), (1, 4, 16, 20), False),
        ((4, 2, 1), (2, 1, 16, 20), True),
        ((2, 2, 2), (1, 2, 1, 20), False),
    ):
        q, dout = (torch.randn(batch, heads, 16, 16) for _ in range(2))
        k, v = (torch.randn(batch, kv_heads, 20, 16) for _ in range(2))
        given = {"bias": torch.randn(shape), "sinks": torch.randn(heads) if sinks else None}
        x, o, _ = inputs_of(q=q, k=k, v=v, **given)
        out, lse = forward(x, o)
        moved = [torch.randn_like(t) if t is not None else None for t in x[:5]]
        found = []
        for ask in (asked, lambda *_: True):
            triton_jvp._halves_cost_nothing = ask  # type: ignore[assignment]
            found.append(backward_backward(x, o, out, lse, dout, lse, *moved, True))
        half = (1, heads // 2) if batch == 1 else (batch // 2, heads)
        assert [p[:2] for p in parts] == [(batch, heads), half, half]
        parts.clear()
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(*found))  # type: ignore[arg-type]


def test_halves_give_what_the_whole_does() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent)}
    code = "import test_triton_second; test_triton_second.halved()"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
