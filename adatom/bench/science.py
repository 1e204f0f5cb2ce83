"""`adatom bench science`: force training against atoms, pair bias and triangle attention against length, second
derivatives and forward mode; time and memory.

Most groups are those of attention. Force training is a whole step of a potential (adatom.potential), which no op has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

import adatom
from adatom.bench.timing import Clock, Job, interleave, peak_bytes
from adatom.ops.attention.cases import BF16, F32, Case
from adatom.potential.graph import Graph, graph
from adatom.potential.model import Attend, Potential, plain

Tensor = torch.Tensor

TRAINING = "force training"
GROUPS = (TRAINING, "pair bias", "triangle", "bias", "second", "neighbours", "jvp")
CELLS = {64: (2, 2, 2), 256: (4, 4, 2), 1024: (8, 4, 4), 4096: (8, 8, 8), 16384: (16, 16, 8)}  # atoms: unit cells
PHASES = ("training step", "forces")
_TOLERANCE = 1e-3  # of the gradients of weights, relative; float32


class Crystal(NamedTuple):
    """A step of force training on rattled MgO of so many atoms."""

    atoms: int
    op: str = "potential"

    @property
    def name(self) -> str:
        return f"{self.atoms} atoms"


def groups(kind: str) -> dict[str, tuple[Any, ...]]:
    """The cases that `science` adds to those of attention, for "cpu" or "cuda"."""
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    dtype, heads, atoms = BF16, 16, [256, 1024, 4096]
    if kind == "cpu":
        lengths, dtype, heads, atoms = (64, 128, 256, 512), F32, 4, [64, 256]
    pair = tuple(Case(f"S{s}", 2, heads, heads, s, s, 32, 32, dtype, bias="1hqk") for s in lengths)
    found: dict[str, tuple[Any, ...]] = {TRAINING: tuple(map(Crystal, atoms)), "pair bias": pair}
    if kind == "cpu":
        found["triangle"] = tuple(Case(f"N{n}", n, 4, 4, n, n, 32, 32, F32, bias="1hqk") for n in (16, 32, 64))
    return found


def size(case: str) -> tuple[str, int] | None:
    """What a case is drawn against, by its name: ("atoms", 256), ("length", 1024), or None."""
    if found := re.fullmatch(r"(\d+) atoms", case):
        return "atoms", int(found[1])
    found = re.fullmatch(r"[SN](\d+)", case)
    return ("length", int(found[1])) if found else None


# Force training ----------------------------------------------------------------------------------------------------


def magnesia(cells: tuple[int, int, int], lattice: float = 4.21) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(numbers, positions, cell) of rocksalt, 8 atoms a cell, displaced by 0.05 Å."""
    faces = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    basis = np.concatenate([faces, faces + [0.5, 0, 0]])
    corners = np.stack(np.meshgrid(*map(np.arange, cells), indexing="ij"), -1).reshape(-1, 3)
    x = lattice * (corners[:, None] + basis).reshape(-1, 3)
    shaken = x + 0.05 * np.random.default_rng(0).normal(size=x.shape)
    return np.tile([12] * 4 + [8] * 4, len(corners)), shaken, lattice * np.diag(cells)


def step(model: Potential, g: Graph, target: Tensor) -> Job:
    """A step of training on energy, forces and stress: forward, backward and double backward."""

    def job() -> Iterator[str]:
        model.zero_grad()
        found = model.predict(g, training=True)
        loss = (found.forces - target).abs().mean() + found.energies.abs().sum() / len(target)
        (loss + found.stresses.abs().sum()).backward()
        yield "training step"

    return job


def inference(model: Potential, g: Graph) -> Job:
    """Energy, forces and stress, as in molecular dynamics."""

    def job() -> Iterator[str]:
        model.predict(g)
        yield "forces"

    return job


