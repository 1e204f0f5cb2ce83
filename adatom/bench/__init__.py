"""`adatom bench`: adatom's kernels beside every installed rival."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from adatom.bench import run, science
from adatom.bench import tune as tuning
from adatom.bench.report import heading, host_sheet, plot, sheets, tables
from adatom.bench.rivals import OWN, every, installed, select
from adatom.bench.timing import Clock, interleave, peak_bytes, slowed
from adatom.device import facts
from adatom.records import to_write
from adatom.registry import PASSES, rows
from adatom.verify import by_reason

__all__ = ["command", "interleave", "peak_bytes", "plot", "tables"]

_HANG = 300  # seconds after which a case that has not ended is taken to hang


def command(
    op: Annotated[str | None, typer.Argument(help="The op to time, or science; default: every op.")] = None,
    rivals: Annotated[
        str, typer.Option(help="all, none, or names separated by commas; adatom:triton, adatom:hopper: its backends.")
    ] = "all",
    group: Annotated[list[str] | None, typer.Option(help="Only this group of cases; repeatable.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only cases with this (in their) name; repeatable.")] = None,
    backend: Annotated[str | None, typer.Option(help="Only this backend of adatom; or deterministic.")] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            callback=to_write,
            help="Write all results to this JSON file after each case, beside those of other cases in it.",
        ),
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", callback=to_write, help="Write a plot: .svg or .png.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu; default: a GPU if there is one.")] = None,
    quick: Annotated[bool, typer.Option(help="The first case of each group, briefly.")] = False,
    steady: Annotated[
        bool, typer.Option("--steady", help="Without pauses, as in long training: turns of some 300 ms.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Refuse kernels that are not right.")] = True,
    tune: Annotated[
        bool, typer.Option("--tune", help="Search tile configurations; --group fwd or 'fwd half 64'.")
    ] = False,
    budget: Annotated[float, typer.Option(min=0, help="Start no new case after this many seconds.")] = 350.0,
    from_file: Annotated[
        Path | None, typer.Option("--tables", exists=True, help="Print the tables of a results file.")
    ] = None,
) -> None:
    """Time adatom beside every installed rival: speed, share of the ceilings, memory, host time.

    `adatom bench science`: force training against atoms, pair bias and triangle attention against length, second
    derivatives and forward mode; --plot draws time and memory.
    """
    console = Console()
    if from_file is not None:
        if op or group or case or plot_file or record:
            raise typer.BadParameter(
                "--tables prints all of a file; it takes no op, --group, --case, --plot or --record"
            )
        typer.echo(tables(_results(from_file)), nl=False)
        return
    try:
        if op is not None and op not in (*PASSES, "science"):
            raise ValueError(f"no op {op!r}; there are: {', '.join(PASSES)}, and science")
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if where.type not in ("cuda", "cpu") or where.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"no device {where}; see `adatom doctor`")
        mine = PASSES if op is None else ("attention" if op == "science" else op,)
        known = dict.fromkeys(row.backend for o in mine for p in PASSES[o] for row in rows(p))
        if backend not in (None, "deterministic", *known):
            raise ValueError(f"no backend {backend!r}; there are: {', '.join(known)}, and deterministic")
        chosen = select(rivals)
        if tune and (where.type != "cuda" or op not in (None, "attention")):
            raise ValueError("--tune needs a GPU, and knows the kernels of attention only")
        if tune and case:
            raise ValueError("--tune has no cases; --group says which kernels")
        if tune and steady:
            raise ValueError("--tune times calls with pauses")
        keys = tuning.keys(group or []) if tune else []
        work = {} if tune else run.groups(where, group or [], quick, op, case or ())
        if plot_file is not None and plot_file.suffix not in (".svg", ".png"):
            raise ValueError(f"--plot writes .svg or .png, not {plot_file.name}")
    except (ValueError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from None
    if tune:
        _tune(console, keys, where, budget, record)
        return
    missing = ((rival.name, installed(rival)[1]) for rival in every() if rival.name in chosen)
    for line in by_reason(pair for pair in missing if pair[1]):
        console.print(line, style="dim", highlight=False, soft_wrap=True)
    began = time.monotonic()
    by_name = rivals not in ("all", "none")
    old = _results(record) if record is not None and record.exists() else None

    def save(result: dict[str, Any]) -> None:
        whole = result if old is None else run.merged(old, result)
        if result["entries"] or old is None:
            _write(whole, record)

    with torch.cuda.device(where) if where.type == "cuda" else nullcontext():
        result = _bench(console, work, chosen, by_name, where, backend, quick, steady, verify, budget, save)
    save(result)
    if plot_file is not None:
        plot(result, plot_file)
    console.print(f"[dim]{time.monotonic() - began:.0f} s[/]" + (f", written to {record}" if record else ""))
    if any(e["contender"] == "adatom" and "reason" in e for e in result["entries"]):
        console.print("[red]adatom failed in some cases; the tables say how[/]")
        raise typer.Exit(1)


def _bench(
    console: Console,
    work: dict[str, tuple[Any, ...]],
    rivals: tuple[str, ...],
    by_name: bool,
    where: torch.device,
    backend: str | None,
    quick: bool,
    steady: bool,
    verify: bool,
    budget: float,
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Run the cases group by group, printing each group's tables and saving the record as they come."""
    began = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    skipped: list[str] = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("ceilings", total=sum(map(len, work.values())) + 1)
        record, clock = run.start(where, steady)
        try:
            save(record)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        console.print(heading(record), style="dim", highlight=False)
        if any(case.op == "attention" for cases in work.values() for case in cases):
            record["host_case"], record["host"] = run.host(where, backend)
        progress.advance(task)
        for group, cases in work.items():
            for case in cases:
                progress.update(task, description=f"{group}: {escape(case.name)}")
                if time.monotonic() - began > budget:
                    skipped.append(f"{group} {case.name}")
                    continue
                faulthandler.dump_traceback_later(_HANG, exit=True, file=sys.__stderr__ or sys.stderr)
                spent = 20.0 if quick else 80.0
                try:
                    if isinstance(case, science.Crystal):
                        record["entries"] += science.compare(case, rivals, clock, 5 * spent, backend, verify)
                        save(record)
                        progress.advance(task)
                        continue
                    problem = run.Problem(case, where)
                    refused = run.unproven(problem, group, backend) if verify else None
                    contenders = run.wanted(case, group, rivals, by_name)
                    for name in [n for n in contenders if verify and n.startswith(OWN)]:
                        if why := run.unproven(problem, group, name.removeprefix(OWN)):
                            contenders[name] = run.refusing(why)
                    record["entries"] += run.compare(
                        problem, group, contenders, clock, record["ceilings"], spent, backend, refused
                    )
                    del problem
                    clock.wait()  # a crash on the GPU shows here at the latest
                except torch.cuda.OutOfMemoryError:
                    entry = {"group": group, "case": case.name, "pass": "all", "contender": "adatom"}
                    record["entries"].append({**entry, "reason": "out of memory"})
                except RuntimeError as error:
                    console.print(
                        f"[red]{escape(case.name)}: {escape(run.reason(error))}; nothing more can run here.[/]"
                    )
                    save(record)
                    raise typer.Exit(1) from None
                finally:
                    faulthandler.cancel_dump_traceback_later()
                save(record)
                progress.advance(task)
            if why := slowed(clock, record["ceilings"]):
                record["slowed"] = {**record.get("slowed", {}), group: why}
                save(record)
                console.print(f"[yellow]{group}: {why}: this GPU is throttled, and its times mean nothing[/]")
            for sheet in sheets(record, group) if any(e["group"] == group for e in record["entries"]) else []:
                console.print(sheet.rich(), soft_wrap=False)
    if record["host"]:
        console.print(host_sheet(record).rich())
    if skipped:
        console.print(f"[yellow]not run, {budget:.0f} s were up (--budget): {escape(', '.join(skipped))}[/]")
    record["skipped"] = skipped
    return record


