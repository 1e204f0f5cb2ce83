"""Kernels against float64: values, gradients, second gradients and tangents, row by row. `adatom verify`.

The truth is `reference`, in float64, on the inputs as the kernel gets them. The yardstick is what PyTorch errs in the
kernel's own precision: eager code differentiated by autograd, or, where that is worse, the reference's formulas. Both
are in the trial.py of each op. An output passes if

    its relative L2 error          <= 2 x PyTorch's + a rounding floor (Trial.least), and
    the error of its worst row     <= 4 x that of PyTorch's worst row + 4 floors

(worst rows scatter more), and it has the right shape and dtype, is finite exactly where the truth is, and, of rows that
are fit where results must repeat, comes out bit for bit the same when run again. Fresh buffers are filled with NaN
beforehand, and NaN never passes. The ratio that is reported is error / allowed error, the worse of the two criteria.

A row of a derivative is given the results of the first forward row of its own backend, as in use; if its backend has
none, those of the truth, rounded to their dtypes. So a wrong forward also fails the derivatives of its backend, and no
other. Rows that run one launcher alike, and differ in their limits alone, are judged once on a case that both take.
"""

from __future__ import annotations

import datetime
import math
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from torch.overrides import TorchFunctionMode

from adatom import evidence, registry
from adatom.device import facts, system, versions
from adatom.records import commit, said, to_write
from adatom.registry import Row

Tensor = torch.Tensor
Tensors = dict[str, Tensor]
Task = tuple[Any, tuple[Row, ...]]  # a case, and the rows of its op to judge on it

# Relative errors that are always allowed: one rounding to 16 bits, or to TF32; four to float32 and float64, whose sums
# take many.
FLOORS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-22, torch.float64: 2.0**-51}
FLOOR_TF32 = 2.0**-11


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


class Poisoned(TorchFunctionMode):
    """While active, what PyTorch allocates without writing holds NaN: an element that a kernel never writes shows."""

    _BLANK = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.fill_(math.nan) if func in self._BLANK and made.is_floating_point() else made


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


def generator(name: str, seed: int, where: torch.device) -> torch.Generator:
    """What the tensors of the case of that name are drawn from."""
    return torch.Generator(where).manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()) % 1_000_003)


