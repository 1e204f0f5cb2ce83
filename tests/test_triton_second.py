"""Which tile the second derivative takes: a table may have lines for options, and the most special one counts."""

from __future__ import annotations

import pytest
import torch

from adatom.compile import DEVICES
from adatom.device import pretend
from adatom.ops.attention import limits
from adatom.ops.attention.api import inputs_of
from adatom.ops.attention.problem import problem

pytest.importorskip("triton")

from adatom.ops.attention import triton_bwd_bwd as second  # noqa: E402
from adatom.ops.attention.triton_call import Call, Config  # noqa: E402

BF16, F32 = torch.bfloat16, torch.float32


def picked(table: dict[tuple[str, int], Config], dim: int = 64, dtype: torch.dtype = BF16, **options: object) -> Config:
    q = torch.empty(2, 4, 128, dim, dtype=dtype, device="meta")
    with pretend(DEVICES[90]):
        x, o, _ = inputs_of(q=q, k=q, v=q, **options)
        return second._pick("bwd_bwd_q", {90: table}, Call(x, o))


def bias(dtype: torch.dtype, keys_only: bool = False) -> torch.Tensor:
    return torch.empty(2, 4, 1 if keys_only else 128, 128, dtype=dtype, device="meta")


def test_the_most_special_line_counts() -> None:
    names = ("half", "half bias", "half full bias", "half wide bias", "half softcap", "tf32x3")
    table = {(name, 64): Config(16, 16, 4, i) for i, name in enumerate(names)}

    def line(**options: object) -> str:
        return names[picked(table, **options).num_stages]  # type: ignore[arg-type]

    assert line() == "half" and line(softcap=5.0) == "half softcap"
    assert line(bias=bias(BF16)) == "half full bias" and line(bias=bias(F32)) == "half wide bias"
    assert line(bias=bias(F32, keys_only=True)) == "half bias"
    assert line(bias=bias(BF16), softcap=5.0) == "half full bias"
    assert line(dtype=F32, bias=bias(F32)) == "tf32x3"


def test_lines_for_options_serve_up_to_their_head_dim() -> None:
    small, large = Config(16, 16, 4, 1), Config(32, 16, 4, 1)
    table = {("half", 64): small, ("half", 128): small, ("half full bias", 128): large}
    assert picked(table, 64, bias=bias(BF16)) == small
    assert picked(table, 128, bias=bias(BF16)) == large and picked(table, 128) == small


@pytest.mark.parametrize("limit", [limits.triton_jvp, limits.triton_second])
def test_a_bias_that_does_not_fit_is_refused_in_words(limit) -> None:
    """On Hopper at head_dim 65 to 128; a bias of q's dtype, a bias per key and other head_dims are taken."""

    def why(dim: int, b: torch.Tensor, arch: int = 90) -> str | None:
        q = torch.empty(2, 4, 128, dim, dtype=BF16, device="meta")
        with pretend(DEVICES[arch]):
            x, o, _ = inputs_of(q=q, k=q, v=q, bias=b)
            found: str | None = limit(problem(x, o))
            return found

    assert "q's dtype" in (why(128, bias(F32)) or "") and "q's dtype" in (why(72, bias(F32)) or "")
    assert why(64, bias(F32)) is None and why(256, bias(F32)) is None and why(128, bias(F32), 100) is None
    assert why(128, bias(BF16)) is None and why(128, bias(F32, keys_only=True)) is None
