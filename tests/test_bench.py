"""`adatom bench`: its clock, its rivals, its gate, its tables."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from adatom import device, evidence, registry
from adatom.bench import report, run, timing
from adatom.bench import rivals as contests
from adatom.bench import rivals_attention as rivals
from adatom.cli import app
from adatom.compat import flash_attn as compat
from adatom.ops.attention import cases
from adatom.ops.attention.cases import BF16, F32, Case

CPU = torch.device("cpu")
H100 = device.Device("cuda", 90, 132, 232448)
TINY = Case("tiny", 1, 2, 2, 24, 24, 16, 16, F32)
BIASED = Case("biased", 2, 2, 2, 17, 23, 8, 8, F32, bias="1hqk")
EVERY_OPTION = Case(
    "options", *(2, 4, 2, 17, 23, 8, 8, F32), bias="1h1k", causal=True, window=(9, None), softcap=3.0, kv_lens=True
)


@pytest.fixture
def small_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"plain": (TINY, TINY._replace(name="second tiny")), "bias": (BIASED,), "second": (BIASED,)}
    monkeypatch.setattr(cases, "BENCH_CPU", groups)
    for op in registry.PASSES:
        if op != "attention":
            monkeypatch.setattr(registry.part(op, "cases"), "BENCH_CPU", {})


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ceilings, short host timings."""
    monkeypatch.setattr(run, "ceilings", lambda clock: {"fp32 matmul": 0.1, "copy": 10.0})
    monkeypatch.setattr(run, "host_microseconds", lambda calls, device: timing.host_microseconds(calls, device, 2))


# rivals ------------------------------------------------------------------------------------------------------------


def test_absent_rivals_say_so_and_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    present = rivals.RIVALS[0]
    absent = contests.Rival("ghost", ("no-such-package-anywhere",), rivals.RIVALS[0].bind, lambda case, group: True)
    assert contests.installed(absent) == (None, "not installed")
    monkeypatch.setattr(rivals, "RIVALS", (absent,))
    assert run.wanted(TINY, "plain", ("ghost",), by_name=True) == {}
    assert contests.installed(present)[0] == torch.__version__


def test_rivals_are_chosen_by_name() -> None:
    assert contests.select("none") == ()
    assert set(contests.select("all")) >= {r.name for r in rivals.RIVALS}
    assert contests.select("dense, sdpa_math") == ("dense", "sdpa_math")
    with pytest.raises(ValueError, match="no rival flash_attn_9; there are: sdpa_flash"):
        contests.select("flash_attn_9")
    assert {"flash_attn_2", "flash_attn_3", "flash_attn_4", "xformers", "cuequivariance"} < {
        r.name for r in rivals.RIVALS
    }


@pytest.mark.parametrize("case", [TINY, BIASED, EVERY_OPTION], ids=lambda case: case.name)
def test_dense_by_hand_computes_what_adatom_does(case: Case) -> None:
    given = cases.make(case, CPU)
    if "kv_lens" in given:
        given["kv_lens"] = torch.tensor([20, 23], dtype=torch.int32)  # no row without a key: by hand it would be NaN
    plain = [given[name] for name in ("q", "k", "v", "bias") if name in given]
    bind = next(r.bind for r in rivals.RIVALS if r.name == "dense")
    wanted = run.ours(case, given)(*plain)
    torch.testing.assert_close(bind(case, given)(*plain), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_math"])
@pytest.mark.parametrize("case", [TINY, TINY._replace(causal=True), TINY._replace(heads=4), BIASED], ids=str)
def test_sdpa_computes_what_adatom_does(name: str, case: Case) -> None:
    given = cases.make(case, CPU)
    plain = [given[n] for n in ("q", "k", "v", "bias") if n in given]
    bind = next(r.bind for r in rivals.RIVALS if r.name == name)
    torch.testing.assert_close(bind(case, given)(*plain), run.ours(case, given)(*plain), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"softcap": 2.0}, "no softcap"),
        ({"window": (3, 0)}, "no window"),
        ({"sinks": True}, "no sinks"),
        ({"kv_lens": True}, "no kv lens"),
        ({"causal": True, "seqlen_k": 30}, "causal only without a bias and with equal lengths"),
    ],
)
def test_what_sdpa_cannot_do_is_refused_in_words(change: dict[str, Any], why: str) -> None:
    case = TINY._replace(**change)
    with pytest.raises(contests.Unfit, match=why):
        rivals._sdpa(None)(case, cases.make(case, CPU))