def round_tf32(x: Tensor) -> Tensor:
    """float32 rounded to the 10 mantissa bits of TF32, to nearest."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def rms(x: Tensor) -> float:
    """Root mean square of what is finite."""
    finite = x[x.isfinite()].double()
    return math.sqrt(float(finite.square().mean())) if finite.numel() else 0.0


def named(op: str, values: Iterable[Tensor | None]) -> Tensors:
    """The results of a pass by name, without those that are None."""
    outputs = registry.part(op, "trial").OUTPUTS[op]
    return {name: value for name, value in zip(outputs, values) if value is not None}


def judge(trial: Any, op: str, results: Tensors) -> tuple[str, float, str]:
    """(output, ratio, problem in words) of the worst output of a pass."""
    truth, yardsticks = trial.truth(op), trial.yardsticks(op)
    missing, extra = truth.keys() - results.keys(), results.keys() - truth.keys()
    if missing or extra:
        return ", ".join(sorted(missing | extra)), math.inf, "missing" if missing else "not asked for"
    biggest = max(rms(t) for t in truth.values())
    worst = ("", 0.0, "")
    for name, want in truth.items():
        got, like = results[name], yardsticks[-1][name]
        if got.shape != like.shape or got.dtype != like.dtype:
            return name, math.inf, f"is {got.dtype}{list(got.shape)}, not {like.dtype}{list(like.shape)}"
        if not torch.equal(got.isfinite(), want.isfinite()) or bool(got.isnan().any()):
            nans, wrong = int(got.isnan().sum()), int((got.isfinite() != want.isfinite()).sum())
            return name, math.inf, f"{nans} NaN, {wrong} elements finite or infinite where the truth is not"
        whole, row = _errors(name, got, want, biggest)
        theirs = [_errors(name, other[name], want, biggest) for other in yardsticks]
        least = trial.least(name, want, biggest)
        whole_allowed = 2 * max((e[0] for e in theirs if math.isfinite(e[0])), default=0.0) + least
        row_allowed = 4 * max((e[1] for e in theirs if math.isfinite(e[1])), default=0.0) + 4 * least
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


def _forward_row(row: Row, trial: Any) -> Row | None:
    """The first fit forward row of the backend of a derivative; None if there is none."""
    forward_pass, fit = registry.PASSES[registry.op_of(row.op)][0], trial.problem
    forwards = () if row.op == forward_pass else registry.rows(forward_pass)
    return next((f for f in forwards if registry.serves(f.backend, row.backend) and f.unfit(fit) is None), None)


def _forward(row: Row, trial: Any) -> tuple[Tensor, ...]:
    """What that row returns; () without one."""
    forward = _forward_row(row, trial)
    if forward is None:
        return ()
    if forward.backend not in trial.forwards:
        trial.forwards[forward.backend] = _launcher(forward)(*trial.arguments(forward.op))
    kept: tuple[Tensor, ...] = trial.forwards[forward.backend]
    return kept


def _once(row: Row, trial: Any) -> bool:
    """Whether the results of a row need not repeat here."""
    posed = trial.problem
    interpreted = posed.device.kind == "interpreter" and not callable(row.target) and evidence.on_gpu(row.target)
    return interpreted or row.refuses(posed._replace(deterministic=True)) is not None


def _what_runs(row: Row, trial: Any) -> tuple[Any, ...]:
    """What `examine` depends on: rows of which this is equal get one judgement."""
    return row.op, row.target, _once(row, trial), _forward_row(row, trial)


def examine(row: Row, trial: Any) -> Result:
    """Run a row on a trial and judge what comes out. Whatever it raises is a failure of the row."""
    name, launcher, device, once = trial.case.name, _launcher(row), trial.problem.device, _once(row, trial)
    try:
        with Poisoned():
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
    judged = [judge(part, row.op, some) for part, some in trial.parts(results)]
    return Result(row.op, row.backend, name, *max(judged, key=lambda j: j[1]))


# Running -----------------------------------------------------------------------------------------------------------


def rows_of(op: str | None = None, backend: str | None = None) -> tuple[Row, ...]:
    """The rows of an op, of one of its passes, or of everything; with `backend`, those of it and its variants."""
    ops = registry.PASSES if op is None else (op,)
    passes = [p for name in ops for p in registry.PASSES.get(name, (name,)) if registry.op_of(p)]
    rows = (row for p in passes for row in registry.rows(p))
    return tuple(r for r in rows if backend is None or registry.serves(backend, r.backend))


def cases_of(op: str, device: torch.device, quick: bool = False) -> tuple[Any, ...]:
    """The cases of an op for a device."""
    cases = registry.part(op, "cases")
    if device.type == "cuda":
        return cases.QUICK if quick else cases.GPU
    return cases.SMALL[::4] if quick else cases.SMALL


def tasks_of(rows: Sequence[Row], device: torch.device, quick: bool = False) -> list[Task]:
    """Each case for a device with those of the rows that are its op's."""
    ops = dict.fromkeys(registry.op_of(row.op) for row in rows)
    mine = {op: tuple(row for row in rows if registry.op_of(row.op) == op) for op in ops}
    return [(case, mine[op]) for op in ops for case in cases_of(op, device, quick)]


