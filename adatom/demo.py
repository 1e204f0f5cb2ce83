"""`adatom demo`: the main job from end to end in about a minute: force fields whose attention is differentiated twice.

Positions give distances, distances give a learned bias, two layers of attention give an energy, its derivative gives
forces, and the forces are fitted: the gradient of that loss is a second derivative of attention. It is checked against
dense attention in float64, and timed beside what one would use instead. Then adatom.potential, a potential for ionic
crystals, is fitted for a while and judged on crystals that it has not seen.
"""

from __future__ import annotations

import html
import io
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import adatom
from adatom import doctor
from adatom.bench import run
from adatom.bench.report import Sheet, sheets
from adatom.bench.rivals_attention import RIVALS
from adatom.bench.timing import Clock
from adatom.device import versions
from adatom.ops.attention.cases import F32, Case
from adatom.potential import fit as crystals
from adatom.potential.model import Potential
from adatom.records import to_write

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

SYSTEMS, ATOMS, HEADS, DIM, LAYERS, RADIAL = 4, 24, 4, 16, 2, 8
STEPS, FIT_SECONDS = 60, 8.0
CRYSTAL_SECONDS = {"cpu": 24.0, "cuda": 12.0}  # of training
CRYSTAL_SLOTS = {"cpu": 8, "cuda": 96}  # a multiple; 96 is room for all, so that kernels are compiled once
SIZES = {"cpu": (128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}


class Accuracy(NamedTuple):
    """Relative L2 errors against dense attention in float64: adatom's, and dense float32's on the same inputs."""

    quantity: str
    error: float
    dense: float

    @property
    def ok(self) -> bool:
        """At most twice what float32 itself errs, plus rounding. NaN is not."""
        return self.error <= 2 * self.dense + 1e-6


class Fit(NamedTuple):
    """Loss of each training step, and the forces (systems, atoms, 3) that were wanted and that came out at the end."""

    losses: list[float]
    wanted: Tensor
    forces: Tensor


# The toy force field -----------------------------------------------------------------------------------------------


def parameters(device: torch.device) -> dict[str, Tensor]:
    """Random float32 parameters: the same on every device."""
    random = torch.Generator().manual_seed(0)
    width = HEADS * DIM

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=random) / shape[-1] ** 0.5).to(device).requires_grad_()

    each = {f"qkv{i}": normal(3 * width, width) for i in range(LAYERS)}
    each |= {f"bias{i}": normal(HEADS, RADIAL) for i in range(LAYERS)}
    return {"embed": normal(ATOMS, width), **each, "readout": normal(1, width)}


def positions(device: torch.device) -> Tensor:
    """Float32 (systems, atoms, 3): a jittered grid, so that no two atoms coincide."""
    random = torch.Generator().manual_seed(1)
    grid = torch.cartesian_prod(*(torch.arange(3.0) for _ in range(3)))[:ATOMS]
    return (grid + 0.15 * torch.randn(SYSTEMS, ATOMS, 3, generator=random)).to(device)


def distances(x: Tensor) -> Tensor:
    """(systems, atoms, atoms), differentiable on the diagonal too."""
    return ((x[:, :, None] - x[:, None]).square().sum(-1) + 1e-2).sqrt()


def energy(x: Tensor, p: dict[str, Tensor], attend: Attend) -> Tensor:
    """Energies (systems,) of positions x (systems, atoms, 3)."""
    centres = torch.linspace(0.5, 3.5, RADIAL, device=x.device, dtype=x.dtype)
    radial = torch.exp(-2 * (distances(x)[..., None] - centres).square())
    h = p["embed"].expand(x.shape[0], -1, -1)
    for i in range(LAYERS):
        q, k, v = (h @ p[f"qkv{i}"].T).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        bias = torch.einsum("sijr,hr->shij", radial, p[f"bias{i}"])
        h = h + attend(q, k, v, bias).transpose(1, 2).flatten(-2)
    return torch.tanh(h @ p["readout"].T).sum((-1, -2))