def by_hand(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, lens: Tensor) -> Tensor:
    """The same attention, with a tensor of all scores for each step."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    hidden = torch.arange(k.shape[2], device=k.device) >= lens[:, None, None, None]
    scores = q @ k.mT * q.shape[-1] ** -0.5 + bias
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v


def ours(backend: str | None) -> Attend:
    """adatom's attention by one of its backends, or the one that it chooses."""

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, lens: Tensor) -> Tensor:
        out = adatom.attention(q, k, v, bias=bias, kv_lens=lens, backend=backend)
        assert isinstance(out, Tensor)  # a pair only with return_lse
        return out

    return attend


def compare(
    case: Crystal,
    rivals: tuple[str, ...],
    clock: Clock,
    milliseconds: float,
    backend: str | None = None,
    verify: bool = True,
    **options: Any,
) -> list[dict[str, Any]]:
    """Entries of the force training of one crystal, as those of run.compare: of adatom, and of those of the rivals
    "sdpa_math" and "dense" that are named. All have the same weights.

    verify: adatom shows no speed if its gradients are not those of sdpa_math. options: those of Potential.
    """
    torch.manual_seed(0)
    device = clock.device
    attends: dict[str, Attend] = {"adatom": ours(backend), "sdpa_math": plain, "dense": by_hand}
    models = {
        name: Potential(**options, attend=attend).to(device)
        for name, attend in attends.items()
        if name == "adatom" or name in rivals
    }
    last = models["adatom"].readout[-1]
    assert isinstance(last, torch.nn.Linear)
    torch.nn.init.normal_(last.weight, std=0.1)  # else no force comes from attention
    for model in models.values():
        model.load_state_dict(models["adatom"].state_dict())
    g = graph([magnesia(CELLS[case.atoms])], *models["adatom"].sees).to(device, torch.float32)
    target = torch.randn(case.atoms, 3, device=device)
    about = {"group": TRAINING, "case": case.name}
    refused = wrong(models["adatom"], g, target) if verify else ""
    if refused:
        del models["adatom"]
    entries: list[Any] = [{**about, "pass": "all", "contender": "adatom", "reason": refused}] if refused else []
    makers: dict[str, Callable[[Potential], Job]] = {
        "training step": lambda model: step(model, g, target),
        "forces": lambda model: inference(model, g),
    }
    for kind in PHASES:
        jobs = {name: makers[kind](model) for name, model in models.items()}
        for name, timed in interleave(jobs, clock, milliseconds, warmup=2 if clock.cuda else 1).items():
            entry: dict[str, Any] = {**about, "pass": kind, "contender": name}
            if isinstance(timed, dict):
                timing = timed[kind]
                entry |= {"ms": timing.ms, "spread": [timing.low, timing.high], "repeats": timing.repeats}
                models[name].zero_grad()  # or the gradients of the step before are freed in this one
                entry |= {"slots": g.others.shape[1], "peak_bytes": peak_bytes(jobs[name], device)}
            else:
                why = "out of memory" if isinstance(timed, torch.cuda.OutOfMemoryError) else str(timed).split("\n")[0]
                entry["reason"] = why
            entries.append(entry)
    return entries


def wrong(model: Potential, g: Graph, target: Tensor) -> str:
    """Why adatom may show no speed on a training step: the gradients of its weights are not those that PyTorch's
    attention gives; "" if they are, or if that needs more memory than there is."""
    found, mine = [], model.attend
    for attend in (mine, plain):
        model.attend = attend
        try:
            for _ in step(model, g, target)():
                pass
            found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        except torch.cuda.OutOfMemoryError:
            return ""
        except NotImplementedError as error:  # the backend that was asked for
            return " ".join(str(error).split())
        finally:
            model.attend = mine
            model.zero_grad()
    apart = float((found[0] - found[1]).norm() / found[1].norm())
    return "" if apart <= _TOLERANCE else f"gradients of the weights differ from sdpa_math's by {apart:.1e}"