def examine_case(case: Any, rows: Sequence[Row], device: torch.device) -> list[Result]:
    """Every row that is fit for the case, judged on it."""
    if case.huge and (device.type != "cuda" or torch.cuda.mem_get_info(device)[0] < 60 * 2**30):
        return []
    trial = registry.part(case.op, "trial").Trial(case, device)
    posed = trial.problem
    fit = [row for row in rows if row.refuses(posed) is None]
    if case.huge:  # PyTorch's rows would need several times the memory
        fit = [row for row in fit if evidence.on_gpu(row.target)]
    results, judged = [], dict[tuple[Any, ...], Result]()
    for row in fit:
        key = _what_runs(row, trial)
        if key not in judged and alive(device):
            judged[key] = examine(row, trial)
        crashed = Result(row.op, row.backend, case.name, "", math.inf, "not run: an earlier kernel crashed")
        results.append(judged.get(key, crashed)._replace(backend=row.backend))
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
    op: str | None = None,
    cases: Sequence[Any] | None = None,
    rows: Sequence[Row] | None = None,
    device: torch.device | str | None = None,
    jobs: int = 1,
    done: Callable[[list[Result]], None] | None = None,
) -> list[Result]:
    """Judge rows on cases, each row on each case it is fit for.

    cases: default, those for the device. rows: default, the registry's for `op`: an op, one of its passes, or None for
    everything; a row's target may also be a launcher itself. jobs: processes over which the cases, and the compiling,
    are spread. done: called with the results of each case.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = rows_of(op) if rows is None else tuple(rows)
    if cases is None:
        return judge_all(tasks_of(chosen, where), where, jobs, done)
    tasks = [(case, tuple(row for row in chosen if registry.op_of(row.op) == case.op)) for case in cases]
    return judge_all(tasks, where, jobs, done)


def judge_all(
    tasks: Sequence[Task], device: torch.device, jobs: int = 1, done: Callable[[list[Result]], None] | None = None
) -> list[Result]:
    """The results of all tasks; see `run`."""
    results: list[Result] = []

    def collect(some: list[Result]) -> None:
        results.extend(some)
        if done is not None:
            done(some)

    shared = [task for task in tasks if not task[0].huge] if jobs > 1 else []
    again: list[Task] = []  # others had the memory that these needed
    for some in spread(shared, device, jobs, again):
        collect(some)
    for case, rows in (*again, *(task for task in tasks if not shared or task[0].huge)):
        collect(examine_case(case, rows, device))
    return results


def spread(
    tasks: Sequence[Task], device: torch.device, jobs: int, again: list[Task]
) -> Iterator[list[Result]]:  # fmt: skip
    """The results of each case, examined by `jobs` processes. One whose GPU crashed is replaced. What ran out of memory
    goes to `again` instead."""
    context = torch.multiprocessing.get_context("spawn")
    todo, found = context.SimpleQueue(), context.SimpleQueue()  # pipes of 64 KB: whole tasks would not fit
    for number in (*range(len(tasks)), *[None] * jobs):
        todo.put(number)

    def start() -> Any:
        process = context.Process(target=_examine_all, args=(tasks, todo, found, device), daemon=True)
        process.start()
        return process

    processes = [start() for _ in range(min(jobs, len(tasks)))]
    try:
        for _ in tasks:
            while found.empty() and any(process.is_alive() for process in processes):
                time.sleep(0.05)
            if found.empty():
                raise RuntimeError("adatom: the processes that examine kernels died")
            number, results, crashed = found.get()
            if crashed:
                processes.append(start())
            if any("OutOfMemoryError" in result.problem for result in results):
                again.append(tasks[number])
            else:
                yield results
    finally:
        for process in processes:
            process.terminate()
            process.join()  # its memory is free


def _examine_all(tasks: Sequence[Task], todo: Any, found: Any, device: torch.device) -> None:
    """What a process does: tasks by their numbers in `todo`, until there is none or the GPU no longer answers."""
    torch.set_num_threads(1)
    while (number := todo.get()) is not None:
        case, rows = tasks[number]
        try:
            results = examine_case(case, rows, device)
        except Exception as error:
            said = (str(error).strip() or "nothing said").splitlines()[0]
            words = f"could not be judged: {type(error).__name__}: {said}"
            results = [Result(row.op, row.backend, case.name, "", math.inf, words) for row in rows]
        crashed = not alive(device)
        found.put((number, results, crashed))
        if crashed:
            return


def passes(case: Any, row: Row, device: str | None = None) -> bool | None:
    """Whether a row is right on a small version of a case; what a speed must pass before it is shown. None if it is fit
    for none of them."""
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    judged = (_judged(small, row, where) for small in registry.part(case.op, "trial").shrunk(case, where != "cpu"))
    results = next((some for some in judged if some), [])
    return all(result.ok for result in results) if results else None


@cache
def _judged(case: Any, row: Row, device: str) -> list[Result]:
    return examine_case(case, [row], torch.device(device))


# The command -------------------------------------------------------------------------------------------------------

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def table(results: Sequence[Result], rows: Sequence[Row]) -> Table:
    """One line for each row that ran: cases, the worst ratio of error to allowed error, and where it occurred."""
    out = Table("pass", "backend", "cases", "worst", "where", "verdict", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        mine = [r for r in results if (r.op, r.backend) == (row.op, row.backend)]
        if mine:
            worst, failed = max(mine, key=_badness), sum(not r.ok for r in mine)
            where = escape(f"{worst.case}: {worst.output}")
            verdict = f"[red]{failed} FAILED" if failed else "[green]ok"
            out.add_row(
                row.op,
                row.backend,
                str(len(mine)),
                f"{worst.ratio:.2f}" if worst.ratio < 100 else f"{worst.ratio:.0e}",
                where,
                verdict,
            )
    return out


def absent(results: Sequence[Result], unfit: dict[Row, str]) -> list[str]:
    """The rows that ran on no case, pass by pass, those with the same reason in one line."""
    ran = {(r.op, r.backend) for r in results}
    refused: dict[str, list[tuple[str, str]]] = {}
    for row, why in unfit.items():
        if (row.op, row.backend) not in ran:
            refused.setdefault(row.op, []).append((row.backend, why))
    return [f"{op} not by {line}" for op, pairs in refused.items() for line in by_reason(pairs)]


def by_reason(refused: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each reason, after the names of all that share it: "a, b: why"."""
    names: dict[str, list[str]] = {}
    for name, why in refused:
        names.setdefault(why, []).append(name)
    return [f"{', '.join(those)}: {why}" for why, those in names.items()]


