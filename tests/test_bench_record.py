"""`adatom bench --record`: what an interrupted run leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from adatom.bench import rivals, run, timing
from adatom.cli import app
from adatom.ops.attention import cases
from adatom.ops.attention.cases import F32, Case

TINY = Case("tiny", 1, 2, 2, 24, 24, 16, 16, F32)
BIASED = Case("biased", 2, 2, 2, 17, 23, 8, 8, F32, bias="1hqk")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "attention", "--device", "cpu", *arguments])


def test_an_interrupted_run_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the old entries of the cases that it did not reach; a record that is half written replaces nothing."""
    monkeypatch.setattr(cases, "BENCH_CPU", {"plain": (TINY, TINY._replace(name="second tiny")), "bias": (BIASED,)})
    monkeypatch.setattr(run, "ceilings", lambda clock: {"fp32 matmul": 0.1, "copy": 10.0})
    monkeypatch.setattr(run, "host", lambda device, backend: ("none", []))
    record, compare, write = tmp_path / "r.json", run.compare, Path.write_text
    words = ("--rivals", "none", "--no-verify", "--record", str(record))
    assert invoke("--group", "plain", "--group", "bias", *words).exit_code == 0
    old = json.loads(record.read_text())

    def interrupted(problem: run.Problem, *rest: Any) -> list[dict[str, Any]]:
        if problem.case.name == "second tiny":
            raise KeyboardInterrupt
        return compare(problem, *rest)

    monkeypatch.setattr(run, "compare", interrupted)
    monkeypatch.setattr(run, "commit", lambda: "new")
    assert invoke("--group", "plain", *words).exit_code != 0
    found = json.loads(record.read_text())
    assert found["commit"] == "new" and [p.name for p in tmp_path.iterdir()] == ["r.json"]
    for case in ("tiny", "second tiny", "biased"):
        before, now = ([e for e in r["entries"] if e["case"] == case] for r in (old, found))
        if case == "tiny":
            assert len(now) == len(before) > 0 and not any("commit" in e for e in now)
        else:
            assert now == [{"commit": old["commit"]} | e for e in before] != []

    def half(path: Path, text: str) -> int:
        write(path, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    assert invoke("--group", "plain", *words).exit_code != 0
    assert json.loads(record.read_text()) == found


def test_own_backends_beside_what_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name only; one that does not take the case says why."""
    monkeypatch.setattr(cases, "BENCH_CPU", {"plain": (TINY,)})
    monkeypatch.setattr(run, "ceilings", lambda clock: {"fp32 matmul": 0.1, "copy": 10.0})
    monkeypatch.setattr(run, "host", lambda device, backend: ("none", []))
    record = tmp_path / "r.json"
    own = "adatom:reference,adatom:deterministic,adatom:hopper"
    result = invoke("--rivals", f"dense,{own}", "--no-verify", "--record", str(record))
    assert result.exit_code == 0, result.output
    found = {(e["contender"], e["pass"]): e for e in json.loads(record.read_text())["entries"]}
    for name in ("adatom", "dense", "adatom:reference", "adatom:deterministic"):
        assert {p for n, p in found if n == name} == {"forward", "backward"}
    assert "needs a Hopper GPU" in found["adatom:hopper", "all"]["reason"]
    assert not any(name.startswith("adatom:") for name in rivals.select("all"))
    assert invoke("--rivals", "adatom:nobody").exit_code == 2


def test_times_without_pauses_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "BENCH_CPU", {"plain": (TINY,)})
    monkeypatch.setattr(timing, "_TURN", 5.0)
    monkeypatch.setattr(run, "ceilings", lambda clock: {"fp32 matmul": 0.1, "copy": 10.0})
    monkeypatch.setattr(run, "host", lambda device, backend: ("none", []))
    record = tmp_path / "r.json"
    words = ("--rivals", "none", "--no-verify", "--record", str(record))
    assert invoke("--steady", *words).exit_code == 0
    kept = record.read_text()
    shown = CliRunner().invoke(app, ["bench", "--tables", str(record)])
    assert json.loads(kept)["steady"] and "Without pauses" in shown.output
    refused = invoke(*words)
    assert refused.exit_code == 2 and "another file" in refused.output and record.read_text() == kept
    assert invoke("--steady", *words).exit_code == 0
    record.unlink()
    assert invoke(*words).exit_code == 0 and "steady" not in json.loads(record.read_text())
    assert invoke("--steady", *words).exit_code == 2
