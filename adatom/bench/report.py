"""What `adatom bench` recorded, as tables and as a plot: in the terminal, in the README and in docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from adatom.bench.rivals import OWN
from adatom.bench.rivals_attention import THREE_ORDERS
from adatom.bench.science import GROUPS, TRAINING, size

# groups where the whole step counts: time and memory of all passes together
WHOLE_STEP = ("bias", "triangle", "pair bias", *THREE_ORDERS)
Record = dict[str, Any]


class Sheet(NamedTuple):
    """A table as text: its title, its header, its rows, and notes to go below it."""

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str]

    def markdown(self) -> str:
        lines = [f"**{self.title}**", "", "| " + " | ".join(self.header) + " |", "|" + "---|" * len(self.header)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, *([""] if self.notes else []), *(f"- {note}" for note in self.notes)])

    def rich(self) -> Group:
        table = Table()
        for i, name in enumerate(self.header):
            table.add_column(name, justify="right" if i else "left")
        for row in self.rows:
            table.add_row(*(_bold(cell) for cell in row))
        return Group(Text(self.title, style="bold"), table, *(Text(note, style="dim") for note in self.notes), "")


def _bold(cell: str) -> str:
    """Markdown's bold as rich's."""
    return re.sub(r"\*\*(.+?)\*\*", r"[bold green]\1[/]", escape(cell))


def _short(value: float) -> str:
    """Three significant digits, no exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _bytes(count: float) -> str:
    return (
        f"{count / 1e9:.2f} GB"
        if count >= 1e9
        else f"{count / 1e6:.1f} MB"
        if count >= 1e5
        else f"{count / 1e3:.1f} kB"
    )


def _unique(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))


def _reasons(failed: list[dict[str, Any]], timed: list[str], cases: int) -> list[str]:
    """One line for each contender and reason, naming the cases unless it is all of them."""
    found: dict[tuple[str, str], list[str]] = {}
    for e in failed:
        found.setdefault((e["contender"], e["reason"]), []).append(e["case"])
    return [
        f"{name}: {why}"
        + ("" if len(_unique(where)) == cases or name not in timed else f" ({', '.join(_unique(where))})")
        for (name, why), where in found.items()
    ]


def _by_pass(record: Record, group: str, name: str) -> Sheet:
    """Rates of one pass: arithmetic or, where bytes are the limit, GB/s; how adatom does beside the best rival."""
    entries = [e for e in record["entries"] if e["group"] == group and e["pass"] in (name, "all")]
    timed = [e for e in entries if "ms" in e]
    contenders = _unique(e["contender"] for e in timed)
    cases = _unique(e["case"] for e in entries)
    unit, scale = _unit(record)
    rows = []
    for case in cases:
        at = {e["contender"]: e for e in timed if e["case"] == case}
        best = min(at.values(), key=lambda e: e["ms"], default=None)
        cells = [_rate(at[c], at[c] is best, scale) if c in at else "-" for c in contenders]
        rows.append([case, *cells, *_standing(at)])
    shares = ["of ceiling", "beside best rival"] if "adatom" in contenders else []
    notes = _reasons([e for e in entries if "reason" in e], contenders, len(cases))
    unit = "of memory traffic" if timed and all(e["bound"] == "bytes" for e in timed) else unit
    return Sheet(f"{group}: {name}, {unit}", ["case", *contenders, *shares], rows, notes)


def _unit(record: Record) -> tuple[str, float]:
    """The unit of arithmetic speed, and how many of it make a TFLOP/s."""
    return ("GFLOP/s", 1e3) if record["kind"] == "cpu" else ("TFLOP/s", 1.0)


def _rate(entry: dict[str, Any], best: bool, scale: float) -> str:
    text = f"{_short(entry['gbps'])} GB/s" if entry["bound"] == "bytes" else _short(scale * entry["tflops"])
    return f"**{text}**" if best else text


def _ours(contender: str) -> bool:
    """Whether this is adatom, or one of its backends by name."""
    return contender == "adatom" or contender.startswith(OWN)


def _standing(at: dict[str, dict[str, Any]]) -> list[str]:
    ours = at.get("adatom")
    if ours is None:
        return []
    rivals = [e["ms"] for name, e in at.items() if not _ours(name)]
    return [f"{100 * ours['share']:.0f} %", f"{min(rivals) / ours['ms']:.2f}x" if rivals else "-"]


