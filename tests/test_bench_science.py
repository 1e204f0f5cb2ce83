"""`adatom bench science`: its groups, the step of force training that it times, its curves."""

from __future__ import annotations

import json
import re
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from adatom import registry
from adatom.bench import report, run, science, timing
from adatom.bench import rivals as contests
from adatom.bench import rivals_attention as rivals
from adatom.cli import app
from adatom.ops.attention import cases
from adatom.ops.attention.cases import F32, Case
from adatom.potential.graph import graph
from adatom.potential.model import Potential

CPU = torch.device("cpu")
TINY: dict[str, Any] = {"width": 8, "heads": 2, "kv_heads": 1, "scalars": 5, "layers": 1, "radial": 4, "cutoff": 3.0}
SMALL = Case("S24", 2, 2, 2, 24, 24, 16, 16, F32, bias="1hqk")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small cases of the same names, no ceilings, short host timings."""
    monkeypatch.setattr(science, "Potential", partial(Potential, **TINY))
    pair = (SMALL, SMALL._replace(name="S32", seqlen_q=32, seqlen_k=32))
    small = {science.TRAINING: (science.Crystal(64), science.Crystal(256)), "pair bias": pair, "triangle": pair[:1]}
    monkeypatch.setattr(science, "groups", lambda kind: small)
    plain = SMALL._replace(name="plain", bias="")
    monkeypatch.setattr(cases, "BENCH_CPU", {"plain": (plain,), "jvp": (plain,), "second": (plain,)})
    monkeypatch.setattr(run, "ceilings", lambda clock: {"fp32 matmul": 0.1, "copy": 10.0})
    monkeypatch.setattr(run, "host_microseconds", lambda calls, device: timing.host_microseconds(calls, device, 2))


def compare(**options: Any) -> list[dict[str, Any]]:
    return science.compare(science.Crystal(64), ("sdpa_math", "dense"), timing.Clock(CPU), 1.0, **TINY, **options)


# cases -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_every_group_has_cases_and_there_are_sizes_to_draw_against(kind: str) -> None:
    found = run._known(kind, ("science",))
    assert tuple(found) == science.GROUPS and all(found.values())
    for name in (science.TRAINING, "pair bias", "triangle"):
        assert len({science.size(case.name) for case in found[name]} - {None}) >= 2
    assert science.TRAINING not in run._known(kind)  # an op's cases are those of ops
    assert {case.atoms for case in found[science.TRAINING]} <= set(science.CELLS)


def test_sizes_are_read_from_names() -> None:
    sizes = [science.size(name) for name in ("256 atoms", "S512", "N64", "N512 tf32x3", "causal S512", "D64 S1024")]
    assert sizes == [("atoms", 256), ("length", 512), ("length", 64), None, None, None]


def test_crystals_have_as_many_atoms_as_they_say() -> None:
    for atoms in (64, 256):
        numbers, positions, cell = science.magnesia(science.CELLS[atoms])
        assert len(numbers) == len(positions) == atoms and cell.shape == (3, 3)


# force training ----------------------------------------------------------------------------------------------------


def test_a_step_of_force_training_is_timed_for_every_contender() -> None:
    entries = compare()
    assert [(e["pass"], e["contender"]) for e in entries] == [
        (kind, name) for kind in ("training step", "forces") for name in ("adatom", "sdpa_math", "dense")
    ]
    assert all(e["ms"] > 0 and e["peak_bytes"] > 0 and e["spread"][0] <= e["ms"] <= e["spread"][1] for e in entries)
    assert {e["case"] for e in entries} == {"64 atoms"} and entries[0]["slots"] > 1


def test_the_contenders_compute_the_same() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, heads, 8, 4) for heads in (4, 2, 2))
    bias, lens = torch.randn(3, 4, 1, 8), torch.tensor([8, 5, 2], dtype=torch.int32)
    want = science.ours("reference")(q, k, v, bias, lens)
    for attend in (science.ours(None), science.plain, science.by_hand):
        torch.testing.assert_close(attend(q, k, v, bias, lens), want, rtol=1e-5, atol=1e-5)


def test_wrong_gradients_show_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = science.ours(None)
    wrong = lambda q, k, v, bias, lens: right(q, k, v + 0.1 * (v - v.detach()), bias, lens)  # noqa: E731  # dv is off
    monkeypatch.setattr(science, "ours", lambda backend: wrong)
    entries = [e for e in compare() if e["contender"] == "adatom"]
    assert [e["pass"] for e in entries] == ["all"]
    assert entries[0]["reason"].startswith("gradients of the weights differ from sdpa_math's by ")
    assert all("ms" in e for e in compare(verify=False))


def test_a_backend_that_cannot_run_is_a_reason() -> None:
    entries = compare(backend="triton")
    [refused] = [e for e in entries if e["contender"] == "adatom"]
    assert "needs a CUDA device" in refused["reason"] and sum("ms" in e for e in entries) == 4


def test_a_step_reaches_the_weights() -> None:
    """The loss depends on forces, so that its gradient takes the second derivative of the energy."""
    torch.manual_seed(0)
    model = Potential(**TINY)
    torch.nn.init.normal_(model.readout[-1].weight)
    g = graph([science.magnesia(science.CELLS[64])], *model.sees).to(CPU, torch.float32)
    target = torch.randn(64, 3)
    assert list(science.step(model, g, target)()) == ["training step"]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.blocks[0].q.parameters())
    assert list(science.inference(model, g)()) == ["forces"]


# rivals ------------------------------------------------------------------------------------------------------------


def test_jvp_flash_attention_is_asked_the_same_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def attend(kind: str, q: Any, k: Any, v: Any, causal: bool, sm_scale: float) -> Any:
        asked.append(kind)
        scores = q @ k.mT * sm_scale
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1) & causal
        return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v

    fake = types.SimpleNamespace(
        attention=partial(attend, "plain"), JVPAttn=types.SimpleNamespace(fwd_dual=partial(attend, "dual"))
    )
    monkeypatch.setattr(rivals, "_needs_gpu", lambda given: None)
    monkeypatch.setitem(sys.modules, "jvp_flash_attention", types.ModuleType("jvp_flash_attention"))
    monkeypatch.setitem(sys.modules, "jvp_flash_attention.jvp_attention", fake)
    rival = next(r for r in rivals.RIVALS if r.name == "jvp_flash_attention")
    for causal in (False, True):
        case = SMALL._replace(bias="", causal=causal, scale=0.3)
        problem = run.Problem(case, CPU)
        theirs, mine = (f.results(g, ("forward", "forward mode")) for f, g in (
            (problem, rival.bind(case, problem.given)), (problem, run.ours(case, problem.given))
        ))  # fmt: skip
        assert set(theirs) == {"out", "tangent of out"}
        for name, want in mine.items():
            torch.testing.assert_close(theirs[name], want, rtol=1e-4, atol=1e-5)
    assert asked == ["plain", "dual"] * 2
    assert rival.matters(case, "jvp") and not rival.matters(case, "plain")
    with pytest.raises(contests.Unfit, match="no bias"):
        rival.bind(SMALL, problem.given)


# the command -------------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "science", "--device", "cpu", *arguments], env={"COLUMNS": "200"})


def test_science_is_recorded_printed_and_drawn(tmp_path: Path, tiny: None) -> None:
    record, picture = tmp_path / "cpu.json", tmp_path / "plot.svg"
    result = invoke("--record", str(record), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    found = json.loads(record.read_text())
    groups = (science.TRAINING, "pair bias", "triangle", "second", "jvp")
    assert tuple(dict.fromkeys(e["group"] for e in found["entries"])) == groups
    timed = {(e["group"], e["contender"]) for e in found["entries"] if "ms" in e}
    assert {(group, name) for group in groups for name in ("adatom", "sdpa_math", "dense")} <= timed
    text = report.tables(found)
    assert "**force training: training step, ms and peak memory beyond inputs**" in text
    assert "**force training: forces, ms" in text and "| 64 atoms |" in text and "**pair bias: forward + back" in text
    assert re.search(r"\bjvp_flash_attention\b.*: not installed\n", result.output)
    assert picture.read_text().count("<svg") == 1
    again = invoke("--group", "pair bias", "--rivals", "dense", "--record", str(record))
    assert again.exit_code == 0, again.output
    kept = json.loads(record.read_text())["entries"]
    assert tuple(dict.fromkeys(e["group"] for e in kept)) == groups
    assert {"commit" in e for e in kept if e["group"] == "pair bias"} == {False}


def test_one_group_quickly(tmp_path: Path, tiny: None) -> None:
    record = tmp_path / "cpu.json"
    result = invoke("--group", science.TRAINING, "--quick", "--rivals", "none", "--record", str(record))
    assert result.exit_code == 0, result.output
    assert {(e["case"], e["contender"]) for e in json.loads(record.read_text())["entries"]} == {("64 atoms", "adatom")}
    assert "no group plain" in invoke("--group", "plain").output  # not one of science's
    assert "science" not in registry.PASSES


# curves ------------------------------------------------------------------------------------------------------------


def entry(group: str, case: str, kind: str, contender: str, ms: float, peak: int | None = 1000) -> dict[str, Any]:
    return {"group": group, "case": case, "pass": kind, "contender": contender, "ms": ms, "peak_bytes": peak}


def test_curves_are_of_whole_steps_and_of_all_sizes() -> None:
    entries = [
        *(entry("pair bias", f"S{n}", kind, "adatom", n) for n in (512, 64) for kind in ("forward", "backward")),
        entry("pair bias", "S64", "forward", "dense", 1.0),  # and no backward
        *(entry(science.TRAINING, f"{n} atoms", "training step", "adatom", n / 2, n) for n in (64, 256)),
        entry("triangle", "N64", "forward", "adatom", 1.0),  # one size is no curve
        entry("second", "(1,2)", "forward", "adatom", 1.0),
        entry("plain", "S64", "forward", "adatom", 1.0),  # not of science
        entry("plain", "S128", "forward", "adatom", 1.0),
    ]
    assert report._curves(entries) == [
        (science.TRAINING, "training step", {"adatom": [("atoms", 64, 32.0, 64), ("atoms", 256, 128.0, 256)]}),
        ("pair bias", "forward + backward", {"adatom": [("length", 64, 128, 1000), ("length", 512, 1024, 1000)]}),
    ]
