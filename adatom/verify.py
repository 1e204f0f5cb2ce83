"""Kernels against float64: values, gradients, second gradients and tangents, row by row. `adatom verify`.

The truth is `reference`, in float64, on the inputs as the kernel gets them. The yardstick is what PyTorch errs in the
kernel's own precision: dense attention differentiated by autograd, or, where that is worse, the reference's formulas.
An output passes if

    its relative L2 error          <= 2 x PyTorch's + a rounding floor (trial.floor), and
    the error of its worst row     <= 4 x that of PyTorch's worst row + 4 floors

(worst rows scatter more), and it has the right shape and dtype, is finite exactly where the truth is, and, for
deterministic rows, comes out bit for bit the same when run again. Fresh buffers are filled with NaN beforehand, and
NaN never passes. The ratio that is reported is error / allowed error, the worse of the two criteria.

A row of a derivative is given out and lse by the first forward row of its own backend, as in use; if its backend has
none, by the truth, rounded to their dtypes. So a wrong forward also fails the derivatives of its backend, and no other.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from adatom import evidence, registry
from adatom.device import facts, versions
from adatom.ops.attention import api
from adatom.ops.attention import cases as attention
from adatom.ops.attention.cases import Case
from adatom.ops.attention.problem import poisoned, problem
from adatom.ops.attention.trial import OUTPUTS, Tensor, Tensors, Trial, named
from adatom.registry import Row


class Result(NamedTuple):
    """One row on one case: its worst output, the ratio of error to allowed error (at most 1 passes; inf for what no
    error can describe), and in words what failed ("" if nothing did)."""

    op: str
    backend: str
    case: str
    output: str
    ratio: float
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether the row passed. NaN does not."""
        return self.ratio <= 1


# Judging -----------------------------------------------------------------------------------------------------------


def _by_rows(name: str, x: Tensor) -> Tensor:
    """x as rows (n, dim): the last dimension, single elements of lse and its kin."""
    x = x.double()
    return x.reshape(-1, 1) if "lse" in name else x.reshape(-1, x.shape[-1]) if x.numel() else x.reshape(0, 1)


def _errors(name: str, got: Tensor, want: Tensor, biggest: float) -> tuple[float, float]:
    """Relative L2 error of the whole, and of the worst row; no row counts as smaller than a third of their mean.

    A truth that is zero but for rounding (less than 1e-9 of `biggest`, the largest root mean square of its pass) has no
    relative error: it is measured, as a whole, against eight times `biggest`, as what is left of terms that cancel.
    """
    got, want = _by_rows(name, got), _by_rows(name, want)
    finite = want.isfinite()
    if not finite.any():
        return 0.0, 0.0
    want = want.masked_fill(~finite, 0.0)
    wrong = (got - want).masked_fill_(~finite, 0.0).square().sum(-1)
    squares = want.square().sum(-1)
    mean, tiny = float(squares.mean()), want.shape[-1] * (1e-9 * biggest) ** 2
    zero = mean <= tiny
    if zero:
        mean = want.shape[-1] * (8 * biggest) ** 2
    if mean == 0:
        return (math.inf, math.inf) if wrong.any() else (0.0, 0.0)
    whole = math.sqrt(float(wrong.mean()) / mean)
    if zero:
        return whole, whole
    return whole, math.sqrt(float((wrong / (squares + 0.1 * mean)).max()))


def _rms(x: Tensor) -> float:
    finite = x[x.isfinite()].double()
    return math.sqrt(float(finite.square().mean())) if finite.numel() else 0.0


def _term_floor(trial: Trial, want: Tensor, biggest: float) -> float:
    """Relative error always allowed in what terms as large as the largest of a pass may have left: their rounding."""
    return (2.0**-53 if trial.x.q.dtype == torch.float64 else 2.0**-24) * min(biggest / max(_rms(want), 1e-30), 16.0)


def _sum_floor(trial: Trial, name: str, want: Tensor, biggest: float) -> float:
    """Relative error always allowed in the gradient of a bias or sink: that of a float32 sum over so many scores."""
    if not name.startswith(("dbias", "dsinks")) or not want.numel():
        return 0.0
    terms = trial.x.q[..., 0].numel() * trial.x.k.shape[0 if trial.x.q.dim() == 3 else 2] / want.numel()
    return 2.0**-24 * math.sqrt(terms) * biggest / max(_rms(want), 1e-30)


