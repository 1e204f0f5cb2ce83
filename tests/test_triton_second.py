"""Which tile the second derivative takes: a table may have lines for options, and the most special one counts."""

from __future__ import annotations

import pytest
import torch

from adatom.compile import DEVICES
from adatom.device import pretend
from adatom.ops.attention.api import inputs_of

pytest.importorskip("triton")

from adatom.ops.attention.triton_call import Call, Config, pick  # noqa: E402

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