def forces(x: Tensor, p: dict[str, Tensor], attend: Attend, create_graph: bool = True) -> tuple[Tensor, Tensor]:
    """Energies, and forces -dE/dx (systems, atoms, 3)."""
    x = x.detach().requires_grad_()
    e = energy(x, p, attend)
    return e, -torch.autograd.grad(e.sum(), x, create_graph=create_graph)[0]


def target(x: Tensor) -> Tensor:
    """The forces to learn: those of a Morse potential between all pairs."""
    x = x.detach().requires_grad_()
    well = (1 - torch.exp(-1.5 * (distances(x) - 1.1))).square()
    return -torch.autograd.grad(0.05 * well.sum(), x)[0]


def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    out = adatom.attention(q, k, v, bias=bias)
    assert isinstance(out, Tensor)  # a pair only with return_lse
    return out


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The same by hand, quadratic in memory."""
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias, -1) @ v


def _derivatives(dtype: torch.dtype, device: torch.device, attend: Attend) -> dict[str, Tensor]:
    p = {name: value.detach().to(dtype).requires_grad_() for name, value in parameters(device).items()}
    x = positions(device).to(dtype)
    e, f = forces(x, p, attend)
    loss = (f - target(x)).square().mean()
    grads = torch.autograd.grad(loss, list(p.values()))
    return {"energy": e.detach(), "forces": f.detach(), **{f"d loss / d {name}": g for name, g in zip(p, grads)}}


def accuracy(device: torch.device, attend: Attend = ours) -> list[Accuracy]:
    """Energy, forces and the force-matching gradient of every parameter, against dense attention in float64."""
    truth = _derivatives(torch.float64, device, dense)
    plain = _derivatives(torch.float32, device, dense)
    got = _derivatives(torch.float32, device, attend)

    def apart(a: Tensor, b: Tensor) -> float:
        return float((a.double() - b).norm() / b.norm())

    return [Accuracy(name, apart(got[name], value), apart(plain[name], value)) for name, value in truth.items()]


def fit(device: torch.device, seconds: float = FIT_SECONDS, advance: Callable[[], None] = lambda: None) -> Fit:
    """Fit the forces by Adam: STEPS steps, or fewer (but at least two) if `seconds` are up."""
    began = time.monotonic()
    p, x = parameters(device), positions(device)
    wanted = target(x)
    optimizer = torch.optim.Adam(p.values(), lr=2e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (forces(x, p, ours)[1] - wanted).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        advance()
        if len(losses) > 1 and time.monotonic() - began > seconds:
            break
    return Fit(losses, wanted.cpu(), forces(x, p, ours, create_graph=False)[1].detach().cpu())


# A potential for crystals --------------------------------------------------------------------------------------------


class Crystals(NamedTuple):
    """How the potential was fitted, and its errors and forces on the splits that were held out."""

    structures: int
    state: crystals.State
    start: dict[str, crystals.Errors]  # of the pair potential that the fit starts from
    errors: dict[str, crystals.Errors]
    forces: dict[str, tuple[Tensor, Tensor]]  # of the labels and of the potential, (atoms, 3)


def fit_crystals(device: torch.device, seconds: float, advance: Callable[[], None] = lambda: None) -> Crystals:
    """Fit adatom.potential to labelled crystals for so long: on a CPU a small model, to alkali halides only."""
    large = device.type == "cuda"
    plan, options = crystals.FULL if large else crystals.SMALL
    plan = plan._replace(seconds=seconds)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))  # tiny products: threads that wait for each other cost the most
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Potential(**options).to(device)
        slots = CRYSTAL_SLOTS[device.type]
        train = crystals.load("train", model, None, slots).to(device)
        held = {name: crystals.load(name, model, 24, slots).to(device) for name in crystals.SPLITS[1:]}
        crystals.calibrate(model, train)
        start = {name: crystals.errors(model, data, same_zero=name != "dft") for name, data in held.items()}
        state = crystals.fit(model, train, held["test"], plan, lambda _: advance())
        state.history.insert(0, (0, start["test"].force, start["test"].energy))
        found = {name: crystals.predict(model, data) for name, data in held.items()}
        errors = {n: crystals.errors(model, held[n], f, same_zero=n != "dft") for n, f in found.items()}
    finally:
        torch.set_num_threads(threads)
    pairs = {name: (held[name].forces.cpu(), f.forces.cpu()) for name, f in found.items()}
    return Crystals(len(train.energies), state, start, errors, pairs)


TOLD = {"test": "known crystals, shaken anew", "unseen": "unknown crystals", "dft": "KCl, by DFT"}
CRYSTAL_HEADER = ["mean absolute error on", "forces, meV/Å", "energy, meV/atom"]


def crystal_rows(found: Crystals) -> list[list[str]]:
    """A table of the errors: of a trivial model, of the best pair potential, and of the potential."""
    rows = []
    for name, e in found.errors.items():
        pair = found.start[name]
        force = f"{e.trivial_force:.0f} > {pair.force:.0f} > {e.force:.0f}"
        rows.append([TOLD[name], force, f"{e.trivial_energy:.1f} > {pair.energy:.1f} > {e.energy:.1f}"])
    return rows


# Beside the others -------------------------------------------------------------------------------------------------


def race(device: torch.device, seconds: float, advance: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """A bench record: all three orders of derivatives at growing lengths; none but the first starts after `seconds`."""
    clock, began = Clock(device), time.monotonic()
    contenders = {r.name: r.bind for r in RIVALS if r.name in ("sdpa_math", "dense")}
    record: dict[str, Any] = {"kind": device.type, "entries": [], "host": []}
    peaks = {"fp32 matmul": 1.0, "copy": 1.0}  # no share of a ceiling is shown here
    for s in SIZES[device.type]:
        if s == SIZES[device.type][0] or time.monotonic() - began < seconds:
            case = Case(str(s), 1, 4, 4, s, s, 64, 64, F32)
            record["entries"] += run.compare(run.Problem(case, device), "second", contenders, clock, peaks, 200.0)
        advance()
    return record


# The report --------------------------------------------------------------------------------------------------------


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def plots(fitted: Fit, crystal: Crystals, record: dict[str, Any]) -> list[str]:
    """SVG pictures: the two fits, and time and memory against length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    left.semilogy(fitted.losses)
    left.set(xlabel="step", ylabel="mean squared force error", title="fitting forces through attention")
    wanted, got = fitted.wanted.flatten().tolist(), fitted.forces.flatten().tolist()
    ends = [min(wanted), max(wanted)]
    right.plot(ends, ends, color="0.7", linewidth=1)
    right.plot(wanted, got, ".", markersize=3)
    right.set(xlabel="wanted force", ylabel="fitted force", title="each component of each force")
    third, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    timed = [e for e in record["entries"] if "ms" in e]
    for name in dict.fromkeys(e["contender"] for e in timed):
        mine = [e for e in timed if e["contender"] == name]
        lengths = list(dict.fromkeys(int(e["case"]) for e in mine))
        total = [sum(e["ms"] for e in mine if e["case"] == str(n)) for n in lengths]
        peak = [max(e["peak_bytes"] for e in mine if e["case"] == str(n)) / 1e6 for n in lengths]
        left.loglog(lengths, total, "o-", label=name, markersize=4)
        right.loglog(lengths, peak, "o-", label=name, markersize=4)
    left.set(xlabel="length", ylabel="ms", title="forward + backward + double backward")
    right.set(xlabel="length", ylabel="MB beyond inputs", title="peak memory")
    left.legend(frameon=False)
    for axis in (left, right):
        ticks = list(dict.fromkeys(int(e["case"]) for e in timed))
        axis.set_xticks(ticks, [str(n) for n in ticks])
        axis.minorticks_off()
    pictures = []
    for figure in (first, _crystal_plot(pyplot, crystal), third):
        figure.tight_layout()
        pictures.append(_svg(figure))
        pyplot.close(figure)
    return pictures