def judge(trial: Trial, op: str, results: Tensors) -> tuple[str, float, str]:
    """(output, ratio, problem in words) of the worst output of a pass."""
    truth, yardsticks = trial.truth(op), trial.yardsticks(op)
    missing, extra = truth.keys() - results.keys(), results.keys() - truth.keys()
    if missing or extra:
        return ", ".join(sorted(missing | extra)), math.inf, "missing" if missing else "not asked for"
    biggest, floor = max(_rms(t) for t in truth.values()), trial.floor
    worst = ("", 0.0, "")
    for name, want in truth.items():
        got, like = results[name], yardsticks[1][name]
        if got.shape != like.shape or got.dtype != like.dtype:
            return name, math.inf, f"is {got.dtype}{list(got.shape)}, not {like.dtype}{list(like.shape)}"
        if not torch.equal(got.isfinite(), want.isfinite()) or bool(got.isnan().any()):
            nans, wrong = int(got.isnan().sum()), int((got.isfinite() != want.isfinite()).sum())
            return name, math.inf, f"{nans} NaN, {wrong} elements finite or infinite where the truth is not"
        whole, row = _errors(name, got, want, biggest)
        theirs = [_errors(name, other[name], want, biggest) for other in yardsticks]
        least = floor + _term_floor(trial, want, biggest) + _sum_floor(trial, name, want, biggest)
        whole_allowed = 2 * max(e[0] for e in theirs if math.isfinite(e[0])) + least
        row_allowed = 4 * max(e[1] for e in theirs if math.isfinite(e[1])) + 4 * least
        ratio = max(whole / whole_allowed, row / row_allowed)
        if not ratio <= worst[1]:
            words = f"L2 error {whole:.2e} (allowed {whole_allowed:.2e}), worst row {row:.2e} ({row_allowed:.2e})"
            worst = (name, ratio, "" if ratio <= 1 else words)
    return worst


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _launcher(row: Row) -> Callable[..., Any]:
    """The function behind a row; `target` may also be the function itself."""
    return row.target if callable(row.target) else registry.load(row.target)


def _forward(row: Row, trial: Trial) -> tuple[Tensor, ...]:
    """(out, lse) by the first fit forward row of the backend of a derivative; () if there is none."""
    if row.op == "attention_fwd":
        return ()
    for forward in registry.rows("attention_fwd"):
        if row.backend.startswith(forward.backend) and forward.unfit(trial.problem) is None:
            if forward.backend not in trial.forwards:
                trial.forwards[forward.backend] = _launcher(forward)(trial.x, trial.o)
            return trial.forwards[forward.backend]
    return ()


def examine(row: Row, trial: Trial) -> Result:
    """Run a row on a trial and judge what comes out. Whatever it raises is a failure of the row."""
    name, launcher, device = trial.case.name, _launcher(row), trial.problem.device
    interpreted = device.kind == "interpreter" and not callable(row.target) and evidence.on_gpu(row.target)
    once = not row.deterministic or interpreted
    try:
        with poisoned():
            arguments = trial.arguments(row.op, *_forward(row, trial))
            results = named(row.op, launcher(*arguments))
            again = results if once else named(row.op, launcher(*arguments))
            if device.kind == "cuda":
                torch.cuda.synchronize()  # a crash shows here
    except Exception as error:
        words = (str(error).strip() or "nothing said").splitlines()[0]
        return Result(row.op, row.backend, name, "", math.inf, f"raised {type(error).__name__}: {words}")
    for output in results:
        if not _same_bits(results[output], again[output]):
            return Result(row.op, row.backend, name, output, math.inf, "differs from run to run")
    del again
    if not trial.case.huge:
        return Result(row.op, row.backend, name, *judge(trial, row.op, results))
    ends = (0, trial.case.batch - 1)  # addresses overflow at the last one, if at all
    judged = [judge(trial.part(i), row.op, {k: t[i : i + 1] for k, t in results.items()}) for i in ends]
    return Result(row.op, row.backend, name, *max(judged, key=lambda j: j[1]))


# Running -----------------------------------------------------------------------------------------------------------


def passes_of(op: str) -> tuple[str, ...]:
    """The passes that `op` names: all of an op's, or itself."""
    if op in OUTPUTS:
        return (op,)
    if op not in registry.PASSES:
        raise ValueError(f"adatom: no op {op!r}; there are: {', '.join((*registry.PASSES, *OUTPUTS))}")
    return registry.PASSES[op]


def rows_of(op: str, backend: str | None = None) -> tuple[Row, ...]:
    """The rows of an op's passes; with `backend`, those of that name and its variants."""
    rows = (row for p in passes_of(op) for row in registry.rows(p))
    return tuple(r for r in rows if backend is None or registry.serves(backend, r.backend))


