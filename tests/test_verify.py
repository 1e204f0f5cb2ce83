"""The judge itself: what it covers, what it measures, and the command that runs it."""

from __future__ import annotations

import math
import os
import queue
import subprocess
import sys
import threading

import pytest
import torch
import typer
from typer.testing import CliRunner

from adatom import evidence, registry, verify
from adatom.ops.attention import cases, reference
from adatom.ops.attention.api import inputs_of
from adatom.ops.attention.case import lengths
from adatom.ops.attention.cases import BENCH, BENCH_CPU, GPU, QUICK, SMALL, Case
from adatom.ops.attention.trial import COMPILE, OUTPUTS, Trial, _EmulateTF32, shrunk
from adatom.verify import round_tf32

CPU = torch.device("cpu")
F32 = torch.float32
PLAIN = Case("plain", 2, 2, 1, 9, 11, 8, 8, F32)
app = typer.Typer()
app.command()(verify.command)


def invoke(*arguments: str):
    return CliRunner().invoke(app, [*arguments, "--device", "cpu"], env={"COLUMNS": "120"})


# Rows on cases


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_torch_rows_pass_every_small_case(case, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    results = verify.run(cases=[case], device="cpu")
    assert [(r.op, r.backend) for r in results] == [
        (row.op, row.backend) for row in verify.rows_of("attention") if not evidence.on_gpu(row.target)
    ]
    assert not [r for r in results if not r.ok]


def triton(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`adatom verify --backend triton` under Triton's interpreter."""
    pytest.importorskip("triton")
    code = "from adatom.verify import command; import typer; typer.run(command)"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, "--backend", "triton", "--device", "cpu", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("op", OUTPUTS)
def test_triton_rows_pass_under_the_interpreter(op):
    """Every small case in every pass."""
    done = triton(op)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout and f" {sum(c.dtype != torch.float64 for c in SMALL)} " in done.stdout


@pytest.mark.gpu
@pytest.mark.timeout(1800)  # on a new machine it compiles several hundred kernels
def test_quick_cases_pass_on_the_gpu(cuda):
    jobs = min(8, len(os.sched_getaffinity(0)))
    assert not [r for r in verify.run(cases=QUICK, device=cuda, jobs=jobs) if not r.ok]


# Cases


def test_names_are_unique():
    groups = (SMALL, GPU, COMPILE, *BENCH.values(), *BENCH_CPU.values())
    for group in groups:
        assert len({case.name for case in group}) == len(group)
    assert len(QUICK) == len(cases._QUICK)


@pytest.mark.parametrize("group", [SMALL, GPU], ids=["small", "gpu"])
def test_cases_touch_every_option(group):
    def values(field):
        return {getattr(case, field) for case in group}

    assert {(c.dtype, c.precision) for c in group} >= {(F32, "tf32"), (F32, "ieee")}
    assert values("dtype") >= {torch.float16, torch.bfloat16, F32}
    forms = {"bhqk", "1hqk", "b1qk", "11qk", "b11k", "bh1k", "1h1k", "bhq1", "1h11"}
    assert {c.bias[:4] for c in group} >= forms
    assert any(c.bias.endswith("-inf") for c in group) and any(c.bias.endswith("-bool") for c in group)
    assert {c.bias_dtype for c in group if c.dtype == torch.bfloat16} >= {None, F32}
    for flag in ("causal", "sinks", "kv_lens", "varlen", "bias_grad"):
        assert values(flag) == {False, True}
    assert any(c.causal and c.seqlen_q < c.seqlen_k for c in group)
    assert any(c.causal and c.seqlen_q > c.seqlen_k for c in group)
    assert any(1 < c.kv_heads < c.heads for c in group) and any(1 == c.kv_heads < c.heads for c in group)
    assert values("layout") == {"bhsd", "bshd", "apart"} and max(values("magnitude")) >= 20
    assert any(c.head_dim != c.head_dim_v for c in group) and any(c.head_dim & (c.head_dim - 1) for c in group)
    assert 1 in values("seqlen_q") and 1 in values("seqlen_k") and min(c.scale or 0 for c in group) < 0
    assert any(c.window for c in group) and any(c.softcap for c in group)


def test_gpu_cases_reach_every_head_dim_and_the_large_sizes():
    dims = {8, 16, 32, 40, 64, 80, 96, 128, 160, 192, 256}
    for kind in ((torch.bfloat16, None), (F32, "tf32x3")):
        assert {c.head_dim for c in GPU if (c.dtype, c.precision) == kind} | {8} >= dims
    assert any(c.batch * c.heads > 65535 for c in GPU)
    assert any(c.huge for c in GPU) and not any(c.huge for c in QUICK)


def test_ragged_cases_have_empty_and_full_sequences():
    for case in (c for c in (*SMALL, *GPU) if c.varlen and c.batch >= 4):
        qs, ks = lengths(case)
        assert 0 in qs and 0 in ks and 1 in ks and max(qs) == case.seqlen_q and max(ks) == case.seqlen_k
    for case in (c for c in SMALL if c.kv_lens and c.batch > 1):
        lens = cases.make(case, "cpu")["kv_lens"]
        assert lens.min() == 0 and lens.max() == case.seqlen_k


def test_packed_sequences_of_equal_lengths_are_told_by_one_tensor():
    """As one passes them to attention of tokens with themselves, which kernels may know by it."""
    case = Case("packed", 4, 1, 1, 20, 20, 8, 8, F32, varlen=True)
    for of, same in ((case, True), (case._replace(seqlen_q=9), False)):
        x, _, _ = inputs_of(**cases.make(of, "cpu"))
        assert (x.cu_seqlens_q is x.cu_seqlens_k) == same


def test_inputs_are_the_same_each_time_and_differ_between_cases():
    first, again = cases.make(PLAIN, "cpu"), cases.make(PLAIN, "cpu")
    other = cases.make(PLAIN._replace(name="other"), "cpu")
    assert torch.equal(first["q"], again["q"]) and not torch.equal(first["q"], other["q"])


def test_flops_and_bytes():
    case = Case("sized", 2, 4, 2, 128, 256, 64, 64, torch.bfloat16, bias="1hqk")
    assert cases.flops(case, "attention_fwd") == 4 * 2 * 4 * 128 * 256 * 64
    assert cases.flops(case._replace(causal=True), "attention_fwd") == 2 * 2 * 4 * 128 * 256 * 64
    assert cases.flops(case, "attention_bwd") == 2.5 * cases.flops(case, "attention_fwd")
    q, kv, bias, lse = 2 * 4 * 128 * 64 * 2, 2 * 2 * 256 * 128 * 2, 4 * 128 * 256 * 2, 2 * 4 * 128 * 4
    assert cases.bytes_moved(case, "attention_fwd") == q + kv + bias + q + lse
    assert cases.bytes_moved(case, "attention_bwd") == (q + kv + bias) * 2 + 2 * q + lse


@pytest.mark.parametrize("window, causal", [((3, 2), False), ((None, 4), False), ((5, None), True), ((2, 9), True)])
def test_flops_of_a_window_count_the_visible_pairs(window, causal):
    case = Case("window", 1, 1, 1, 20, 13, 8, 8, F32, window=window, causal=causal)
    x, o, _ = inputs_of(**cases.make(case, "cpu"))
    seen = reference.visible(x, o, slice(0, 20), slice(0, 13), None)
    assert cases.flops(case, "attention_fwd") == 2 * 16 * int(seen.sum())


# The yardstick


def test_round_tf32_keeps_ten_bits():
    x = torch.randn(1000)
    rounded = round_tf32(x)
    assert torch.equal(rounded.view(torch.int32) & 0x1FFF, torch.zeros(1000, dtype=torch.int32))
    assert ((rounded - x).abs() <= x.abs() * 2.0**-11).all()


def test_emulated_tf32_reaches_the_second_derivative():
    a, b = torch.randn(2, 5, 7, requires_grad=True), torch.randn(2, 7, 3, requires_grad=True)
    for emulate, expected in ((False, 1e-6), (True, 1e-2)):
        results = []
        for dtype in (torch.float32, torch.float64):
            leaves = [t.detach().to(dtype).requires_grad_() for t in (a, b)]
            with _EmulateTF32() if emulate else torch.enable_grad():
                out = (leaves[0] @ leaves[1]).square()
            grads = torch.autograd.grad(out.sum(), leaves, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)
            results.append(torch.cat([t.double().flatten() for t in (out, *grads, *second)]))
        error = ((results[0] - results[1]).norm() / results[1].norm()).item()
        assert expected / 300 < error < expected


def test_yardsticks_agree_with_the_truth():
    trial = Trial(PLAIN._replace(bias="1hqk", sinks=True, dtype=torch.float64), CPU)
    for op in OUTPUTS:
        for yardstick in trial.yardsticks(op):
            assert yardstick.keys() == trial.truth(op).keys()
            for name, value in yardstick.items():
                torch.testing.assert_close(value, trial.truth(op)[name], rtol=1e-9, atol=1e-11)


def test_some_cases_lack_cotangents_and_some_have_all():
    lacks = {
        name
        for case in SMALL
        for trial in [Trial(case, CPU)]
        for name, value in zip(("dlse", "ddq", "ddk", "ddv"), (trial.dlse, *trial.dd[:3]))
        if value is None
    }
    assert lacks == {"dlse", "ddq", "ddk", "ddv"}
    assert any(trial.dlse is not None and None not in trial.dd[:3] for trial in (Trial(c, CPU) for c in SMALL[:9]))


def test_part_of_a_trial_is_one_batch_element():
    trial = Trial(PLAIN._replace(bias="bhqk"), CPU)
    for op in ("attention_fwd", "attention_bwd"):
        for name, value in trial.part(1).truth(op).items():
            torch.testing.assert_close(value, trial.truth(op)[name][1:2])


def test_zero_truth_is_measured_against_the_other_outputs():
    """With one key the softmax is constant: dq is zero but for what rounding leaves."""
    trial = Trial(PLAIN._replace(seqlen_k=1), CPU)
    trial.dlse = None
    dq, *rest = reference.backward(*trial.arguments("attention_bwd"))
    for noise, ok in ((1e-8, True), (1e-3, False)):
        noisy = verify.named("attention_bwd", (dq + noise * torch.randn_like(dq), *rest))
        output, ratio, _ = verify.judge(trial, "attention_bwd", noisy)
        assert (ratio <= 1) == ok and (ok or output == "dq")


def test_yardsticks_that_overflow_allow_a_rounding_alone(monkeypatch):
    trial = Trial(PLAIN, CPU)
    truth = trial.truth("attention_fwd")
    theirs = {name: torch.full_like(value, math.inf, dtype=F32) for name, value in truth.items()}
    monkeypatch.setattr(trial, "yardsticks", lambda op: (theirs, theirs))
    ratios = [verify.judge(trial, "attention_fwd", {n: t.to(F32) * f for n, t in truth.items()})[1] for f in (1, 1.01)]
    assert ratios[0] <= 1 < ratios[1]


def test_passes_is_a_gate_on_a_small_version_of_the_case():
    big = Case("big", 64, 32, 8, 1 << 16, 1 << 16, 16, 16, F32, causal=True)
    small, _ = shrunk(big, on_gpu=False)
    assert (small.heads // small.kv_heads, small.causal, small.seqlen_q) == (4, True, 40)
    right = registry.Row("attention_fwd", "mine", reference.forward, lambda p: None)
    wrong = right._replace(target=lambda x, o: reference.forward(x, o._replace(causal=False)))
    unfit = right._replace(unfit=lambda p: "not today")
    assert [verify.passes(big, row, "cpu") for row in (right, wrong, unfit)] == [True, False, None]


def counting(function, ran):
    def launcher(*arguments):
        ran.append(arguments)
        return function(*arguments)

    return launcher


def test_rows_of_one_launcher_are_judged_once():
    """Each is credited, or fails."""
    wrong = lambda x, o: reference.forward(x, o._replace(causal=True))  # noqa: E731
    for function, ok in ((reference.forward, True), (wrong, False)):
        ran = []
        row = registry.Row("attention_fwd", "mine", counting(function, ran), lambda p: None)
        rows = (row, row._replace(backend="mine_any", unfit=lambda p: None))
        results = verify.examine_case(PLAIN, rows, CPU)
        assert [(r.backend, r.ok, r.case) for r in results] == [("mine", ok, "plain"), ("mine_any", ok, "plain")]
        assert results[1] == results[0]._replace(backend="mine_any")
        assert len(ran) == 2  # as one row: results must repeat
        verify.examine_case(PLAIN, (row._replace(deterministic=False), *rows), CPU)
        assert len(ran) == 2 + 1 + 2  # asks for another number of runs
        verify.examine_case(PLAIN, (row, row._replace(target=counting(function, ran))), CPU)
        assert len(ran) == 5 + 2 + 2  # another function


def test_rows_of_one_launcher_are_judged_apart_with_the_results_of_different_forwards(monkeypatch):
    """A derivative is given those of its own backend."""
    ran = []
    row = registry.Row("attention_bwd", "mine", counting(reference.backward, ran), lambda p: None)
    rows = [row, row._replace(backend="mine_any"), row._replace(backend="another")]
    assert all(r.ok for r in verify.examine_case(PLAIN, rows, CPU)) and len(ran) == 2  # the truth, for all

    def zero(x, o):
        return tuple(0 * result for result in reference.forward(x, o))

    forward = registry.Row("attention_fwd", "mine", zero, lambda p: None)
    monkeypatch.setattr(verify.registry, "rows", lambda op: (forward,) if op == "attention_fwd" else ())
    del ran[:]
    results = verify.examine_case(PLAIN, rows, CPU)
    assert [(r.backend, r.ok) for r in results] == [("mine", False), ("mine_any", False), ("another", True)]
    assert len(ran) == 4


# The command


def test_command_judges_the_users_own_case():
    done = invoke(
        *("--shape", "2,4,2,13,21,16,8", "--dtype", "bf16", "--bias", "1hqk-inf", "--causal", "--window", "9,-1"),
        *("--softcap", "5", "--sinks", "--kv-lens", "--backend", "torch_chunked"),
    )
    assert done.exit_code == 0, done.output
    assert done.output.count("torch_chunked") == 4 and done.output.count("yours: ") == 4
    assert invoke("attention_fwd", "--varlen", "--shape", "5,2,12,8").exit_code == 0


@pytest.mark.parametrize("op, shape", [("attention", "1,2,9,16"), ("route", "9,8,2")])
def test_command_takes_a_scale(op, shape):
    """Also one of 0, which is not one that was left out."""
    for scale in (-0.5, 0.0):
        done = invoke(op, "--shape", shape, "--scale", str(scale), "--backend", "reference")
        assert done.exit_code == 0, done.output
        assert verify.own_case(op, shape, "f32", {"scale": scale}).scale == scale


def test_command_fails_when_a_row_does(monkeypatch):
    def late(x, o):
        out, lse = reference.forward(x, o)
        return out.roll(1, 2), lse

    row = registry.Row("attention_fwd", "late", late, lambda p: None)
    monkeypatch.setattr(registry, "ROWS", (row, *registry.ROWS))
    done = invoke("attention_fwd", "--shape", "1,2,9,8")
    assert done.exit_code == 1
    assert "late, yours: out L2 error" in done.output and "1 FAILED" in done.output
    assert invoke("attention_fwd", "--shape", "1,2,9,8", "--backend", "reference").exit_code == 0


def test_command_names_the_rows_that_ran_on_no_case():
    """With one line for each reason, in the order of the passes."""
    unfit = {row: "no" if "hopper" in row.backend else "never" for row in verify.rows_of("moe")[:-1]}
    ran = [verify.Result("moe_fwd", "triton", "case", "out", 0.1, "")]
    lines = verify.absent(ran, unfit)
    assert lines[0] == "moe_fwd not by hopper, hopper_one, hopper_any: no"
    assert lines[1:] == [
        "moe_fwd not by torch, reference: never",
        "moe_bwd not by hopper, hopper_any: no",
        "moe_bwd not by triton, torch: never",
    ]


def test_command_that_runs_nothing_fails_with_the_reason(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = invoke("--backend", "triton", "--shape", "1,2,9,8")
    assert done.exit_code == 1
    assert "nothing ran" in done.output and "needs a CUDA device (or TRITON_INTERPRET=1)" in done.output


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["convolution"], "no op 'convolution'"),
        (["linear", "--causal"], "linear has no --causal; it has: --shape, --dtype, --precision"),
        (["norm", "--bias", "bhqk"], "norm has no --bias"),
        (["moe", "--scale", "2"], "moe has no --scale"),
        (["--scale", "nan"], "scale=nan"),
        (["route", "--scale", "inf"], "scale=inf"),
        (["--backend", "cudnn"], "no backend 'cudnn'"),
        (["--jobs", "0"], "Invalid value for '--jobs'"),
        (["--shape", "1,2,3"], "4 or 7 integers"),
        (["--shape", "1,2,x,8"], "integers separated by commas"),
        (["--shape", "1,3,2,9,9,8,8"], "multiple of the heads"),
        (["--dtype", "int8"], "one of f16, bf16, f32, f64"),
        (["--bias", "hqk"], "four letters"),
        (["--bias", "bhqk-nan"], "four letters"),
        (["--window", "3"], "2 integers"),
        (["--precision", "fp8"], "one of"),
        (["--varlen", "--bias", "bhqk"], "take no bias"),
        (["--varlen", "--kv-lens"], "no padding for --kv-lens"),
        (["--record", "evidence.json"], "evidence takes a GPU"),
        (["--record", "."], "is a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_command_answers_bad_options(arguments, words):
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.output.replace("│", " ").split())


def test_unproven_leaves_what_the_evidence_proves(monkeypatch):
    rows = [row for row in verify.rows_of("norm") if evidence.on_gpu(row.target)]
    proofs = [evidence.Proof(row.op, row.backend, evidence.code_hash(row.target), 1, 0.5, "case", "y") for row in rows]
    monkeypatch.setattr(evidence, "read", lambda: {"gpu.json": proofs})
    done = invoke("norm", "--unproven")
    assert done.exit_code == 0
    assert "every row is proven" in done.output
    seen = []
    monkeypatch.setattr(evidence, "read", lambda: {"gpu.json": proofs[1:]})
    monkeypatch.setattr(verify, "judge_all", lambda tasks, *rest: seen.extend(rows for _, rows in tasks) or [])
    assert invoke("norm", "--unproven").exit_code == 1  # nothing ran
    assert set(seen) == {(rows[0],)}


def test_proofs_hold_the_worst_ratio_of_gpu_rows():
    rows = verify.rows_of("attention_fwd")
    results = [
        verify.Result(row.op, row.backend, f"case {i}", "out", ratio)
        for row in rows
        for i, ratio in enumerate((0.5, 0.75))
    ]
    assert verify.proofs(results, rows) == [
        evidence.Proof("attention_fwd", row.backend, evidence.code_hash(row.target), 2, 0.75, "case 1", "out")
        for row in rows
        if evidence.on_gpu(row.target)
    ]
    bad = verify.proofs([*results, results[0]._replace(ratio=float("nan"))], rows)
    assert bad[0].worst == float("inf")


class Threads:
    """What verify asks of multiprocessing, in threads."""

    SimpleQueue = queue.SimpleQueue

    class Process(threading.Thread):
        def __init__(self, target, args, daemon):
            super().__init__(target=target, args=args, daemon=daemon)

        def terminate(self):
            pass


def test_what_found_no_memory_is_examined_again_alone(monkeypatch):
    """Several processes share a GPU's memory: what one of them lacked says nothing of a kernel."""
    row, threads = verify.rows_of("attention_fwd", "reference")[0], torch.get_num_threads()
    small, large = (PLAIN._replace(name=name) for name in ("small", "large"))
    seen = []

    def examine(case, rows, device):
        alone = threading.current_thread() is threading.main_thread()
        seen.append((case.name, alone))
        if case is large and not alone:
            raise torch.OutOfMemoryError("full")
        return [verify.Result(row.op, row.backend, case.name, "out", 0.5, "")]

    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda how: Threads)
    monkeypatch.setattr(verify, "examine_case", examine)
    told = []
    results = verify.judge_all([(large, (row,)), (small, (row,))], CPU, 2, told.extend)
    torch.set_num_threads(threads)
    assert sorted(seen) == [("large", False), ("large", True), ("small", False)]
    assert [(r.case, r.ok) for r in results] == [("small", True), ("large", True)] == [(r.case, r.ok) for r in told]


def test_what_fails_elsewhere_is_not_examined_again(monkeypatch):
    def examine(case, rows, device):
        raise ValueError("wrong")

    row, threads = verify.rows_of("attention_fwd", "reference")[0], torch.get_num_threads()
    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda how: Threads)
    monkeypatch.setattr(verify, "examine_case", examine)
    [result] = verify.judge_all([(PLAIN, (row,))], CPU, 2)
    torch.set_num_threads(threads)
    assert result.ratio == math.inf and "could not be judged: ValueError: wrong" in result.problem