def _crystal_plot(pyplot: Any, found: Crystals) -> Any:
    """The learning curve, and the parity of forces on crystals that were held out."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    steps, force, energy = zip(*found.state.history)
    left.semilogy(steps, force, "o-", markersize=3, label="forces, meV/Å")
    left.semilogy(steps, energy, "o-", markersize=3, label="energy, meV/atom")
    left.set(xlabel="step", title="mean absolute error, known crystals shaken anew")
    left.legend(frameon=False)
    for name, (labels, predicted) in found.forces.items():
        right.plot(labels.flatten().tolist(), predicted.flatten().tolist(), ".", markersize=2, label=TOLD[name])
    ends = (
        [float(labels.min()) for labels, _ in found.forces.values()],
        [float(labels.max()) for labels, _ in found.forces.values()],
    )
    right.plot([min(ends[0]), max(ends[1])], [min(ends[0]), max(ends[1])], color="0.7", linewidth=1, zorder=0)
    right.set(xlabel="label, eV/Å", ylabel="predicted, eV/Å", title="forces held out")
    right.legend(frameon=False)
    return figure


_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .8rem;border-bottom:1px solid #ddd;text-align:left}
pre{background:#f4f4f4;padding:1rem;overflow:auto}svg{max-width:100%;height:auto}.bad{color:#b00;font-weight:bold}"""

