"""The command line: help, versions, doctor and demo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import pyplot
from typer.testing import CliRunner

import adatom
from adatom import demo, doctor
from adatom.bench import run
from adatom.bench.report import Sheet
from adatom.cli import app
from adatom.device import CPU, Device
from adatom.potential import fit as crystals
from adatom.registry import Row

COMMANDS = ("doctor", "verify", "bench", "compile", "demo")
HOPPER = Device("cuda", 90, 132, 232448)
PASCAL = Device("cuda", 61, 28, 49152)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_help_lists_every_command() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert all(command in result.output for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0 and "Usage" in result.output


def test_version() -> None:
    result = invoke("--version")
    assert result.exit_code == 0 and result.output == f"adatom {adatom.__version__}\n"


def test_unknown_commands_exit_with_2() -> None:
    assert invoke("nonsense").exit_code == 2


def test_starting_the_command_line_loads_neither_triton_nor_matplotlib() -> None:
    code = "import adatom.cli, sys; print([m for m in ('triton', 'matplotlib', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# doctor ------------------------------------------------------------------------------------------------------------


def test_doctor_reports_this_machine() -> None:
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    assert f"torch {torch.__version__}" in result.output
    assert "attention on cpu: forward and backward within" in result.output
    assert "LLM prefill, bf16, causal, D128, GQA" in result.output
    if not torch.cuda.is_available():  # a line for each reason, not for each kernel
        assert "not hopper_tile, hopper_deep, hopper_shared, hopper: needs a Hopper GPU (sm_90)\n" in result.output


def test_doctor_in_json() -> None:
    result = invoke("doctor", "--json")
    assert result.exit_code == 0
    report = json.loads(result.output)
    assert report["versions"]["torch"] == torch.__version__
    assert set(report["rivals"]) >= {"flash_attn_2", "flash_attn_3", "flash_attn_4", "xformers", "cuequivariance"}
    assert len(report["typical"]) == len(doctor.TYPICAL) * len(doctor.ORDERS)
    assert [c["state"] for c in report["checks"] if c["name"].startswith("attention on")] == ["ok"] * (
        len(report["gpus"]) + 1
    )


def test_doctor_exits_with_1_and_a_cure_when_something_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "required", lambda: {"torch": ">=99.1"})
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "adatom needs >=99.1" in result.output and "cure: pip install 'torch>=99.1'" in result.output
    assert invoke("doctor", "--json").exit_code == 1


def test_smoke_notices_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    right = doctor.Attention.apply

    def wrong(*args: Any) -> Any:
        out, lse = right(*args)
        return out * 1.001, lse

    monkeypatch.setattr(doctor.Attention, "apply", wrong)
    check = doctor.smoke(torch.device("cpu"))
    assert check.state == "broken" and "differs from float64 by 1.0e-03" in check.detail and check.cure


def test_smoke_notices_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> Any:
        raise RuntimeError("no kernel image\nstack")

    monkeypatch.setattr(doctor.Attention, "apply", crash)
    assert doctor.smoke(torch.device("cpu")).detail == "RuntimeError: no kernel image"


@pytest.mark.parametrize(
    ("version", "wanted", "good"),
    [
        ("2.13.0+cu130", ">=2.11", True),
        ("2.11.0", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("3.10.0", "<3.10,>=3.6", False),
        ("3.9.2", "<3.10,>=3.6", True),
        ("3.6", ">=3.6.0", True),
        ("3.12.1", "", True),
        ("2.12.0.dev20260101", "!=2.12", False),
    ],
)
def test_version_ranges(version: str, wanted: str, good: bool) -> None:
    assert doctor.within(version, wanted) is good


def test_versions_are_checked_against_what_is_declared() -> None:
    checks = doctor.check_versions(
        {"python": "3.8.1", "triton": None, "torch": "2.13.0"},
        {"python": ">=3.10", "triton": ">=3.6", "torch": ">=2.11"},
    )
    assert [(c.name, c.state) for c in checks] == [("python version", "broken"), ("torch version", "ok")]
    assert checks[0].cure == "use a Python >=3.10"


@pytest.mark.parametrize(
    ("cuda", "available", "hardware", "driver", "triton", "states", "cure"),
    [
        (None, False, False, None, None, ["note"], ""),
        (None, False, True, "580.1", None, ["broken"], "CUDA build of torch"),
        ("13.0", False, False, None, "3.6", ["note"], ""),
        ("13.0", False, True, None, "3.6", ["broken"], "install NVIDIA's driver"),
        ("13.0", False, True, "470.1", "3.6", ["broken"], "update NVIDIA's driver"),
        ("13.0", True, True, "580.1", None, ["ok", "broken"], "pip install triton"),
        ("13.0", True, True, "580.1", "3.6", ["ok"], ""),
    ],
)
def test_torch_driver_and_triton_must_fit(
    cuda: str | None,
    available: bool,
    hardware: bool,
    driver: str | None,
    triton: str | None,
    states: list[str],
    cure: str,
) -> None:
    checks = doctor.check_cuda(cuda, available, hardware, driver, triton, "too old")
    assert [c.state for c in checks] == states
    assert cure in checks[-1].cure and bool(cure) == bool(checks[-1].cure)


def test_old_gpus_are_named() -> None:
    found = [{"index": i, "name": "GPU", "arch": arch} for i, arch in enumerate(("sm_75", "sm_80", "sm_120"))]
    checks = doctor.check_arch(found)
    assert [(c.name, c.state) for c in checks] == [("cuda:0", "broken")] and "sm_80" in checks[0].detail


@pytest.mark.parametrize("device", [CPU, HOPPER, PASCAL], ids=("cpu", "sm_90", "sm_61"))
def test_typical_problems_have_a_kernel_and_reasons(device: Device) -> None:
    rows = doctor.typical(device)
    assert {row["problem"] for row in rows} == {case.name for case in doctor.TYPICAL}
    assert all(row["runs"] for row in rows)
    forward = next(row for row in rows if row["pass"] == "forward")
    assert (forward["runs"] == "hopper") is (device is HOPPER)
    if device is PASCAL:
        assert "sm_61" in forward["faster"][0]["unfit"]


def test_the_machine_without_nvidia_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    monkeypatch.setattr(
        doctor.Path, "read_text", lambda self: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.9.1  x"
    )
    assert doctor.driver() == "580.9.1"


# demo --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small lengths and few steps."""
    monkeypatch.setitem(demo.SIZES, "cpu", (16, 32))
    monkeypatch.setattr(demo, "STEPS", 3)
    monkeypatch.setattr(demo, "CRYSTAL_SECONDS", {"cpu": 4.0})