def dense(case: Case, given: dict[str, Any]) -> run.Call:
    return next(r.bind for r in rivals.RIVALS if r.name == "dense")(case, given)


def bound(name: str, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rival and adatom compute on a case."""
    given = cases.make(case, CPU)
    if "kv_lens" in given:
        given["kv_lens"] = torch.tensor([20, 23], dtype=torch.int32)
    plain = [given[n] for n in ("q", "k", "v", "bias") if n in given]
    call = next(r.bind for r in rivals.RIVALS if r.name == name)(case, given)
    return call(*plain), run.ours(case, given)(*plain)


@pytest.mark.parametrize(
    "case", [TINY._replace(causal=True, heads=4), BIASED, EVERY_OPTION], ids=lambda case: case.name
)
@pytest.mark.filterwarnings("ignore")
def test_flex_attention_is_asked_the_same_question(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(rivals, "_needs_gpu", lambda given: None)
    monkeypatch.setattr(rivals, "_compiled_flex", lambda: flex_attention)
    got, wanted = bound("flex_attention", case)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def fake_flash_attn(unbounded: int | None, tuples: bool) -> Any:
    """flash-attn's two functions, by adatom's stand-in for them."""

    def window(size: tuple[int | None, int | None]) -> tuple[int, int]:
        assert all(w == unbounded or (w is not None and w >= 0) for w in size)
        left, right = (-1 if w is None else w for w in size)
        return left, right

    def padded(q: Any, k: Any, v: Any, *, window_size: Any = (unbounded, unbounded), **options: Any) -> Any:
        assert q.shape[:2] == (2, 24)  # (batch, length, heads, dim)
        out = compat.flash_attn_func(q, k, v, window_size=window(window_size), **options)
        return (out, None) if tuples else out

    def packed(q: Any, k: Any, v: Any, *, window_size: Any = (unbounded, unbounded), **options: Any) -> Any:
        out = compat.flash_attn_varlen_func(q, k, v, window_size=window(window_size), **options)
        return (out, None) if tuples else out

    return types.SimpleNamespace(flash_attn_func=padded, flash_attn_varlen_func=packed)


@pytest.mark.parametrize("name", ["flash_attn_2", "flash_attn_3", "flash_attn_4"])
@pytest.mark.parametrize("varlen", [False, True], ids=["padded", "packed"])
def test_flash_attn_is_asked_the_same_question(name: str, varlen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = {"flash_attn_2": "flash_attn", "flash_attn_3": "flash_attn_interface", "flash_attn_4": "flash_attn.cute"}[
        name
    ]
    four = name == "flash_attn_4"
    fake = fake_flash_attn(None if four else -1, tuples=four)
    monkeypatch.setattr(rivals, "_needs_gpu", lambda given: None)
    monkeypatch.setitem(sys.modules, module, fake)
    case = Case("flash", 2, 4, 2, 24, 24, 16, 16, F32, varlen=varlen, causal=True, window=(7, None), softcap=5.0)
    monkeypatch.setattr(rivals, "_refuse", lambda case, **does: None)  # float32, so that rounding hides nothing
    got, wanted = bound(name, case)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_cuequivariance_is_asked_the_same_question(monkeypatch: pytest.MonkeyPatch) -> None:
    def triangle(q: Any, k: Any, v: Any, bias: Any, scale: float) -> Any:
        assert q.dim() == 5 and bias.shape == (1, 1, 2, 17, 23)  # (B, N, H, Q, D), (B, 1, H, Q, K)
        return torch.softmax(q @ k.mT * scale + bias, -1) @ v

    monkeypatch.setattr(rivals, "_needs_gpu", lambda given: None)
    fake = types.SimpleNamespace(triangle_attention=triangle)
    monkeypatch.setitem(sys.modules, "cuequivariance_torch", fake)
    got, wanted = bound("cuequivariance", BIASED)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(contests.Unfit, match="triangle attention"):
        bound("cuequivariance", BIASED._replace(bias="b11k"))


@pytest.mark.parametrize("case", [TINY._replace(causal=True, heads=4, kv_heads=2), BIASED], ids=lambda case: case.name)
def test_xformers_is_asked_the_same_question(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Any, k: Any, v: Any, attn_bias: Any, scale: float) -> Any:
        q, k, v = (x.flatten(2, -2).transpose(1, 2) for x in (q, k, v))  # (batch, length, [kv heads, groups], dim)
        scores = q @ k.mT * scale
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, float("-inf")) if case.causal else scores
        out = (torch.softmax(scores if case.causal else scores + attn_bias, -1) @ v).transpose(1, 2)
        return out.unflatten(2, (2, 2)) if case.heads != case.kv_heads else out

    mask = types.SimpleNamespace(LowerTriangularFromBottomRightMask=object)
    fake = types.SimpleNamespace(memory_efficient_attention=attend, fmha=types.SimpleNamespace(attn_bias=mask))
    monkeypatch.setattr(rivals, "_needs_gpu", lambda given: None)
    monkeypatch.setitem(sys.modules, "xformers.ops", fake)
    got, wanted = bound("xformers", case)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


# comparing ---------------------------------------------------------------------------------------------------------


def compare(case: Case, group: str, **contenders: contests.Bind) -> list[dict[str, Any]]:
    peaks = {"fp32 matmul": 0.1, "copy": 10.0}
    return run.compare(run.Problem(case, CPU), group, contenders, timing.Clock(CPU), peaks, milliseconds=1.0)


def test_second_derivatives_are_timed_in_three_passes() -> None:
    entries = compare(BIASED, "second", dense=dense)
    assert [(e["contender"], e["pass"]) for e in entries] == [
        (name, kind) for name in ("adatom", "dense") for kind in ("forward", "backward", "double backward")
    ]
    for e in entries:
        assert e["ms"] > 0 and e["tflops"] > 0 and e["gbps"] > 0 and 0 < e["share"] and e["peak_bytes"] > 0
        assert e["spread"][0] <= e["ms"] <= e["spread"][1] and e["bound"] in ("flops", "bytes")


def test_a_rival_that_computes_something_else_gets_no_time() -> None:
    def wrong(case: Case, given: dict[str, Any]) -> run.Call:
        return lambda q, k, v, bias=None: run.ours(case, given)(q, k, v) * 1.1

    def explodes(case: Case, given: dict[str, Any]) -> run.Call:
        raise RuntimeError("unsupported on Tuesdays\nand a stack trace")

    def more(case: Case, given: dict[str, Any]) -> run.Call:
        return lambda q, k, v, bias=None: (run.ours(case, given)(q, k, v), q)

    entries = compare(TINY, "plain", wrong=wrong, explodes=explodes, more=more)
    reasons = {e["contender"]: e["reason"] for e in entries if "reason" in e}
    assert reasons["wrong"].startswith("its result differs from adatom's by 1.0e-01")
    assert reasons["more"] == "it returns 2 tensors, adatom 1"
    assert reasons["explodes"] == "RuntimeError: unsupported on Tuesdays"
    assert {e["contender"] for e in entries if "ms" in e} == {"adatom"}


def test_a_pass_that_fails_is_a_reason_for_that_pass() -> None:
    def forward_only(case: Case, given: dict[str, Any]) -> run.Call:
        return lambda q, k, v, bias=None: run.ours(case, given)(*(x.detach() for x in (q, k, v)))

    entries = [e for e in compare(TINY, "plain", forward_only=forward_only) if e["contender"] == "forward_only"]
    assert {e["pass"]: "ms" in e for e in entries} == {"forward": True, "backward": False}


def test_one_query_is_timed_forward_only() -> None:
    assert run.passes("decode", TINY._replace(seqlen_q=1)) == ("forward",)


def test_the_ceiling_is_that_of_the_arithmetic() -> None:
    peaks = {"bf16 matmul": 700.0, "TF32 matmul": 350.0, "fp32 matmul": 50.0, "copy": 3000.0}
    big = Case("", 1, 16, 16, 8192, 8192, 128, 128, BF16)
    ms = cases.flops(big, "attention_fwd") / 700.0 / 1e9
    assert run.speed(big, "forward", ms, peaks)["share"] == pytest.approx(1.0)
    assert run.speed(big, "forward", ms, peaks)["tflops"] == pytest.approx(700.0)
    single = big._replace(dtype=F32)
    assert run.speed(single, "forward", 2 * ms, peaks)["share"] == pytest.approx(1.0)
    assert run.speed(single._replace(precision="ieee"), "forward", 14 * ms, peaks)["share"] == pytest.approx(1.0)
    assert run.speed(big._replace(seqlen_q=1), "forward", 1.0, peaks)["bound"] == "bytes"


def test_a_kernel_that_fails_verify_shows_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.unproven(run.Problem(TINY, CPU), "plain") is None
    monkeypatch.setattr(run.verify, "passes", lambda case, row, device: row.op != "attention_bwd")
    why = run.unproven(run.Problem(TINY, CPU), "plain")
    assert why is not None and why.startswith("the backward of ") and why.endswith("fails `adatom verify`")
    monkeypatch.setattr(run.verify, "passes", lambda case, row, device: None)
    unfit = run.unproven(run.Problem(TINY, CPU), "plain")
    assert unfit is not None and unfit.endswith("is in no evidence, and takes no small case")
    problem = run.Problem(TINY, CPU)
    entries = run.compare(problem, "plain", {}, timing.Clock(CPU), {"fp32 matmul": 1, "copy": 1}, 1.0, refused=why)
    assert entries == [{"group": "plain", "case": "tiny", "contender": "adatom", "pass": "all", "reason": why}]


def test_evidence_of_the_present_code_stands_for_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = registry.rows("attention_fwd")[0]
    proof = evidence.Proof(row.op, row.backend, evidence.code_hash(row.target), 9, 0.5, "case", "out")
    evidence.write(tmp_path / "gpu.json", {"arch": "sm_90"}, [proof])
    evidence.write(tmp_path / "old.json", {"arch": "sm_80"}, [proof._replace(hash="of other code")])
    monkeypatch.setattr(evidence, "DIRECTORY", tmp_path)
    monkeypatch.setattr(evidence, "read", partial(evidence.read, tmp_path))
    recorded = run._recorded.__wrapped__
    assert recorded(row, 90) and not recorded(row, 80) and not recorded(row, 100)
    assert not recorded(registry.rows("attention_fwd")[-1], 90)  # not a GPU kernel


def test_a_kernel_that_differs_at_full_size_shows_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.verify, "passes", lambda case, row, device: True)
    monkeypatch.setattr(evidence, "on_gpu", lambda target: True)
    assert run.unproven(run.Problem(BIASED, CPU), "second") is None
    right = run.ours

    def wrong(case: Case, given: dict[str, Any], backend: str | None = None) -> run.Call:
        off = 0.0 if backend == "torch_chunked" else 0.01
        return lambda q, k, v, bias=None: right(case, given)(q, k, v + off * (v - v.detach()), bias)  # dv alone is off

    monkeypatch.setattr(run, "ours", wrong)
    assert (
        run.unproven(run.Problem(BIASED, CPU), "bias") == "dv differs from the PyTorch path's by 1.0e-02 at full size"
    )


def test_host_time_is_given_beside_that_of_sdpa(cheap: None) -> None:
    problem, entries = run.host(CPU)
    assert problem == "attention (1, 1, 8, 8) float32"
    assert [e["contender"] for e in entries] == ["adatom", "sdpa"]
    assert all(e["without_grad"] > 0 and e["with_grad"] > 0 for e in entries)


# the command -------------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "--device", "cpu", *arguments], env={"COLUMNS": "200"})


def test_bench_records_what_it_prints(tmp_path: Path, small_cases: None, cheap: None) -> None:
    record, picture = tmp_path / "results" / "cpu.json", tmp_path / "plot.svg"
    result = invoke("--quick", "--record", str(record), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    found = json.loads(record.read_text())
    assert {"device", "versions", "date", "commit", "ceilings", "host", "entries"} <= set(found)
    assert {e["group"] for e in found["entries"]} == {"plain", "bias", "second"}
    assert {e["case"] for e in found["entries"]} == {"tiny", "biased"}  # the first of each group
    timed = {(e["group"], e["contender"]) for e in found["entries"] if "ms" in e}
    assert {("plain", "adatom"), ("plain", "sdpa_flash"), ("second", "dense"), ("bias", "sdpa_math")} <= timed
    assert ("plain", "dense") not in timed  # quadratic ones only where they are what one would use
    assert re.search(r"\bflash_attn_4\b.*: not installed\n", result.output)
    assert "sdpa_cudnn: needs a GPU" in result.output
    assert picture.read_text().count("<svg") == 1
    again = invoke("--tables", str(record))
    assert again.exit_code == 0 and again.output == report.tables(found)


def test_only_the_asked_for_is_run(tmp_path: Path, small_cases: None, cheap: None) -> None:
    record = tmp_path / "r.json"
    result = invoke("--group", "plain", "--rivals", "dense", "--no-verify", "--record", str(record))
    assert result.exit_code == 0, result.output
    entries = json.loads(record.read_text())["entries"]
    assert {(e["group"], e["case"]) for e in entries} == {("plain", "tiny"), ("plain", "second tiny")}
    assert {e["contender"] for e in entries} == {"adatom", "dense"}


def test_cases_are_chosen_by_name(tmp_path: Path, small_cases: None, cheap: None) -> None:
    record = tmp_path / "r.json"
    words = ("--case", "second t", "--case", "bias", "--group", "plain", "--group", "bias")
    result = invoke(*words, "--rivals", "none", "--no-verify", "--record", str(record))
    assert result.exit_code == 0, result.output
    found = json.loads(record.read_text())["entries"]
    assert {(e["group"], e["case"]) for e in found} == {("plain", "second tiny"), ("bias", "biased")}
    result = invoke(*words, "--quick", "--rivals", "none", "--no-verify", "--record", str(record))
    assert result.exit_code == 0 and "second tiny" in result.output
    record.unlink()
    result = invoke("--case", "tiny", "--rivals", "none", "--no-verify", "--record", str(record))
    assert result.exit_code == 0 and {e["case"] for e in json.loads(record.read_text())["entries"]} == {"tiny"}
    result = invoke("--case", "third")
    assert result.exit_code == 2 and "no case with third; there are: tiny, second tiny, biased" in result.output


def test_a_record_keeps_the_groups_that_do_not_run_again(tmp_path: Path, small_cases: None, cheap: None) -> None:
    record = tmp_path / "r.json"
    for group in ("plain", "bias", "plain"):
        result = invoke("--group", group, "--rivals", "none", "--no-verify", "--record", str(record))
        assert result.exit_code == 0, result.output
    entries = json.loads(record.read_text())["entries"]
    assert {(e["group"], "commit" in e) for e in entries} == {("plain", False), ("bias", True)}
    record.write_text(json.dumps({**json.loads(record.read_text()), "device": "another"}))
    before = record.read_text()
    result = invoke("--group", "plain", "--rivals", "none", "--no-verify", "--record", str(record))
    assert result.exit_code == 2 and "name another file" in result.output
    assert record.read_text() == before


def test_a_record_keeps_what_a_run_did_not_measure() -> None:
    entry = {"group": "plain", "case": "tiny", "contender": "adatom", "pass": "forward", "ms": 1.0}
    about = {"device": "x", "kind": "cpu", "versions": {"torch": "2", "rival": None}, "commit": "old"}
    old = {**about, "host": [{"contender": "adatom"}], "host_case": "attention", "slowed": {"plain": "hot"}}
    new = {**about, "versions": {"torch": "2"}, "commit": "new", "host": [], "host_case": ""}
    both = run.merged({**old, "entries": [entry]}, {**new, "entries": [{**entry, "group": "bias"}]})
    assert both["host"] == old["host"] and both["host_case"] == "attention, commit old"
    assert both["slowed"] == {"plain": "hot"} and len(both["entries"]) == 2
    assert "slowed" not in run.merged({**old, "entries": [entry]}, {**new, "entries": [entry]})


def test_no_case_starts_after_the_budget(tmp_path: Path, small_cases: None, cheap: None) -> None:
    record = tmp_path / "r.json"
    result = invoke("--budget", "0", "--record", str(record))
    assert result.exit_code == 0 and "not run, 0 s were up" in result.output
    assert json.loads(record.read_text())["skipped"] == [
        "plain tiny",
        "plain second tiny",
        "bias biased",
        "second biased",
    ]


def test_a_backend_that_cannot_run_fails_in_words(small_cases: None, cheap: None) -> None:
    result = invoke("--group", "plain", "--quick", "--backend", "triton", "--rivals", "none")
    assert result.exit_code == 1
    assert "needs a CUDA device" in result.output


def test_deterministic_rows_can_be_asked_for(small_cases: None, cheap: None) -> None:
    result = invoke("--group", "plain", "--quick", "--backend", "deterministic", "--rivals", "none")
    assert result.exit_code == 0, result.output
    case = Case("long", *(2, 16, 16, 2048, 2048, 64, 64, BF16))
    given = {name: torch.empty(2, 16, 2048, 64, dtype=BF16, device="meta") for name in ("q", "k", "v")}
    with device.pretend(H100):
        rows = [run.chosen(case, given, ("forward", "backward"), b)["backward"] for b in (None, "deterministic")]
    assert [(row.backend, row.deterministic) for row in rows] == [("hopper", False), ("hopper_ordered", True)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--group", "nonsense"), "no group nonsense"),
        (("--group", "plain", "--quick", "--case", "nonsense"), "no case with nonsense"),
        (("--rivals", "nonsense"), "no rival nonsense"),
        (("--backend", "nonsense"), "no backend 'nonsense'"),
        (("--device", "tpu"), "tpu"),
        (("nonsense",), "no op 'nonsense'"),
        (("--plot", "plot.pdf"), ".svg or .png"),
        (("--tables", str(Path(__file__))), "holds no results"),
        (("--record", str(Path(__file__)), "norm"), "holds no results"),
    ],
)
def test_bad_arguments_exit_with_2(arguments: tuple[str, ...], says: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2 and says in result.output


@pytest.mark.parametrize("content", ["", "7", "[]", '{"entries": [], "ceilings": {}}'])
def test_files_that_hold_no_results(content: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(content)
    result = invoke("--tables", str(file))
    assert result.exit_code == 2 and "holds no results" in result.output


# tables ------------------------------------------------------------------------------------------------------------


def entry(group: str, kind: str, contender: str, ms: float, **more: Any) -> dict[str, Any]:
    known = {"tflops": 1000 / ms, "gbps": 10 / ms, "bound": "flops", "share": 0.5 / ms, "peak_bytes": 2_500_000}
    return {
        "group": group,
        "case": "S64",
        "pass": kind,
        "contender": contender,
        "ms": ms,
        "spread": [ms, ms],
        **known,
        **more,
    }


RECORD: dict[str, Any] = {
    "device": "NVIDIA Test GPU",
    "kind": "cuda",
    "versions": {"python": "3.12", "torch": "2.13.0", "triton": None},
    "date": "2026-01-02",
    "commit": "abc",
    "ceilings": {"bf16 matmul": 700.0, "copy": 3000.0},
    "host_case": "(1, 8, 128, 64) bfloat16",
    "host": [{"contender": "adatom", "without_grad": 25.04, "with_grad": None}],
    "entries": [
        entry("plain", "forward", "adatom", 2.0, row="triton"),
        entry("plain", "forward", "sdpa_flash", 4.0),
        {"group": "plain", "case": "S64", "pass": "all", "contender": "xformers", "reason": "needs | pipes"},
        entry("second", "forward", "adatom", 1.0),
        entry("second", "backward", "adatom", 2.0),
        entry("second", "forward", "sdpa_math", 20.0, peak_bytes=5_000_000_000),
        entry("second", "backward", "sdpa_math", 10.0, peak_bytes=None),
    ],
}


def test_tables_of_a_record() -> None:
    text = report.tables(RECORD)
    assert text.startswith("NVIDIA Test GPU; python 3.12, torch 2.13.0; 2026-01-02, commit abc.\n")
    assert "bf16 matmul 700 TFLOP/s, copy 3000 GB/s" in text
    assert "| case | adatom | sdpa_flash | of ceiling | beside best rival |" in text
    assert "| S64 | **500** | 250 | 25 % | 2.00x |" in text
    assert "- xformers: needs | pipes" in text
    assert "| S64 | **3.00 ms** (1.00 + 2.00), 2.5 MB | 30.0 ms (20.0 + 10.0), 5.00 GB | 10.00x |" in text
    assert "| adatom | 25.0 | - |" in text


def test_cases_that_did_not_run_again_keep_their_numbers_and_their_commit() -> None:
    again = {**RECORD, "commit": "def", "entries": [entry("plain", "forward", "adatom", 1.0)]}
    both = run.merged(RECORD, again)
    assert (
        sorted((e["group"], e.get("commit", "")) for e in both["entries"]) == [("plain", "")] + [("second", "abc")] * 4
    )
    assert both["commit"] == "def" and [e["ms"] for e in both["entries"] if e["group"] == "plain"] == [1.0]
    assert "From a run at commit abc, with ceilings of its own: second.\n" in report.tables(both)
    entries = [e | ({"commit": "ghi"} if e["pass"] == "backward" else {}) for e in both["entries"]]
    text = report.tables({**both, "entries": entries})
    assert "From a run at commit abc, with ceilings of its own: second S64 forward.\n" in text
    assert "From a run at commit ghi, with ceilings of its own: second S64 backward.\n" in text
    third = run.merged(both, {**RECORD, "commit": "ghi", "entries": []})
    assert sorted(e["commit"] for e in third["entries"]) == ["abc"] * 4 + ["def"]
    rival = {"versions": {**RECORD["versions"], "rival": "1.0"}}
    assert run.merged({**RECORD, **rival}, again)["versions"]["rival"] == "1.0"
    assert run.merged(RECORD, {**again, **rival})["versions"]["rival"] == "1.0"
    with pytest.raises(ValueError, match="name another file"):
        run.merged({**RECORD, **rival}, {**again, "versions": {**RECORD["versions"], "rival": "2.0"}})
    for other in ({"device": "NVIDIA Other GPU"}, {"versions": {"python": "3.13"}}):
        with pytest.raises(ValueError, match="name another file"):
            run.merged(RECORD, {**again, **other})


def test_bytes_bound_cells_are_bandwidths() -> None:
    entries = [entry("decode", "forward", "adatom", 2.0, bound="bytes")]
    assert "| S64 | **5.00 GB/s** | 25 % | - |" in report.tables({**RECORD, "entries": entries})


def test_a_cpu_record_speaks_of_gflops() -> None:
    text = report.tables({**RECORD, "kind": "cpu", "entries": [entry("plain", "forward", "adatom", 2e4)]})
    assert "plain: forward, GFLOP/s" in text and "| S64 | **50.0** |" in text


def test_a_contender_that_failed_one_pass_has_no_whole_step() -> None:
    entries = [
        entry("second", "forward", "dense", 1.0),
        {"group": "second", "case": "S64", "pass": "backward", "contender": "dense", "reason": "no"},
        entry("second", "forward", "adatom", 5.0),
    ]
    sheet = report.sheets({**RECORD, "entries": entries}, "second")[0]
    assert sheet.header == ["case", "adatom", "beside best"] and sheet.rows[0][-1] == "-"
    assert sheet.notes == ["dense: no"]


def test_plots_are_written_in_both_formats(tmp_path: Path) -> None:
    for name, start in (("new/a.svg", b"<?xml"), ("a.png", b"\x89PNG")):
        report.plot(RECORD, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)


# on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bench_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = Case("half", 2, 4, 4, 512, 512, 64, 64, BF16)
    groups = {
        "plain": (half,),
        "bias": (half._replace(bias="1hqk"),),
        "second": (half,),
        "varlen": (half._replace(varlen=True),),
    }
    monkeypatch.setattr(cases, "BENCH", groups)
    record = tmp_path / "gpu.json"
    result = CliRunner().invoke(app, ["bench", "attention", "--quick", "--record", str(record)])
    assert result.exit_code == 0, result.output
    found = json.loads(record.read_text())
    assert {"bf16 matmul", "TF32 matmul", "fp32 matmul", "copy"} == set(found["ceilings"])
    timed = {(e["group"], e["contender"]) for e in found["entries"] if "ms" in e}
    assert {(group, "adatom") for group in groups} | {("plain", "sdpa_flash"), ("second", "sdpa_math")} <= timed
    assert all(e["row"].startswith("triton") for e in found["entries"] if "ms" in e and e["contender"] == "adatom")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_memory_on_a_gpu() -> None:
    def job() -> Iterator[str]:
        torch.zeros(1 << 20, device="cuda")
        yield "step"

    assert 4 << 20 <= timing.peak_bytes(job, torch.device("cuda")) < 6 << 20  # the allocator rounds up


def test_cotangents_of_inputs_that_fill_the_device(monkeypatch):
    """They lie half a batch further on, where inputs of one shape lie one behind another."""
    case = Case("large", 4, 2, 2, 8, 8, 4, 4, torch.float32, bias="b11k")
    apart = run.Problem(case, torch.device("cpu"))
    monkeypatch.setattr(run, "_memory", lambda device: 1)
    p = run.Problem(case, torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(p.plain, apart.plain))
    q, k, v, bias = p.plain
    dq, dk, dv, dbias = p.cotangents
    assert torch.equal(dq, torch.cat([q, k])[2:6]) and torch.equal(dk, torch.cat([k, v])[2:6])
    assert torch.equal(dv, torch.cat([v, q])[2:6]) and dbias.shape == bias.shape
    (dout,) = p.douts(q)
    assert torch.equal(dout, torch.cat([q, k])[1:5])
    span = {q.data_ptr() + i * q.nbytes for i in range(3)}
    assert span == {q.data_ptr(), k.data_ptr(), v.data_ptr()} and q.data_ptr() < dout.data_ptr() < k.data_ptr()
    order = ("forward", "backward", "double backward")
    found = p.results(run.ours(case, p.given), order)
    assert all(x.isfinite().all() for x in found.values())