_CODE = """bias = radial(distances(x)) @ weights            # learned, needs a gradient
e = model(x, adatom.attention(q, k, v, bias=bias)).sum()
f = -torch.autograd.grad(e, x, create_graph=True)[0]
((f - wanted) ** 2).mean().backward()            # differentiates attention twice"""


def _table(header: list[str], rows: list[list[str]]) -> str:
    def line(tag: str, cells: list[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell.replace('**', ''))}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line("th", header) + "".join(line("td", row) for row in rows) + "</table>"


def page(
    facts: list[tuple[str, str]],
    checks: list[dict[str, str]],
    errors: list[Accuracy],
    crystal: list[list[str]],
    sheet: Sheet,
    pictures: list[str],
    device: str,
) -> str:
    """One self-contained HTML page: no scripts, no links to anything it needs."""
    fine = all(e.ok for e in errors) and all(c["state"] != "broken" for c in checks)
    verdict = "every check passed" if fine else '<span class="bad">a check failed</span>'
    accurate = [[e.quantity, f"{e.error:.1e}", f"{e.dense:.1e}", "yes" if e.ok else "NO"] for e in errors]
    states = [[c["state"], c["name"], c["detail"], c["cure"]] for c in checks]
    parts = [
        f"<h1>adatom demo</h1><p>On {html.escape(device)}: {verdict}.</p>",
        "<h2>This machine</h2>" + _table(["", ""], [list(f) for f in facts]),
        _table(["", "check", "found", "cure"], states),
        "<h2>Forces through attention</h2><p>Positions give a learned bias, attention gives an energy, its derivative "
        "gives forces, and fitting forces differentiates attention a second time:</p>"
        f"<pre>{html.escape(_CODE)}</pre>{pictures[0]}",
        "<h2>Against float64</h2><p>Relative error of each quantity, beside that of dense attention in float32.</p>"
        + _table(["quantity", "adatom", "dense float32", "within twice"], accurate),
        "<h2>Crystals</h2><p>A potential whose neighbours attend to each other (adatom.potential), fitted for a short "
        "while to energies, forces and stresses of ionic crystals. Its labels are those of CHGNet, a pretrained "
        "potential, except for KCl supercells with forces from density functional theory. Errors: of a trivial model "
        "(no forces, the best energy of each element), of the best pair potential, which the fit starts from, and of "
        "the potential.</p>" + pictures[1] + _table(CRYSTAL_HEADER, crystal),
        "<h2>Speed and memory</h2><p>Forward, backward and double backward in one step; 4 heads of 64, float32.</p>"
        + pictures[2]
        + _table(["length", *sheet.header[1:]], sheet.rows),
        f"<p>{html.escape('; '.join(sheet.notes))}</p>" if sheet.notes else "",
    ]
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>adatom demo</title><style>{_STYLE}</style>'
    )
    return f"{head}</head><body>{''.join(parts)}</body></html>\n"