def cases_of(device: torch.device, quick: bool = False) -> tuple[Case, ...]:
    """The cases for a device."""
    if device.type == "cuda":
        return attention.QUICK if quick else attention.GPU
    return attention.SMALL[::4] if quick else attention.SMALL


def examine_case(case: Case, rows: Sequence[Row], device: torch.device) -> list[Result]:
    """Every row that is fit for the case, judged on it."""
    if case.huge and torch.cuda.mem_get_info(device)[0] < 60 * 2**30:
        return []
    trial = Trial(case, device)
    posed = trial.problem
    fit = [row for row in rows if row.refuses(posed) is None]
    if case.huge:  # PyTorch's rows would need several times the memory
        fit = [row for row in fit if evidence.on_gpu(row.target)]
    results = []
    for row in fit:
        if alive(device):
            results.append(examine(row, trial))
        else:
            results.append(Result(row.op, row.backend, case.name, "", math.inf, "not run: an earlier kernel crashed"))
    del trial
    if device.type == "cuda" and alive(device):
        torch.cuda.empty_cache()
    return results


def alive(device: torch.device) -> bool:
    """Whether this process can still use the device: after an illegal access, nothing runs on a GPU any more."""
    try:
        torch.zeros(1, device=device).item()
    except torch.OutOfMemoryError:
        return True
    except RuntimeError:
        return False
    return True


def run(
    op: str = "attention",
    cases: Sequence[Case] | None = None,
    rows: Sequence[Row] | None = None,
    device: torch.device | str | None = None,
    jobs: int = 1,
    done: Callable[[list[Result]], None] | None = None,
) -> list[Result]:
    """Judge rows on cases, each row on each case it is fit for.

    cases: default, those for the device. rows: default, the registry's for `op`, an op or one of its passes; a row's
    target may also be a launcher itself. jobs: processes over which the cases, and the compiling, are spread. done:
    called with the results of each case.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = rows_of(op) if rows is None else tuple(rows)
    todo = cases_of(where) if cases is None else tuple(cases)
    results: list[Result] = []

    def collect(some: list[Result]) -> None:
        results.extend(some)
        if done is not None:
            done(some)

    shared = [case for case in todo if not case.huge] if jobs > 1 else []
    for some in spread(shared, chosen, where, jobs):
        collect(some)
    for case in todo:
        if not shared or case.huge:
            collect(examine_case(case, chosen, where))
    return results


def spread(cases: Sequence[Case], rows: Sequence[Row], device: torch.device, jobs: int) -> Iterator[list[Result]]:
    """The results of each case, examined by `jobs` processes. One whose GPU crashed is replaced."""
    context = torch.multiprocessing.get_context("spawn")
    todo, found = context.SimpleQueue(), context.SimpleQueue()
    for case in (*cases, *[None] * jobs):
        todo.put(case)

    def start() -> Any:
        process = context.Process(target=_examine_all, args=(todo, found, rows, device), daemon=True)
        process.start()
        return process

    processes = [start() for _ in range(min(jobs, len(cases)))]
    try:
        for _ in cases:
            while found.empty() and any(process.is_alive() for process in processes):
                time.sleep(0.05)
            if found.empty():
                raise RuntimeError("adatom: the processes that examine kernels died")
            results, crashed = found.get()
            if crashed:
                processes.append(start())
            yield results
    finally:
        for process in processes:
            process.terminate()
            process.join()  # its memory is free


def _examine_all(todo: Any, found: Any, rows: Sequence[Row], device: torch.device) -> None:
    """What a process does: cases from `todo`, until there is none or the GPU no longer answers."""
    torch.set_num_threads(1)
    while (case := todo.get()) is not None:
        try:
            results = examine_case(case, rows, device)
        except Exception as error:
            said = (str(error).strip() or "nothing said").splitlines()[0]
            words = f"could not be judged: {type(error).__name__}: {said}"
            results = [Result(row.op, row.backend, case.name, "", math.inf, words) for row in rows]
        crashed = not alive(device)
        found.put((results, crashed))
        if crashed:
            return


def shrunk(case: Case, seqlen: int) -> Case:
    """The case with its options, dims and ratio of heads, but small: lengths up to `seqlen`, at most two groups of
    heads."""
    group = case.heads // case.kv_heads
    kv_heads = min(case.kv_heads, 2)
    return case._replace(
        batch=min(case.batch, 4 if case.varlen else 2),
        heads=group * kv_heads,
        kv_heads=kv_heads,
        seqlen_q=min(case.seqlen_q, seqlen),
        seqlen_k=min(case.seqlen_k, seqlen + 37),
    )


@cache
def passes(case: Case, row: Row, device: str | None = None) -> bool:
    """Whether a row is right on a small version of a case; what a speed must pass before it is shown. A row that is not
    fit for the case does not pass."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    small = shrunk(case, 300 if where.type == "cuda" else 40)
    results = examine_case(small, [row], where)
    if not results and not small.varlen:  # some kernels leave small problems and odd rows of a bias to others
        results = examine_case(small._replace(batch=32, seqlen_k=min(case.seqlen_k, 336)), [row], where)
    return bool(results) and all(result.ok for result in results)