def _whole(record: Record, group: str, *only: str) -> Sheet:
    """Milliseconds of each pass (or `only` of one) and of all together, and the peak memory beyond inputs."""
    entries = [e for e in record["entries"] if e["group"] == group and (not only or e["pass"] in (*only, "all"))]
    failed = [e for e in entries if "reason" in e]
    cases = _unique(e["case"] for e in entries)
    steps: dict[tuple[str, str], list[dict[str, Any]]] = {}  # the passes of a contender that did them all
    for e in entries:
        if "ms" in e and not any((f["case"], f["contender"]) == (e["case"], e["contender"]) for f in failed):
            steps.setdefault((e["case"], e["contender"]), []).append(e)
    contenders = _unique(name for _, name in steps)
    rows = []
    for case in cases:
        total = {name: sum(e["ms"] for e in steps[case, name]) for name in contenders if (case, name) in steps}
        cells = []
        for name in contenders:
            if name not in total:
                cells.append("-")
                continue
            text = f"{_short(total[name])} ms"
            text = f"**{text}**" if total[name] == min(total.values()) else text
            parts = " + ".join(_short(e["ms"]) for e in steps[case, name])
            peak = max(e["peak_bytes"] or 0 for e in steps[case, name])
            cells.append(f"{text} ({parts}), {_bytes(peak)}" if " + " in parts else f"{text}, {_bytes(peak)}")
        rivals = [ms for name, ms in total.items() if not _ours(name)]
        rows.append([case, *cells, f"{min(rivals) / total['adatom']:.2f}x" if rivals and "adatom" in total else "-"])
    kinds = " + ".join(_unique(e["pass"] for e in entries if "ms" in e))
    notes = _reasons(failed, contenders, len(cases))
    return Sheet(
        f"{group}: {kinds}, ms and peak memory beyond inputs", ["case", *contenders, "beside best"], rows, notes
    )


def host_sheet(record: Record) -> Sheet:
    """Host time of one call, without and with gradients."""
    rows = [
        [
            h["contender"],
            *(_short(h[kind]) if h.get(kind) is not None else "-" for kind in ("without_grad", "with_grad")),
        ]
        for h in record["host"]
    ]
    title = f"host microseconds per call, {record['host_case']}"
    return Sheet(title, ["contender", "without grad", "with grad"], rows, [])


def sheets(record: Record, group: str | None = None) -> list[Sheet]:
    """The tables of a record, or of one of its groups."""
    out = []
    for name in _unique(e["group"] for e in record["entries"]) if group is None else [group]:
        entries = [e for e in record["entries"] if e["group"] == name]
        if name in WHOLE_STEP:
            out.append(_whole(record, name))
        elif name == TRAINING:
            out += [_whole(record, name, kind) for kind in _unique(e["pass"] for e in entries if e["pass"] != "all")]
        else:
            kinds = _unique(e["pass"] for e in entries if e["pass"] != "all") or ["nothing ran"]
            found = [_by_pass(record, name, kind) for kind in kinds]
            said = found[0].notes  # what holds for every pass is said once
            out += [found[0], *(s._replace(notes=[n for n in s.notes if n not in said]) for s in found[1:])]
    if group is None and record.get("host"):
        out.append(host_sheet(record))
    return out


def heading(record: Record) -> str:
    """Where, when and with what a record was made, and the ceilings of that run."""
    versions = ", ".join(f"{name} {v}" for name, v in record["versions"].items() if v)
    unit, scale = _unit(record)
    ceilings = ", ".join(
        f"{name} {_short(v)} GB/s" if name == "copy" else f"{name} {_short(scale * v)} {unit}"
        for name, v in record["ceilings"].items()
    )
    made = f"{record['device']}; {versions}; {record['date']}, commit {record['commit'] or 'unknown'}."
    lines = [made, f"Ceilings in the same run: {ceilings}."]
    if record.get("steady"):
        lines.append("Without pauses: in turns of about 300 ms (2 to 5000 calls), whose second half was timed.")
    lines += [f"Throttled, so without meaning: {group} ({why})." for group, why in record.get("slowed", {}).items()]
    for commit in _unique(e["commit"] for e in record["entries"] if "commit" in e):
        names = []
        for group in _unique(e["group"] for e in record["entries"]):
            mine = [e for e in record["entries"] if e["group"] == group and e["contender"] == "adatom"]
            of: dict[str, dict[str, str | None]] = {}  # of each case, the commits of its passes
            for e in mine:
                of.setdefault(e["case"], {})[e["pass"]] = e.get("commit")
            kept = []
            for case, made_at in of.items():
                some = [name for name, at in made_at.items() if at == commit]
                if some:
                    kept.append(case if len(some) == len(made_at) else f"{case} {' and '.join(some)}")
            names += [group] if kept == list(of) else [f"{group} {case}" for case in kept]
        if names:  # otherwise rivals alone are kept of that run
            lines.append(f"From a run at commit {commit}, with ceilings of its own: {', '.join(names)}.")
    return "\n".join(lines)


