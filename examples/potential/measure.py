"""Time and memory of a step of force training, beside the same model on PyTorch's dense attention.

    python measure.py --out potential.json --plot potential.png    # on a GPU

The crystal is MgO, rattled: the densest of the training set, so the one with the most neighbours.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from adatom.bench.science import CELLS, inference, magnesia, step
from adatom.bench.timing import Clock, Timing, interleave, peak_bytes
from adatom.potential.graph import graph
from adatom.potential.model import Potential, fused, plain


def compare(atoms: int, device: torch.device, milliseconds: float, **options: Any) -> list[dict[str, Any]]:
    """Median times and peak memory beyond model and data, of both models in turns."""
    torch.manual_seed(0)
    model, other = (Potential(**options, attend=attend).to(device) for attend in (fused, plain))
    other.load_state_dict(model.state_dict())
    g = graph([magnesia(CELLS[atoms])], *model.sees).to(device, torch.float32)
    target = torch.randn(atoms, 3, device=device)
    rows = []
    for phase, make in (("training", lambda m: step(m, g, target)), ("forces", lambda m: inference(m, g))):
        jobs = {"adatom": make(model), "sdpa_math": make(other)}
        for name, timed in interleave(jobs, Clock(device), milliseconds).items():
            row: dict[str, Any] = {"atoms": atoms, "slots": g.others.shape[1], "phase": phase, "contender": name}
            if isinstance(timed, dict):
                [timing] = timed.values()
                assert isinstance(timing, Timing)
                row |= {"ms": timing.ms, "low": timing.low, "high": timing.high}
                row["peak_bytes"] = peak_bytes(jobs[name], device)
            else:
                row["reason"] = f"{type(timed).__name__}: {timed}".splitlines()[0]
            rows.append(row)
    return rows


def plot(path: Path, rows: list[dict[str, Any]]) -> None:
    """Time and memory of a training step against atoms."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.2))
    for name in ("adatom", "sdpa_math"):
        mine = [r for r in rows if r["contender"] == name and r["phase"] == "training" and "ms" in r]
        for axis, key, unit in ((axes[0], "ms", 1), (axes[1], "peak_bytes", 1e9)):
            axis.loglog([r["atoms"] for r in mine], [r[key] / unit for r in mine], "o-", markersize=4, label=name)
    axes[0].set(xlabel="atoms", ylabel="ms", title="a step of force training")
    axes[1].set(xlabel="atoms", ylabel="GB", title="its peak memory")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main(
    out: Annotated[Path | None, typer.Option(help="Write the rows as JSON.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Write a plot.")] = None,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    atoms: Annotated[list[int], typer.Option(help=f"Of {', '.join(map(str, CELLS))}.")] = [256, 1024, 4096],  # noqa: B006
    milliseconds: float = 400.0,
) -> None:
    """Print step times, memory and their ratios."""
    if unknown := set(atoms) - set(CELLS):
        raise typer.BadParameter(f"crystals have {', '.join(map(str, CELLS))} atoms; got {sorted(unknown)}")
    rows = []
    for n in atoms:
        rows += compare(n, torch.device(device), milliseconds)
        for phase in ("training", "forces"):
            ours, theirs = (r for r in rows if r["atoms"] == n and r["phase"] == phase)
            line = f"{n:6d} atoms, {ours['slots']} slots, {phase}:"
            for r in (ours, theirs):
                told = f"{r['ms']:.1f} ms, {r['peak_bytes'] / 1e9:.3f} GB" if "ms" in r else r["reason"]
                line += f" {r['contender']} {told};"
            if "ms" in ours and "ms" in theirs:
                line += f" {theirs['ms'] / ours['ms']:.2f}x faster,"
                line += f" {theirs['peak_bytes'] / ours['peak_bytes']:.2f}x less memory"
            print(line, flush=True)
    if out is not None:
        out.write_text(json.dumps(rows, indent=1) + "\n")
    if picture is not None:
        plot(picture, rows)


if __name__ == "__main__":
    typer.run(main)