# The command -------------------------------------------------------------------------------------------------------

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def _numbers(text: str, counts: tuple[int, ...], option: str) -> list[int]:
    numbers = [int(part) for part in text.split(",") if part.strip().lstrip("-").isdigit()]
    if len(numbers) != text.count(",") + 1 or len(numbers) not in counts:
        wanted = " or ".join(str(count) for count in counts)
        raise typer.BadParameter(f"{wanted} integers separated by commas, not {text!r}", param_hint=option)
    return numbers


def _own_case(shape: str, dtype: str, window: str | None, **options: Any) -> Case:
    """The case that the command's options describe."""
    numbers = _numbers(shape, (4, 7), "--shape")
    if len(numbers) == 4:
        batch, heads, seqlen, dim = numbers
        numbers = [batch, heads, heads, seqlen, seqlen, dim, dim]
    if dtype not in DTYPES:
        raise typer.BadParameter(f"one of {', '.join(DTYPES)}, not {dtype!r}", param_hint="--dtype")
    bias = options["bias"]
    fits = all(given in ("1", letter) for given, letter in zip(bias, "bhqk"))
    if bias and not (fits and len(bias) >= 4 and bias[4:] in ("", "-inf", "-bool", "-far")):
        hint = "four letters, bhqk or 1 where it broadcasts, then nothing, -inf, -bool or -far: 1hqk, b11k-bool"
        raise typer.BadParameter(f"{hint}; not {bias!r}", param_hint="--bias")
    if bias and options["varlen"]:
        raise typer.BadParameter("packed sequences take no bias", param_hint="--bias")
    if window is not None:
        options["window"] = tuple(_numbers(window, (2,), "--window"))
    names: dict[str, Any] = dict(zip(Case._fields[1:8], numbers))
    return Case(name="yours", dtype=DTYPES[dtype], **names, **options)