def tables(record: Record) -> str:
    """The tables of a record (as read from a results file) in Markdown."""
    return "\n\n".join([heading(record), *(sheet.markdown() for sheet in sheets(record))]) + "\n"


def plot(record: Record, path: Path) -> None:
    """Time and memory against atoms and length, where cases of science differ in these; else grouped bars of the speed
    of each group and pass. SVG or PNG by the file's ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    timed = [e for e in record["entries"] if "ms" in e]
    contenders = _unique(e["contender"] for e in timed)
    colours = {c: pyplot.get_cmap("tab10")(i % 10) for i, c in enumerate(contenders)}
    curves = _curves(timed)
    drawn = {group for group, *_ in curves}
    panels = _unique((e["group"], e["pass"]) for e in timed if e["group"] not in drawn)
    rows = max(1, len(curves) + len(panels))
    figure = pyplot.figure(figsize=(12, 3.2 * rows), layout="constrained")
    grid = figure.add_gridspec(rows, 2)
    for i, (group, kind, lines) in enumerate(curves):
        axes = [figure.add_subplot(grid[i, j]) for j in (0, 1)]
        _draw_curves(axes, lines, colours)
        axes[0].set_title(f"{group}: {kind}", loc="left", fontsize=9)
    for i, (group, kind) in enumerate(panels, len(curves)):
        entries = [e for e in timed if (e["group"], e["pass"]) == (group, kind)]
        _draw_bars(figure.add_subplot(grid[i, :]), entries, colours, *_unit(record))
    how = ", without pauses" if record.get("steady") else ""
    figure.suptitle(f"adatom bench, {record['device']}, {record['date']}{how}", fontsize=10)
    figure.savefig(path)
    pyplot.close(figure)


class Point(NamedTuple):
    """What a contender took for one step: milliseconds, and bytes at the most."""

    axis: str
    size: int
    ms: float
    peak: int


def _curves(timed: list[dict[str, Any]]) -> list[tuple[str, str, dict[str, list[Point]]]]:
    """(group, passes, contender -> its points) for what science draws against a size: all passes of a step together,
    but each of force training by itself."""
    found = []
    for group in (g for g in GROUPS if any(e["group"] == g for e in timed)):
        mine = [e for e in timed if e["group"] == group and size(e["case"])]
        if group != TRAINING and len({e["case"] for e in mine}) < 2:
            continue
        kinds = _unique(e["pass"] for e in mine)
        for together in [[kind] for kind in kinds] if group == TRAINING else [kinds]:
            lines: dict[str, list[Point]] = {}
            for contender, case in _unique((e["contender"], e["case"]) for e in mine):
                step = [e for e in mine if (e["contender"], e["case"]) == (contender, case) and e["pass"] in together]
                where = size(case)
                if len(step) == len(together) and where is not None:
                    ms, peak = sum(e["ms"] for e in step), max(e["peak_bytes"] or 0 for e in step)
                    lines.setdefault(contender, []).append(Point(*where, ms, peak))
            found.append((group, " + ".join(together), {c: sorted(points) for c, points in lines.items()}))
    return found


def _draw_curves(axes: list[Any], lines: dict[str, list[Point]], colours: dict[str, Any]) -> None:
    """Milliseconds on the first of two axes, MB on the other."""
    for contender, points in lines.items():
        sizes, style = [p.size for p in points], {"label": contender, "color": colours[contender], "markersize": 4}
        axes[0].loglog(sizes, [p.ms for p in points], "o-", **style)
        axes[1].loglog(sizes, [p.peak / 1e6 for p in points], "o-", **style)
    ticks = sorted({p.size for points in lines.values() for p in points})
    for axis, unit in zip(axes, ("ms", "peak MB")):
        axis.set(xlabel=next(iter(lines.values()))[0].axis, ylabel=unit)
        axis.set_xticks(ticks, [str(n) for n in ticks])
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=7, frameon=False, ncols=2)


def _draw_bars(axis: Any, entries: list[dict[str, Any]], colours: dict[str, Any], unit: str, scale: float) -> None:
    """The speed of one group and pass."""
    cases = _unique(e["case"] for e in entries)
    here = [c for c in colours if any(e["contender"] == c for e in entries)]
    width = 0.8 / len(here)
    for i, contender in enumerate(here):
        speed = {e["case"]: scale * e["tflops"] for e in entries if e["contender"] == contender}
        places = [j + (i - (len(here) - 1) / 2) * width for j, case in enumerate(cases) if case in speed]
        axis.bar(places, list(speed.values()), width, label=contender, color=colours[contender])
    axis.set_xticks(range(len(cases)), cases, rotation=20, ha="right", fontsize=7)
    axis.set_ylabel(unit)
    axis.set_title(f"{entries[0]['group']}: {entries[0]['pass']}", loc="left", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7, frameon=False, ncols=4)