def _tune(console: Console, keys: list[tuning.Key], where: torch.device, budget: float, file: Path | None) -> None:
    """Compile the candidates of all keys, then time them; print the rows for the kernel files."""
    began, arch = time.monotonic(), facts(where).arch
    jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found: list[tuning.Found] = []
    todo: dict[tuning.Key, list[Any]] = {}
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("compiling", total=len(keys))
        for key in keys:
            progress.update(task, description=f"compiling {key}")
            if time.monotonic() - began < budget / 2:
                todo[key] = tuning.viable(key, arch, tuning.candidates(key, arch), jobs)
            progress.advance(task)
        with torch.cuda.device(where):
            clock = Clock(where)
            task = progress.add_task("timing", total=len(todo))
            for key, configs in todo.items():
                progress.update(task, description=f"timing {key}")
                if time.monotonic() - began < budget:
                    found.append(tuning.search(key, clock, configs))
                    _write(tuning.record(found, run.device_name(where)), file)
                progress.advance(task)
    console.print(tuning.table(found))
    missing = [str(key) for key in keys if key not in [f.key for f in found]]
    if missing:
        console.print(f"[yellow]not tuned, {budget:.0f} s were up (--budget): {', '.join(missing)}[/]")


def _results(file: Path) -> dict[str, Any]:
    """What --record wrote to a file; BadParameter for a file that holds anything else."""
    try:
        found: Any = json.loads(file.read_text())
    except (OSError, ValueError):
        found = {}
    if not isinstance(found, dict) or not {"entries", "ceilings", "versions"} <= found.keys():
        raise typer.BadParameter(f"{file} holds no results of `adatom bench --record`")
    return dict(found)


def _write(record: dict[str, Any], file: Path | None) -> None:
    """Replace what a file holds at once: whoever is killed here leaves the old content or the new."""
    if file is not None:
        file = file.resolve()  # where a link points, not the link
        beside = file.with_name(f"{file.name}.part")
        beside.write_text(json.dumps(record, indent=1) + "\n")
        beside.replace(file)