def _badness(result: Result) -> float:
    return math.inf if math.isnan(result.ratio) else result.ratio


def machine(device: torch.device) -> dict[str, Any]:
    """Where and on what the kernels were judged."""
    known = facts(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    return {
        "gpu": torch.cuda.get_device_name(index),
        "arch": f"sm_{known.arch}",
        "sms": known.sms,
        "driver": said("nvidia-smi", f"--id={index}", "--query-gpu=driver_version", "--format=csv,noheader"),
        "versions": versions(),
        "platform": system(),
        "commit": commit(),
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


def _refusals(rows: Sequence[Row], tasks: Sequence[Task], device: torch.device) -> dict[Row, str]:
    """Why each row does not take the first case of its op."""
    refusals: dict[Row, str] = {}
    for op in dict.fromkeys(registry.op_of(row.op) for row in rows):
        first = next(case for case, _ in tasks if case.op == op)
        posed = registry.part(op, "trial").Trial(first, device).problem
        refusals |= {row: row.refuses(posed) or "fit for no case" for row in rows if registry.op_of(row.op) == op}
    return refusals


def own_case(op: str, shape: str | None, dtype: str, options: dict[str, Any]) -> Any:
    """The case of an op that the command's options describe. Raises ValueError, TypeError or NotImplementedError."""
    if dtype not in DTYPES:
        raise ValueError(f"--dtype is one of {', '.join(DTYPES)}, not {dtype!r}")
    if shape is not None and not all(part.strip().isdigit() for part in shape.split(",")):
        raise ValueError(f"--shape takes integers separated by commas, not {shape!r}")
    numbers = None if shape is None else [int(part) for part in shape.split(",")]
    known = registry.part(op, "trial").OWN
    for name in options.keys() - set(known):
        has = ", ".join(f"--{other.replace('_', '-')}" for other in ("shape", "dtype", *known))
        raise ValueError(f"{op} has no --{name.replace('_', '-')}; it has: {has}")
    return registry.part(op, "trial").own(numbers, DTYPES[dtype], **options)


def command(
    op: Annotated[
        str | None, typer.Argument(help="An op (attention: every pass) or a pass (attention_bwd); default: everything.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Only this backend.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few cases, in about a minute.")] = False,
    record: Annotated[
        Path | None,
        typer.Option(callback=to_write, help="Write proofs: evidence/<gpu>.json; of some rows, beside what it holds."),
    ] = None,
    unproven: Annotated[bool, typer.Option("--unproven", help="Only rows that no evidence here proves.")] = False,
    shape: Annotated[
        str | None,
        typer.Option(help="Your own case; of attention (default) B,H,S,D or B,H,Hkv,Sq,Sk,D,Dv."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="f16, bf16, f32 or f64.")] = None,
    precision: Annotated[str | None, typer.Option(help="Of float32 products: tf32x3, tf32 or ieee.")] = None,
    bias: Annotated[
        str | None, typer.Option(help="bhqk, 1 where it broadcasts; then -inf, -bool, -far, -lowest: 1hqk, b11k-bool.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal")] = False,
    window: Annotated[str | None, typer.Option(help="LEFT,RIGHT; -1 is unbounded.")] = None,
    softcap: Annotated[float | None, typer.Option()] = None,
    scale: Annotated[
        float | None, typer.Option(help="Of scores, 1 / sqrt(head_dim) by default; of route's weights.")
    ] = None,
    sinks: Annotated[bool, typer.Option("--sinks")] = False,
    kv_lens: Annotated[bool, typer.Option("--kv-lens", help="Ragged keys in a padded batch.")] = False,
    varlen: Annotated[bool, typer.Option("--varlen", help="Packed sequences of random lengths up to S.")] = False,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: a GPU if there is one.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default 8 on a GPU, 1 elsewhere.")] = None,
) -> None:
    """Hold every kernel against float64 on this machine: values, gradients, second gradients, tangents.

    A kernel may err at most twice what PyTorch errs in the same precision, plus a rounding floor. Exits with 1 if one
    does not pass. On a CPU, Triton's kernels are judged too under TRITON_INTERPRET=1.
    """
    console = Console()
    # huge cases need most of the memory: no holes may be left in it; read when CUDA starts, also by processes
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    try:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if where.type not in ("cuda", "cpu") or where.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"no device {where}; see `adatom doctor`")
    except RuntimeError as error:
        raise typer.BadParameter(str(error).splitlines()[0], param_hint="--device") from None
    given = {"precision": precision, "bias": bias, "causal": causal, "window": window, "softcap": softcap}
    options = {k: v for k, v in {**given, "sinks": sinks, "kv_lens": kv_lens, "varlen": varlen}.items() if v}
    options |= {} if scale is None else {"scale": scale}
    own = bool(shape or dtype or options)
    if record is not None and (where.type != "cuda" or own or quick):
        raise typer.BadParameter("evidence takes a GPU and all cases of an op", param_hint="--record")
    op = op or ("attention" if own else None)
    try:
        rows = rows_of(op, backend)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="op") from None
    if not rows:
        known = ", ".join(dict.fromkeys(row.backend for row in rows_of(op)))
        raise typer.BadParameter(
            f"no backend {backend!r} for {op or 'any op'}; there are: {known}", param_hint="--backend"
        )
    if unproven:
        records = evidence.read()
        rows = tuple(r for r in rows if evidence.on_gpu(r.target) and not evidence.proven(*r[:3], records))
        if not rows:
            console.print("every row is proven by evidence/")
            return
    try:
        todo = [(own_case(op, shape, dtype or "f32", options), rows)] if own and op else tasks_of(rows, where, quick)
        judged = {(row.op, row.backend) for row in rows}
        kept = [] if record is None else evidence.beside(record, machine(where), judged)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise typer.BadParameter(str(error)) from None
    processes = jobs or (min(8, len(os.sched_getaffinity(0)), len(todo)) if where.type == "cuda" else 1)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{op or 'everything'} on {where.type}", total=len(todo))

        def done(some: list[Result]) -> None:
            progress.advance(task)
            for result in some:
                if not result.ok:
                    line = f"{result.op} {result.backend}, {result.case}: {result.output} {result.problem}"
                    progress.console.print(escape(line), style="red", highlight=False, soft_wrap=True)

        results = judge_all(todo, where, processes, done)
    console.print(table(results, rows))
    for line in absent(results, _refusals(rows, todo, where)):
        console.print(escape(line), style="dim", highlight=False, soft_wrap=True)
    console.print("worst: error / allowed error, which PyTorch's own error in the same precision sets")
    if record is not None:
        evidence.write(record, machine(where), [*kept, *proofs(results, rows)])
        console.print(f"wrote {record}")
    if not results:
        console.print("nothing ran", style="red")
    if not results or not all(result.ok for result in results):
        raise typer.Exit(1)
