"""Neighbours of atoms in crystals and molecules, as padded tensors that attention takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from adatom.check import finite, require, whole

Tensor = torch.Tensor


class Graph(NamedTuple):
    """Atoms of several structures; each atom has slots: itself, its neighbours within the cutoff, padding.

    Slot 0 is the atom itself, slots 1 to counts - 1 its neighbours in any order, the others are padding.
    """

    species: Tensor  # (atoms,) int64: index into the elements of the potential
    others: Tensor  # (atoms, slots) int64: species in each slot
    vectors: Tensor  # (atoms, slots, 3) float: from the atom to its neighbour, Å; zeros in slot 0 and padding
    reverse: Tensor  # (atoms, slots) int64: atom * slots + slot that holds the same pair seen from the other end
    counts: Tensor  # (atoms,) int32: slots in use
    systems: Tensor  # (atoms,) int64: the structure of each atom
    volumes: Tensor  # (structures,) float: Å^3; NaN where nothing is periodic
    sizes: Tensor  # (structures,) int64, on the CPU: atoms of each
    most: Tensor  # (structures,) int64, on the CPU: slots that each needs
    elements: tuple[int, ...]  # atomic numbers that species stand for, in that order
    cutoff: float  # Å
    multiple: int = 8  # slots come in multiples of this; each number of slots compiles kernels of its own

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Graph:
        """Moved, and vectors and volumes converted."""
        dtype = dtype or self.vectors.dtype
        names = ("species", "others", "reverse", "counts", "systems")
        moved = {name: getattr(self, name).to(device) for name in names}
        return self._replace(**moved, vectors=self.vectors.to(device, dtype), volumes=self.volumes.to(device, dtype))

    def atoms(self, structures: Tensor) -> Tensor:
        """(atoms,) int64 on the CPU: the atoms of some of the structures, given by an integer index (n,) on the CPU."""
        index = isinstance(structures, Tensor) and structures.dtype in (torch.int32, torch.int64)
        fits = index and structures.dim() == 1 and structures.device.type == "cpu"
        require(fits, "an integer index (n,) on the CPU", TypeError, structures=structures)
        sizes = self.sizes[structures]
        ends, at = self.sizes.cumsum(0)[structures], sizes.cumsum(0)
        return torch.arange(int(sizes.sum())) + torch.repeat_interleave(ends - at, sizes)

    def select(self, structures: Tensor) -> Graph:
        """Some structures, given by an integer index (n,) on the CPU, with no more slots than they need; of none,
        a Graph without atoms. Raises TypeError for another index."""
        atoms = self.atoms(structures)
        device, sizes = self.species.device, self.sizes[structures]
        systems = torch.repeat_interleave(torch.arange(len(sizes)), sizes).to(device, non_blocking=True)
        most = self.most[structures]
        slots, before = -(-max([1, *most.tolist()]) // self.multiple) * self.multiple, self.others.shape[1]
        atoms = atoms.to(device, non_blocking=True)
        place = torch.empty_like(self.species)
        place[atoms] = torch.arange(len(atoms), device=device)
        others, vectors, reverse = (t[atoms, :slots] for t in (self.others, self.vectors, self.reverse))
        reverse = place[reverse // before] * slots + reverse % before
        species, counts, volumes = self.species[atoms], self.counts[atoms], self.volumes[structures.to(device)]
        return Graph(species, others, vectors, reverse, counts, systems, volumes, sizes, most, *self[-3:])


def pairs(x: np.ndarray, cell: np.ndarray | None, cutoff: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All pairs closer than `cutoff`, each in both directions, by brute force over the images that can be near.

    Args: x (atoms, 3) and the rows of cell (3, 3), in Å; no cell, no images.
    Returns: i, j (pairs,), and the image of j (pairs, 3): the vector is x[j] - x[i] + image @ cell.
    """
    if cell is None:
        images, offset = np.zeros((1, 3)), np.zeros_like(x)
        cell, margin, inside = np.eye(3), np.full(3, np.inf), x
    else:
        fractional = x @ np.linalg.inv(cell)
        offset = np.floor(fractional)
        inside = fractional - offset
        margin = cutoff * np.linalg.norm(np.linalg.inv(cell), axis=0) + 1e-9
        reach = np.ceil(margin).astype(int)
        images = np.stack(np.meshgrid(*(np.arange(-n, n + 1) for n in reach), indexing="ij"), -1).reshape(-1, 3)
    shifted = inside + images[:, None]  # (images, atoms, 3)
    near = ((shifted > inside.min(0) - margin) & (shifted < inside.max(0) + margin)).all(-1)
    image, j = np.nonzero(near)
    found = []
    for start in range(0, len(x), 256):
        i = np.arange(start, min(start + 256, len(x)))
        shift = images[image] + offset[i][:, None] - offset[j]  # the opposite pair's is its exact negative
        vectors = (x[j] - x[i][:, None]) + shift @ cell
        squared = (vectors**2).sum(-1)
        a, b = np.nonzero((squared < cutoff**2) & ((j != i[:, None]) | (shift != 0).any(-1)))
        found.append((i[a], j[b], shift[a, b]))
    i, j, shift = (np.concatenate(part) for part in zip(*found))
    return i, j, shift