def test_demo_writes_a_self_contained_report(tmp_path: Path, short: None) -> None:
    out = tmp_path / "deep" / "report.html"
    result = invoke("demo", "--device", "cpu", "--out", str(out))
    assert result.exit_code == 0, result.output
    text = out.read_text()
    assert text.count("<svg") == 3 and "every check passed" in text and "d loss / d bias0" in text
    assert "<script" not in text and "src=" not in text and "@import" not in text
    assert "unknown crystals" in result.output and "KCl, by DFT" in text
    assert "force error fell from" in result.output and "sdpa_math" in result.output


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_demo_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(demo.SIZES, "cuda", (64, 128))
    result = invoke("demo", "--device", "cuda", "--out", str(tmp_path / "r.html"))
    assert result.exit_code == 0, result.output
    assert torch.cuda.get_device_name() in (tmp_path / "r.html").read_text()


def test_demo_fails_when_a_derivative_is_wrong(tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def once_differentiable(*args: torch.Tensor) -> torch.Tensor:  # the bias's second derivative is lost
        return demo.dense(*args[:3], args[3].detach() + (args[3] - args[3].detach()) * 1.01)

    assert not all(e.ok for e in demo.accuracy(torch.device("cpu"), once_differentiable))
    monkeypatch.setattr(demo, "accuracy", lambda device: [demo.Accuracy("forces", 1e-2, 1e-7)])
    result = invoke("demo", "--device", "cpu", "--out", str(tmp_path / "r.html"))
    assert result.exit_code == 1 and "failed: forces" in result.output
    assert "a check failed" in (tmp_path / "r.html").read_text()


def test_nan_is_not_accurate() -> None:
    assert not demo.Accuracy("energy", float("nan"), 1e-7).ok
    assert demo.Accuracy("energy", 2e-7, 1e-7).ok


def test_forces_are_the_derivative_of_the_energy() -> None:
    p = {name: value.detach().double() for name, value in demo.parameters(torch.device("cpu")).items()}
    x = demo.positions(torch.device("cpu")).double()
    push = torch.randn_like(x)
    _, f = demo.forces(x, p, demo.ours)
    change = (demo.energy(x + 1e-5 * push, p, demo.ours) - demo.energy(x - 1e-5 * push, p, demo.ours)).sum() / 2e-5
    torch.testing.assert_close(change, -(f * push).sum(), rtol=1e-6, atol=1e-8)


def test_fitting_lowers_the_error() -> None:
    losses = demo.fit(torch.device("cpu"), seconds=5.0).losses
    assert losses[-1] < losses[0]


def test_demo_refuses_an_absent_device() -> None:
    result = invoke("demo", "--device", "cuda" if not torch.cuda.is_available() else "xla")
    assert result.exit_code == 2 and "no device" in result.output


def test_demo_refuses_a_folder_for_its_report(tmp_path: Path) -> None:
    """Before it fits for a minute."""
    result = invoke("demo", "--device", "cpu", "--out", str(tmp_path))
    assert result.exit_code == 2 and "is a directory" in result.output


def test_demo_names_crystals_in_the_plot_as_in_the_table() -> None:
    errors = dict.fromkeys(crystals.SPLITS[1:], crystals.Errors(*[1.0] * len(crystals.Errors._fields)))
    pairs = dict.fromkeys(errors, (torch.zeros(2, 3), torch.zeros(2, 3)))
    found = demo.Crystals(1, crystals.State(1, [], [(0, 1.0, 1.0)], {}), errors, errors, pairs)
    _, right = demo._crystal_plot(pyplot, found).axes
    pyplot.close()
    assert [text.get_text() for text in right.get_legend().get_texts()] == [row[0] for row in demo.crystal_rows(found)]


def test_verify_refuses_a_device_that_it_has_no_kernels_for() -> None:
    result = invoke("verify", "--shape", "1,1,8,8", "--device", "meta")
    assert result.exit_code == 2 and "no device meta" in result.output


def test_a_page_escapes_what_it_shows() -> None:
    text = demo.page([("a", "<b>")], [], [], [], Sheet("t", ["case"], [["<i>"]], []), ["<svg/>"] * 3, "<GPU>")
    assert "<b>" not in text and "<i>" not in text and "&lt;GPU&gt;" in text


def test_the_chosen_rows_are_registry_rows() -> None:
    problem = run.Problem(doctor.SMOKE, torch.device("cpu"))
    rows = run.chosen(doctor.SMOKE, problem.given, ("forward", "backward"))
    assert list(rows) == ["forward", "backward"] and all(isinstance(row, Row) for row in rows.values())
