"""Fitting the potential to energies, forces and stresses: differentiates attention twice.

Data: crystals.npz, made by examples/potential/make_data.py. Its labels are those of CHGNet, a pretrained potential: a
fit to them distils it. The split "dft" holds KCl supercells with forces from density functional theory.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from importlib.resources import as_file, files
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from adatom.check import require
from adatom.potential.graph import Graph, graph
from adatom.potential.model import Potential, Prediction

Tensor = torch.Tensor

SPLITS = ("train", "test", "unseen", "dft")  # test: training crystals shaken anew; unseen: other crystals
GPA = 160.21766  # GPa in an eV/Å^3


class Data(NamedTuple):
    """Structures and their labels."""

    graph: Graph
    energies: Tensor  # (structures,) float64, eV
    forces: Tensor  # (atoms, 3) eV/Å
    stresses: Tensor  # (structures, 3, 3) eV/Å^3; NaN where unknown
    names: list[str]  # of the crystals

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Data:
        forces, stresses = self.forces.to(device, dtype), self.stresses.to(device, dtype)
        return Data(self.graph.to(device, dtype), self.energies.to(device), forces, stresses, self.names)

    def select(self, structures: Tensor) -> Data:
        """Some of the structures, by an integer index (n,) on the CPU."""
        atoms = self.graph.atoms(structures).to(self.forces.device)
        at = structures.to(self.forces.device)
        names = [self.names[int(i)] for i in structures]
        return Data(self.graph.select(structures), self.energies[at], self.forces[atoms], self.stresses[at], names)


def load(split: str, model: Potential, most: int | None = None, multiple: int = 8) -> Data:
    """Structures of one of SPLITS whose elements `model` knows, at most so many; on the CPU, in float64. Slots come in
    multiples of `multiple`. Raises ValueError for another split, and where nothing is left."""
    require(split in SPLITS, f"a split, one of {', '.join(SPLITS)}", split=split)
    with as_file(files("adatom.potential") / "crystals.npz") as path, np.load(path) as stored:
        raw = {name: stored[name] for name in stored.files}
    ends = raw["counts"].cumsum()
    unknown = np.add.reduceat(~np.isin(raw["numbers"], model.elements), ends - raw["counts"], dtype=int)
    some = np.flatnonzero((raw["splits"] == SPLITS.index(split)) & (unknown == 0))[:most]
    spans = [slice(ends[i] - raw["counts"][i], ends[i]) for i in some]
    structures = [(raw["numbers"][s], raw["positions"][s], raw["cells"][i]) for i, s in zip(some, spans)]
    g = graph(structures, *model.sees, multiple)
    labels = raw["energies"][some], np.concatenate([raw["forces"][s] for s in spans]), raw["stresses"][some]
    energies, forces, stresses = map(torch.from_numpy, labels)
    return Data(g, energies, forces.double(), stresses.double(), raw["names"][some].tolist())


def composition(g: Graph, elements: int) -> Tensor:
    """Float64 (structures, elements): atoms of each element in each structure."""
    flat = torch.bincount(g.systems.cpu() * elements + g.species.cpu(), minlength=len(g.sizes) * elements)
    return flat.view(-1, elements).double()


def calibrate(model: Potential, data: Data, batch: int = 64, ridge: float = 1e-4) -> None:
    """Fit the linear part of the model to energies and forces: energies of elements, and a potential of each pair.

    What that leaves of the energies per atom sets the scale of what attention has to add. Runs in float64. Raises
    ValueError for data of other elements or another cutoff.
    """
    model.require_seen(data.graph)
    kinds, waves = len(model.elements), len(model.waves)
    low, high = torch.triu_indices(kinds, kinds)
    types = torch.zeros(kinds, kinds, dtype=torch.int64)
    types[low, high] = types[high, low] = torch.arange(len(low))
    size = kinds + len(low) * waves
    double = copy.deepcopy(model).cpu().double()
    normal, right = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    rows, labels = [], []

    def cut_waves(r: Tensor) -> Tensor:
        near, wave = double.radial(r)
        return near[:, None] ** 3 * wave

    for some in torch.arange(len(data.energies)).split(batch):
        d = data.select(some).to("cpu", torch.float64)
        g = d.graph
        slot = torch.arange(g.others.shape[1])
        atom, at = ((slot > 0) & (slot < g.counts[:, None])).nonzero().unbind(1)
        vectors = g.vectors[atom, at]
        r = vectors.norm(dim=-1)
        basis, slope, *_ = torch.func.jvp(cut_waves, (r,), (torch.ones_like(r),))  # (pairs, waves)
        column = types[g.species[atom], g.others[atom, at]]

        def gather(row: Tensor, count: int, values: Tensor, column: Tensor = column) -> Tensor:
            """Sums of values (pairs, waves) by row and type of pair: (count, types * waves)."""
            flat = torch.zeros(count * len(low), waves, dtype=torch.float64)
            return flat.index_add_(0, row * len(low) + column, values).view(count, -1)

        pull = [gather(atom, len(g.species), slope * (vectors / r[:, None])[:, c : c + 1]) for c in range(3)]
        forces = torch.nn.functional.pad(torch.cat(pull), (kinds, 0))
        energy = torch.cat([composition(g, kinds), gather(g.systems[atom], len(g.sizes), basis / 2)], 1)
        rows.append(energy / g.sizes[:, None])
        labels.append(d.energies / g.sizes)
        matrix, target = torch.cat([forces, rows[-1]]), torch.cat([d.forces.T.flatten(), labels[-1]])
        normal += matrix.T @ matrix
        right += matrix.T @ target
    normal += ridge * normal.diagonal().mean() * torch.eye(size, dtype=torch.float64)
    solution = torch.linalg.solve(normal, right)
    model.reference.copy_(solution[:kinds])
    model.pairs.copy_(solution[kinds:].view(-1, waves)[types])
    model.scale.copy_((torch.cat(labels) - torch.cat(rows) @ solution).std())


class Errors(NamedTuple):
    """Mean absolute errors, and those of a trivial model: the best energy of each element, and no forces."""

    energy: float  # meV/atom
    force: float  # meV/Å, each component
    stress: float  # GPa, each component
    trivial_energy: float
    trivial_force: float
    trivial_stress: float
    deviation: float  # standard deviation of the force components of the labels, meV/Å


def predict(model: Potential, data: Data, batch: int = 64) -> Prediction:
    """Of all structures, some at a time."""
    parts = [model.predict(data.graph.select(i)) for i in torch.arange(len(data.energies)).split(batch)]
    return Prediction(*(torch.cat(p) for p in zip(*parts)))


def errors(model: Potential, data: Data, found: Prediction | None = None, same_zero: bool = True) -> Errors:
    """Of `found`, or of what the model predicts. Without the `same_zero` of energy, their mean error does not count."""
    found = found or predict(model, data)
    sizes = data.graph.sizes.to(data.energies.device)
    energy = (found.energies.double() - data.energies) / sizes
    counts = composition(data.graph, len(model.elements)).to(sizes.device) / sizes[:, None]
    labels = data.energies / sizes
    trivial = counts @ torch.linalg.lstsq(counts.cpu(), labels.cpu(), driver="gelsd").solution.to(sizes.device) - labels
    if not same_zero:
        energy, trivial = energy - energy.mean(), trivial - trivial.mean()

    def mean(x: Tensor, unit: float) -> float:
        return float(x.abs().nanmean()) * unit

    return Errors(
        mean(energy, 1e3),
        mean(found.forces - data.forces, 1e3),
        mean(found.stresses - data.stresses, GPA),
        mean(trivial, 1e3),
        mean(data.forces, 1e3),
        mean(data.stresses - data.stresses.nanmean(0), GPA),
        1e3 * float(data.forces.std()),
    )


def loss(found: Prediction, data: Data) -> Tensor:
    """Huber losses in units of typical errors: 0.02 eV/Å, 0.01 eV/atom, 0.5 GPa; forces weigh most."""
    sizes = data.graph.sizes.to(found.energies.device)
    energy = ((found.energies - data.energies) / sizes).to(found.forces.dtype)
    known = data.stresses.isfinite()
    stress = torch.where(known, found.stresses - torch.where(known, data.stresses, 0.0), 0.0)

    def huber(x: Tensor, unit: float) -> Tensor:
        return F.huber_loss(x / unit, torch.zeros_like(x))

    return huber(found.forces - data.forces, 0.02) + 0.2 * huber(energy, 0.01) + 0.1 * huber(stress, 0.5 / GPA)


class Plan(NamedTuple):
    """How to train: Adam, the rate falling to 0 along a cosine."""

    steps: int
    batch: int = 8  # structures
    rate: float = 3e-3
    warmup: int = 10
    seconds: float = math.inf  # stop earlier: the rate then falls with time instead
    every: int = 50  # steps between validations
    seed: int = 0


# A plan and the options of its model: all crystals on a GPU; alkali halides (Li F Na Cl K) on a CPU, under a minute.
FULL: tuple[Plan, dict[str, Any]] = Plan(12_000, batch=64, rate=3e-3, every=200), {}
SMALL: tuple[Plan, dict[str, Any]] = (
    Plan(500, rate=5e-3, seconds=40, every=20),
    {"elements": (3, 9, 11, 17, 19), "cutoff": 5.0, "width": 32, "heads": 4, "kv_heads": 4, "layers": 1},
)


class State(NamedTuple):
    """Where training stands: all that going on needs, and the history of it."""

    step: int
    losses: list[float]
    history: list[tuple[int, float, float]]  # step, force MAE in meV/Å and energy MAE in meV/atom on validation data
    optimizer: dict[str, Any]


def fit(
    model: Potential,
    train: Data,
    validation: Data,
    plan: Plan,
    advance: Callable[[State], None] = lambda state: None,
    state: State | None = None,
) -> State:
    """Train `model` in place; the same seed gives the same result. `advance` is called after each step. The plan's
    seconds begin behind the first step, in which kernels may be compiled. Raises ValueError for a plan of nothing."""
    valid = min(plan.steps, plan.batch, plan.warmup, plan.every) >= 1 and plan.seconds > 0
    require(valid, "at least 1 of steps, batch, warmup and every, and more than 0 seconds", plan=plan)
    optimizer = torch.optim.Adam(model.parameters(), lr=plan.rate, betas=(0.9, 0.98))
    step = 0
    losses: list[Any] = []
    history: list[tuple[int, float, float]] = []
    if state is not None:
        step, losses, history = state.step, list(state.losses), list(state.history)
        optimizer.load_state_dict(state.optimizer)
    count = len(train.energies)
    per_epoch = max(count // plan.batch, 1)
    began, done = math.inf, step / plan.steps
    while done < 1:
        if step % per_epoch == 0 or state is not None:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(plan.seed + step // per_epoch))
            state = None
        start = step % per_epoch * plan.batch
        some = train.select(order[start : start + plan.batch])
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * min(1.0, (step + 1) / plan.warmup) * (1 + math.cos(math.pi * done)) / 2
        optimizer.zero_grad()
        value = loss(model.predict(some.graph, training=True), some)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        losses.append(value.detach())
        step += 1
        began = min(began, time.monotonic())
        done = max(step / plan.steps, (time.monotonic() - began) / plan.seconds)
        if step % plan.every == 0 or done >= 1:
            found = errors(model, validation)
            history.append((step, found.force, found.energy))
            losses = [float(x) for x in losses]
        advance(State(step, losses, history, optimizer.state_dict()))
    return State(step, losses, history, optimizer.state_dict())