def table(results: Sequence[Result], rows: Sequence[Row], unfit: dict[Row, str]) -> Table:
    """One line for each row: cases, the worst ratio of error to allowed error, and where it occurred."""
    out = Table("pass", "backend", "cases", "worst", "where", "verdict", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        mine = [r for r in results if (r.op, r.backend) == (row.op, row.backend)]
        if mine:
            worst, failed = max(mine, key=_badness), sum(not r.ok for r in mine)
            where = escape(f"{worst.case}: {worst.output}")
            verdict = f"[red]{failed} FAILED" if failed else "[green]ok"
            out.add_row(
                row.op.split("_", 1)[-1],
                row.backend,
                str(len(mine)),
                f"{worst.ratio:.2f}" if worst.ratio < 100 else f"{worst.ratio:.0e}",
                where,
                verdict,
            )
        else:
            out.add_row(
                row.op.split("_", 1)[-1], row.backend, "0", "", "[dim]" + escape(unfit.get(row, "fit for no case")), ""
            )
    return out


def _badness(result: Result) -> float:
    return math.inf if math.isnan(result.ratio) else result.ratio


def _said(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=evidence.PACKAGE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def machine(device: torch.device) -> dict[str, Any]:
    """Where and on what the kernels were judged."""
    known = facts(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    return {
        "gpu": torch.cuda.get_device_name(index),
        "arch": f"sm_{known.arch}",
        "sms": known.sms,
        "driver": _said(["nvidia-smi", f"--id={index}", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "versions": versions(),
        "platform": platform.platform(),
        "commit": _said(["git", "describe", "--always", "--dirty"]),
        "date": datetime.date.today().isoformat(),
    }


def proofs(results: Sequence[Result], rows: Sequence[Row]) -> list[evidence.Proof]:
    """What the results prove of each GPU row that ran."""
    out = []
    for row in rows:
        mine = [r for r in results if (r.op, r.backend) == (row.op, row.backend)]
        if mine and evidence.on_gpu(row.target):
            worst = max(mine, key=_badness)
            ratio = round(_badness(worst), 4)
            hashed = evidence.code_hash(row.target)
            out.append(evidence.Proof(row.op, row.backend, hashed, len(mine), ratio, worst.case, worst.output))
    return out


def command(
    op: Annotated[str, typer.Argument(help="attention (every pass), or one pass such as attention_bwd.")] = "attention",
    backend: Annotated[str | None, typer.Option(help="Only this backend.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few cases, in about a minute.")] = False,
    record: Annotated[Path | None, typer.Option(help="Write the evidence: evidence/<gpu>.json.")] = None,
    shape: Annotated[str | None, typer.Option(help="Your own case: B,H,S,D or B,H,Hkv,Sq,Sk,D,Dv.")] = None,
    dtype: Annotated[str | None, typer.Option(help="f16, bf16, f32 or f64.")] = None,
    precision: Annotated[str | None, typer.Option(help="Of float32 products: tf32x3, tf32 or ieee.")] = None,
    bias: Annotated[
        str, typer.Option(help="bhqk, with 1 where it broadcasts; then -inf, -bool or -far: 1hqk, b11k-bool.")
    ] = "",
    causal: Annotated[bool, typer.Option("--causal")] = False,
    window: Annotated[str | None, typer.Option(help="LEFT,RIGHT; -1 is unbounded.")] = None,
    softcap: Annotated[float | None, typer.Option()] = None,
    sinks: Annotated[bool, typer.Option("--sinks")] = False,
    kv_lens: Annotated[bool, typer.Option("--kv-lens", help="Ragged keys in a padded batch.")] = False,
    varlen: Annotated[bool, typer.Option("--varlen", help="Packed sequences of random lengths up to S.")] = False,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: a GPU if there is one.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes; default 8 on a GPU, 1 elsewhere.")] = None,
) -> None:
    """Hold every kernel against float64 on this machine: values, gradients, second gradients, tangents.

    A kernel may err at most twice what PyTorch errs in the same precision, plus a rounding floor. Exits with 1 if one
    does not pass. On a CPU, Triton's kernels are judged too under TRITON_INTERPRET=1.
    """
    console = Console()
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("PyTorch sees no CUDA device", param_hint="--device")
    try:
        rows = rows_of(op, backend)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="op") from None
    if not rows:
        known = ", ".join(dict.fromkeys(row.backend for row in rows_of(op)))
        raise typer.BadParameter(f"no backend {backend!r} for {op}; there are: {known}", param_hint="--backend")
    own = any((shape, dtype, precision, bias, causal, window, softcap, sinks, kv_lens, varlen))
    if record is not None and (where.type != "cuda" or own or quick):
        raise typer.BadParameter("evidence takes a GPU and all of its cases", param_hint="--record")
    if own:
        options = {"precision": precision, "bias": bias, "causal": causal, "softcap": softcap, "sinks": sinks}
        default = "4,8,512,64" if where.type == "cuda" else "2,2,40,32"
        case = _own_case(shape or default, dtype or "f32", window, kv_lens=kv_lens, varlen=varlen, **options)
        try:
            api.inputs_of(**attention.make(case, "cpu"))
        except (ValueError, TypeError, NotImplementedError) as error:
            raise typer.BadParameter(str(error)) from None
        todo: tuple[Case, ...] = (case,)
    else:
        todo = cases_of(where, quick)
    processes = jobs or (min(8, len(os.sched_getaffinity(0)), len(todo)) if where.type == "cuda" else 1)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{op} on {where.type}", total=len(todo))

        def done(some: list[Result]) -> None:
            progress.advance(task)
            for result in some:
                if not result.ok:
                    line = f"{result.op} {result.backend}, {result.case}: {result.output} {result.problem}"
                    progress.console.print(escape(line), style="red", highlight=False, soft_wrap=True)

        results = run(op, todo, rows, where, processes, done)
    posed = problem(*api.inputs_of(**attention.make(todo[0], where))[:2])
    console.print(table(results, rows, {row: row.refuses(posed) or "fit for no case" for row in rows}))
    console.print("worst: error / allowed error, which PyTorch's own error in the same precision sets")
    if record is not None:
        evidence.write(record, machine(where), proofs(results, rows))
        console.print(f"wrote {record}")
    if not results:
        console.print("nothing ran", style="red")
    if not results or not all(result.ok for result in results):
        raise typer.Exit(1)