def opposite(i: np.ndarray, j: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """For each pair (i, j, shift) the position of (j, i, -shift)."""
    forward = np.lexsort((*shift.T, j, i))
    backward = np.lexsort((*-shift.T, i, j))
    found = np.empty_like(forward)
    found[forward] = backward
    return found


def known(elements: Iterable[int], cutoff: float) -> tuple[tuple[int, ...], float]:
    """Both as numbers of Python. Raises ValueError unless elements are different atomic numbers, and the cutoff is a
    positive number."""
    require(isinstance(elements, Iterable), "elements as a sequence of atomic numbers", elements=elements)
    elements = tuple(elements)
    valid = all(whole(e, 1) for e in elements) and len(elements) == len(set(elements))
    require(valid and len(elements) > 0, "different elements by atomic number, at least one", elements=elements)
    require(finite(cutoff, 0) and cutoff > 0, "a positive cutoff in Å", cutoff=cutoff)
    return tuple(map(int, elements)), float(cutoff)


def graph(
    structures: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray | None]],
    elements: Iterable[int],
    cutoff: float,
    multiple: int = 8,
) -> Graph:
    """The float64 Graph of structures, each (atomic numbers (atoms,), positions (atoms, 3), cell (3, 3) or None).
    Slots come in multiples of `multiple`. Raises ValueError for what is no structure: none, other than three parts,
    shapes that do not fit, a flat cell, two atoms in one place, an element that is not among `elements`; and for
    elements that are no sequence or come twice, a cutoff or a multiple that is not positive."""
    sees, structures = known(elements, cutoff), list(structures if isinstance(structures, Iterable) else ())
    require(whole(multiple, 1), "a multiple of at least 1", multiple=multiple)
    require(len(structures) > 0, "at least one structure")
    wrong = [s for s in structures if not isinstance(s, Sequence) or len(s) != 3]
    require(not wrong, "structures (numbers, positions, cell), the cell None where there is none", structures=wrong)
    index = {number: n for n, number in enumerate(sees[0])}
    parts = []
    for numbers, x, cell in structures:
        numbers, x = np.asarray(numbers), np.asarray(x, float)
        cell = None if cell is None else np.asarray(cell, float)
        exist = x.size > 0 and all(np.isfinite(t).all() for t in (x, cell) if t is not None)
        require(exist, "atoms, at finite positions in a finite cell")
        shapes = [t.shape for t in (x, numbers, cell) if t is not None]
        fit = numbers.ndim == 1 and shapes[0] == (len(numbers), 3) and shapes[2:] in ([], [(3, 3)])
        require(fit, "positions (n, 3), numbers (n,) and a cell (3, 3)", shapes=shapes)
        require(cell is None or abs(np.linalg.det(cell)) >= 1e-6, "a cell that has a volume", cell=cell)
        unknown = sorted(set(numbers.tolist()) - set(index))  # 3.5 is not 3
        require(not unknown, f"elements among {sorted(index)}", numbers=unknown)
        i, j, shift = pairs(x, cell, cutoff)
        order = np.argsort(i, kind="stable")
        i, j, shift = i[order], j[order], shift[order]
        degree = np.bincount(i, minlength=len(x))
        slot = np.arange(len(i)) - np.repeat(degree.cumsum() - degree, degree) + 1
        vectors = x[j] - x[i] + (0 if cell is None else shift @ cell)
        apart = np.linalg.norm(vectors, axis=1) >= 1e-6
        require(bool(apart.all()), "atoms in different places; two of them coincide")
        volume = np.nan if cell is None else abs(np.linalg.det(cell))
        kinds = np.array([index[int(n)] for n in numbers])
        parts.append((kinds, i, j, slot, vectors, opposite(i, j, shift), degree + 1, volume))
    sizes = torch.tensor([len(p[0]) for p in parts])
    most = torch.tensor([int(p[6].max()) for p in parts])
    atoms, slots = int(sizes.sum()), -(-int(most.max()) // multiple) * multiple
    species = torch.from_numpy(np.concatenate([p[0] for p in parts]))
    others = torch.zeros(atoms, slots, dtype=torch.int64)
    others[:, 0] = species
    vectors = torch.zeros(atoms, slots, 3, dtype=torch.float64)
    reverse = torch.arange(atoms * slots).view(atoms, slots)
    first = 0
    for part in parts:
        kind, a, b, at, v, back = map(torch.from_numpy, part[:6])
        others[first + a, at] = kind[b]
        vectors[first + a, at] = v
        reverse[first + a, at] = ((first + a) * slots + at)[back]
        first += len(kind)
    counts = torch.from_numpy(np.concatenate([p[6] for p in parts])).int()
    systems = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    volumes = torch.tensor([p[7] for p in parts], dtype=torch.float64)
    return Graph(species, others, vectors, reverse, counts, systems, volumes, sizes, most, *sees, multiple)