def command(
    out: Annotated[Path, typer.Option(callback=to_write, help="Where to write the report.")] = Path("report.html"),
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu; default: a GPU if there is one.")] = None,
) -> None:
    """The main job in about a minute: forces through attention, checked, timed, and reported in one HTML page."""
    console = Console()
    try:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if where.type not in SIZES or where.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"no device {where}; see `adatom doctor`")
    except RuntimeError as error:
        raise typer.BadParameter(str(error)) from None
    began = time.monotonic()
    name = run.device_name(where)
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("looking at this machine", total=1)
        report = doctor.examine()
        progress.advance(task)
        task = progress.add_task("checking forces and their gradients against float64", total=1)
        errors = accuracy(where)
        progress.advance(task)
        task = progress.add_task("fitting forces", total=STEPS)
        fitted = fit(where, FIT_SECONDS, lambda: progress.advance(task))
        progress.update(task, total=len(fitted.losses))
        seconds = CRYSTAL_SECONDS[where.type]
        task, start = progress.add_task("fitting a potential to crystals", total=seconds), time.monotonic()
        crystal = fit_crystals(where, seconds, lambda: progress.update(task, completed=time.monotonic() - start))
        progress.update(task, completed=seconds)
        task = progress.add_task("timing second derivatives", total=len(SIZES[where.type]))
        record = race(where, 55 - (time.monotonic() - began), lambda: progress.advance(task))
        task = progress.add_task("writing the report", total=1)
        sheet = sheets(record, "second")[0]
        facts = doctor.summary(report)
        rows = crystal_rows(crystal)
        text = page(facts, report["checks"], errors, rows, sheet, plots(fitted, crystal, record), name)
        out.write_text(text, encoding="utf-8")
        progress.advance(task)
    have = ", ".join(f"{n} {v}" for n, v in versions().items() if v)
    console.print(f"adatom {adatom.__version__} on {escape(name)}; {have}", highlight=False)
    table = Table(title="relative error against float64", title_justify="left")
    for column in ("quantity", "adatom", "dense float32", "within twice"):
        table.add_column(column)
    for e in errors:
        table.add_row(e.quantity, f"{e.error:.1e}", f"{e.dense:.1e}", "[green]yes[/]" if e.ok else "[red]NO[/]")
    console.print(table)
    console.print(
        f"force error fell from {fitted.losses[0]:.2e} to {fitted.losses[-1]:.2e} in {len(fitted.losses)} steps"
    )
    table = Table(
        title=f"{crystal.structures} crystals, {crystal.state.step} steps: trivial > pair potential > attention",
        title_justify="left",
    )
    for column in CRYSTAL_HEADER:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(sheet._replace(title="second derivatives: ms and peak memory beyond inputs").rich())
    broken = [c for c in report["checks"] if c["state"] == "broken"]
    for check in broken:
        console.print(f"[red]{escape(check['name'])}: {escape(check['detail'])}[/]; cure: {escape(check['cure'])}")
    console.print(f"report in {escape(str(out))}, {time.monotonic() - began:.0f} s")
    failed = [e.quantity for e in errors if not e.ok]
    if not fitted.losses[-1] < fitted.losses[0]:
        failed.append("the fit, which did not improve")
    if not math.isfinite(crystal.errors["test"].force):
        failed.append("the potential, which is not finite")
    failed += [
        f"{e['contender']} ({e['reason']})" for e in record["entries"] if "reason" in e and e["contender"] == "adatom"
    ]
    if failed:
        console.print(f"[red]failed: {escape(', '.join(failed))}[/]")
    if failed or broken:
        raise typer.Exit(1)
