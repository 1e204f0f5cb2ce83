"""Train the potential and show what it learned.

python train.py                # small: under a minute on a CPU
python train.py --mode full    # all eight elements; for a GPU
python train.py --resume runs/full/checkpoint.pt    # --steps and --seconds: further than it was to go
"""

import json
import pickle
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from adatom.potential.fit import FULL, SMALL, SPLITS, Data, Errors, Plan, State, calibrate, errors, fit, load, predict
from adatom.potential.model import Potential, Prediction, plain

MODES = {"small": SMALL, "full": FULL}


def save(path: Path, model: Potential, options: dict[str, Any], plan: Plan, state: State) -> None:
    """Written whole or not at all."""
    content = {"options": options, "plan": plan._asdict(), "model": model.state_dict(), "state": state._asdict()}
    torch.save(content, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def restore(path: Path, device: torch.device | str = "cpu") -> tuple[Potential, dict[str, Any], Plan, State]:
    """What `save` wrote. Raises typer.BadParameter for what it did not."""
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        options, weights = content["options"], content["model"]
        plan, state = Plan(**content["plan"]), State(**content["state"])
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError) as error:
        raise typer.BadParameter(f"{path} is no checkpoint of train.py ({type(error).__name__})") from error
    model = Potential(**options).to(device)
    model.load_state_dict(weights)
    return model, options, plan, state


def plot(path: Path, state: State, parity: dict[str, tuple[Data, Prediction]]) -> None:
    """Learning curve, and predicted against labelled forces of each split, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 1 + len(parity), figsize=(3.6 * (1 + len(parity)), 3.4))
    steps, forces, energies = zip(*state.history)
    axes[0].semilogy(steps, forces, "o-", markersize=3, label="forces, meV/Å")
    axes[0].semilogy(steps, energies, "o-", markersize=3, label="energy, meV/atom")
    axes[0].set(xlabel="step", title="mean absolute error, test")
    axes[0].legend(frameon=False)
    for axis, (name, (data, found)) in zip(axes[1:], parity.items()):
        x, y = data.forces.flatten().cpu(), found.forces.flatten().cpu()
        ends = [float(x.min()), float(x.max())]
        axis.plot(ends, ends, color="0.7", linewidth=1)
        axis.plot(x, y, ".", markersize=1, rasterized=True)
        axis.set(xlabel="label, eV/Å", ylabel="predicted, eV/Å", title=f"forces, {name}")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def table(found: dict[str, Errors]) -> Table:
    made = Table(title="mean absolute errors; in brackets: of no forces and the best energy of each element")
    for column in ("split", "energy, meV/atom", "forces, meV/Å", "their deviation", "stress, GPa"):
        made.add_column(column, justify="left" if column == "split" else "right")
    for name, e in found.items():
        made.add_row(
            name,
            f"{e.energy:.1f} ({e.trivial_energy:.0f})",
            f"{e.force:.1f} ({e.trivial_force:.0f})",
            f"{e.deviation:.0f}",
            f"{e.stress:.2f} ({e.trivial_stress:.1f})" if e.stress == e.stress else "-",
        )
    return made


def report(path: Path, state: State, seconds: float, start: dict[str, Errors], end: dict[str, Errors]) -> None:
    """Speed, learning curve, and errors before and after, as JSON."""

    def told(found: dict[str, Errors]) -> dict[str, Any]:
        return {name: {k: v if v == v else None for k, v in e._asdict().items()} for name, e in found.items()}

    content = {
        "steps": state.step,
        "seconds of this run": seconds,
        "curve": [dict(zip(("step", "force", "energy"), point)) for point in state.history],
        "pairs only": told(start),
        "trained": told(end),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def main(
    mode: Annotated[str, typer.Option(help="small or full.")] = "small",
    out: Annotated[Path | None, typer.Option(help="Folder of results; default runs/MODE, or that of --resume.")] = None,
    device: Annotated[str | None, typer.Option(help="Default: a GPU if there is one.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of the mode's.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1e-3, help="Train for so long instead of the mode's time.")
    ] = None,
    seed: int = 0,
    resume: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A checkpoint to go on from.")
    ] = None,
    reference: Annotated[bool, typer.Option(help="PyTorch's dense attention instead of adatom's.")] = False,
) -> None:
    """Fit energies, forces and stresses, and report errors on what was held out."""
    console = Console()
    if mode not in MODES:
        raise typer.BadParameter(f"modes are {', '.join(MODES)}; got {mode}")
    plan, options = MODES[mode]
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("PyTorch sees no CUDA device")
    out = out or (Path("runs") / mode if resume is None else resume.parent)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    state = None
    if resume is None:
        plan, model = plan._replace(seed=seed), Potential(**options).to(where)
    else:
        model, options, plan, state = restore(resume, where)
    plan = plan._replace(
        steps=plan.steps if steps is None else steps, seconds=plan.seconds if seconds is None else seconds
    )
    if reference:
        model.attend = plain
    console.print(f"{sum(p.numel() for p in model.parameters())} parameters on {where}; reading crystals")
    data = {name: load(name, model).to(where) for name in SPLITS}
    start = {}
    if state is None:
        calibrate(model, data["train"])
        start = {n: errors(model, data[n], same_zero=n != "dft") for n in SPLITS[1:]}
    validation = data["test"].select(torch.arange(min(64, len(data["test"].energies))))
    began = time.monotonic()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        task = progress.add_task("fitting", total=plan.steps)

        def advance(now: State) -> None:
            progress.update(task, completed=now.step)
            if now.history and now.history[-1][0] == now.step:
                told = f"forces to {now.history[-1][1]:.0f} meV/Å"
                progress.update(task, description=f"fitting: {told}")
                if not console.is_terminal:
                    console.print(f"{now.step} steps, {time.monotonic() - began:.0f} s: {told}")
                save(out / "checkpoint.pt", model, options, plan, now)

        state = fit(model, data["train"], validation, plan, advance, state)
    taken = time.monotonic() - began
    save(out / "checkpoint.pt", model, options, plan, state)
    console.print(f"{state.step} steps in {taken:.0f} s")
    found = {name: predict(model, data[name]) for name in SPLITS[1:]}
    end = {n: errors(model, data[n], p, same_zero=n != "dft") for n, p in found.items()}
    console.print(table({f"{n}, pairs only": e for n, e in start.items()} | end))
    report(out / "report.json", state, taken, start, end)
    plot(out / "report.png", state, {n: (data[n], p) for n, p in found.items()})
    console.print(f"wrote {out / 'checkpoint.pt'}, {out / 'report.png'} and {out / 'report.json'}")


if __name__ == "__main__":
    typer.run(main)
