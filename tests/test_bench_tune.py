"""`adatom bench --tune`: what is tuned, with which candidates, and how the result is shown."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adatom.bench import tune
from adatom.cli import app


def test_what_to_tune_is_chosen_by_name() -> None:
    assert [str(key) for key in tune.keys(["bwd_kv half", "fwd ieee 64"])] == [
        "fwd ieee 64",
        "bwd_kv half 64",
        "bwd_kv half 128",
        "bwd_kv half 256",
    ]
    with pytest.raises(ValueError, match="nothing to tune called fw; there are: fwd"):
        tune.keys(["fw"])


def test_candidates_suit_the_architecture() -> None:
    pytest.importorskip("triton")
    key = tune.keys(["fwd half 128"])[0]
    hopper, ampere = tune.candidates(key, 90), tune.candidates(key, 80)
    assert any(c.tma for c in hopper) and not any(c.tma for c in ampere)
    assert all(c.block_m * c.block_n + max(c.block_m, c.block_n) * 128 <= c.num_warps * 32 * 180 for c in hopper)


def test_the_tables_that_are_tuned_exist_and_are_used() -> None:
    pytest.importorskip("triton")
    for kernel in tune.KERNELS:
        module, name = kernel.table.split(":")
        table = getattr(importlib.import_module(f"adatom.ops.attention.{module}"), name)
        tuned = {(key.kind, key.dim) for key in tune.keys([kernel.name])}
        assert tuned <= set(table[90])
        source = Path(sys.modules[f"adatom.ops.attention.{module}"].__file__ or "").read_text()
        assert f'"{kernel.name}"' in source  # the name by which it can be forced


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles")
def test_candidates_that_do_not_fit_are_dropped() -> None:
    pytest.importorskip("triton")
    from adatom.ops.attention.triton_call import Config

    key = tune.keys(["fwd half 64"])[0]
    fits, too_deep = Config(64, 32, 4, 2), Config(128, 128, 8, 9)
    assert tune.viable(key, 90, [too_deep, fits], jobs=1) == [fits]


def test_what_was_found_is_printed_as_a_row_to_paste() -> None:
    pytest.importorskip("triton")
    from adatom.ops.attention.triton_call import Config

    key = tune.keys(["bwd_q half 64"])[0]
    found = tune.Found(key, Config(64, 64, 4, 2), 2.0, Config(128, 64, 8, 3, True), 1.0, 17)
    assert found.line() == 'Q_CONFIGS: ("half", 64): Config(128, 64, 8, 3, tma=True),'
    assert tune.record([found], "GPU")["tuned"][0]["best"]["block_m"] == 128
    assert tune.table([found]).row_count == 1


def test_tuning_needs_a_gpu() -> None:
    result = CliRunner().invoke(app, ["bench", "--device", "cpu", "--tune"], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and "--tune needs a GPU" in result.output
