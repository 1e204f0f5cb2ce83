"""Make adatom/potential/crystals.npz: ionic crystals, shaken and strained, labelled by a pretrained potential.

    pip install chgnet ase pyyaml
    pip download --no-deps --no-binary phonopy phonopy==4.10.0 && tar xf phonopy-4.10.0.tar.gz
    python make_data.py --phonopy phonopy-4.10.0

No file is fetched beyond these packages. Structures: prototypes of the AFLOW library (in pymatgen; Mehl et al.,
doi:10.1016/j.commatsci.2017.01.017) filled with ions so that charges cancel, and the elements of ASE's `dcdft`
collection. Labels: CHGNet 0.3.0 (Deng et al., doi:10.1038/s42256-023-00716-3), weights in its wheel: what is fitted to
them is a distillation of CHGNet, and at best as good as it. Hold-out from density functional theory: the 120 random KCl
supercells that phonopy's source package carries (example/KCl-SSCHA; Togo, doi:10.7566/JPSJ.92.012001).
"""

import itertools
import lzma
import warnings
from collections import Counter
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from ase.collections import dcdft
from chgnet.model import CHGNet
from pymatgen.analysis.prototypes import AFLOW_PROTOTYPE_LIBRARY
from pymatgen.core import Lattice, Species, Structure
from pymatgen.io.ase import AseAtomsAdaptor
from rich.progress import track

CHARGES = {"Li": 1, "Na": 1, "K": 1, "Mg": 2, "Ca": 2, "O": -2, "F": -1, "Cl": -1}
GPA = 160.21766  # GPa in an eV/Å^3
COMMON = ("AB_cF8_225_a_b", "AB_cP2_221_b_a", "AB2_cF12_225_a_c")  # rocksalt, CsCl, fluorite: with every ion
SPLITS = ("train", "test", "unseen", "dft")  # test: other shakes of the training crystals; unseen: other crystals


def radius(element: str) -> float:
    return float(Species(element, CHARGES[element]).ionic_radius)


def spread(s: Structure) -> Structure:
    """Scaled so that the closest ions touch; None of them is closer than its radii allow."""
    d = s.distance_matrix
    for i, site in enumerate(s):  # an atom and its own images
        d[i, i] = min(n.nn_distance for n in s.get_neighbors(site, 2 * s.volume ** (1 / 3)) if n.index == i)
    radii = np.array([radius(x.specie.symbol) for x in s])
    s.scale_lattice(s.volume * float(((radii[:, None] + radii) / d).max()) ** 3)
    return s


def ionic(per_prototype: int, random: np.random.Generator) -> list[tuple[str, Structure]]:
    """AFLOW prototypes of two and three species, filled with some of the ions that make them neutral."""
    crystals = {}
    for entry in AFLOW_PROTOTYPE_LIBRARY:
        prototype = Structure.from_sites(entry["snl"].structure)
        label = entry["tags"]["aflow"]
        count = Counter(x.specie.symbol for x in prototype)
        if len(count) not in (2, 3) or len(prototype) > 16:
            continue
        neutral = [
            ions
            for ions in itertools.permutations(CHARGES, len(count))
            if sum(CHARGES[ion] * n for ion, n in zip(ions, count.values())) == 0
        ]
        for i in random.permutation(len(neutral))[: None if label in COMMON else per_prototype]:
            s = prototype.copy()
            s = spread(s.replace_species(dict(zip(count, neutral[i]))))
            if all(s.get_all_neighbors(4.5)):  # CHGNet takes no lone atoms
                crystals[f"{s.composition.reduced_formula} {label}"] = s
    return list(crystals.items())


def elements() -> list[tuple[str, Structure]]:
    adapt = AseAtomsAdaptor()
    return [(f"{name} dcdft", adapt.get_structure(dcdft[name])) for name in CHARGES]


def repeated(s: Structure, fewest: int) -> Structure:
    """A supercell of at least `fewest` atoms, as cubic as doubling the shortest axis makes it."""
    s = s.copy()
    while len(s) < fewest:
        scale = [1, 1, 1]
        scale[int(np.argmin(s.lattice.abc))] = 2
        s.make_supercell(scale)
    return s


def crowded(s: Structure) -> bool:
    """Whether an atom has more than 119 neighbours within 5.5 Å: kernels of neighbour attention end at 128."""
    return bool(np.bincount(s.get_neighbor_list(5.5)[0]).max() > 119)


def shaken(s: Structure, random: np.random.Generator) -> Structure:
    """Strained by about 3 % and displaced by 0.02 to 0.25 Å (standard deviation of each component)."""
    strain = random.normal(scale=0.03, size=(3, 3))
    lattice = Lattice(s.lattice.matrix @ (np.eye(3) + (strain + strain.T) / 2))
    moved = Structure(lattice, s.species, s.frac_coords)
    shift = random.normal(scale=random.uniform(0.02, 0.25), size=(len(s), 3))
    return Structure(lattice, s.species, moved.cart_coords + shift, coords_are_cartesian=True)


def label(model: CHGNet, structures: list[Structure]) -> list[dict]:
    """Energy in eV, forces in eV/Å and stress in eV/Å^3 (positive: the crystal pulls inwards) of each."""
    found = []
    for start in track(range(0, len(structures), 16), description="labelling"):
        some = structures[start : start + 16]
        predicted = model.predict_structure(some, task="efs", batch_size=16)
        for s, p in zip(some, predicted if len(some) > 1 else [predicted], strict=True):
            found.append({"energy": float(p["e"]) * len(s), "forces": p["f"], "stress": p["s"] / GPA})
    return found


def potassium_chloride(folder: Path, count: int) -> list[tuple[Structure, dict]]:
    """The first `count` of phonopy's KCl supercells whose forces stay below 2 eV/Å; no stress is given."""
    import yaml

    file = folder / "example" / "KCl-SSCHA" / "phonopy_mlpsscha_params_KCl-120.yaml.xz"
    data = yaml.load(lzma.decompress(file.read_bytes()), yaml.CSafeLoader)
    cell, dataset = data["supercell"], data["dataset"]
    ideal = Structure(
        cell["lattice"], [p["symbol"] for p in cell["points"]], [p["coordinates"] for p in cell["points"]]
    )
    found = []
    for moves, forces, energy in zip(
        dataset["displacements"], dataset["forces"], dataset["supercell_energies"], strict=True
    ):
        s = Structure(ideal.lattice, ideal.species, ideal.cart_coords + np.array(moves), coords_are_cartesian=True)
        if np.abs(forces).max() < 2:
            found.append((s, {"energy": energy, "forces": np.array(forces), "stress": np.full((3, 3), np.nan)}))
    return found[:count]


def main(
    out: Path = Path(__file__).parents[2] / "adatom" / "potential" / "crystals.npz",
    phonopy: Annotated[Path | None, typer.Option(help="Unpacked source package, for the KCl hold-out.")] = None,
    atoms: Annotated[int, typer.Option(help="Stop adding structures beyond so many atoms.")] = 32_000,
    per_prototype: int = 3,
    shakes: int = 16,
    seed: int = 0,
) -> None:
    warnings.filterwarnings("ignore")
    random = np.random.default_rng(seed)
    model = CHGNet.load(use_device="cpu", verbose=False)
    crystals = [*elements(), *ionic(per_prototype, random)]

    # The volume of least energy; what is still far from rest there is no crystal worth learning.
    sizes = np.linspace(0.85, 1.10, 6)
    scaled = [s.copy().scale_lattice(s.volume * x**3) for _, s in crystals for x in sizes]
    energies = np.array([p["energy"] for p in label(model, scaled)]).reshape(len(crystals), len(sizes))
    crystals = [
        (name, scaled[i * len(sizes) + int(e.argmin())]) for i, ((name, _), e) in enumerate(zip(crystals, energies))
    ]
    rest = label(model, [s for _, s in crystals])
    crystals = [c for c, p in zip(crystals, rest) if np.abs(p["forces"]).max() < 1.5 and np.isfinite(p["energy"])]
    print(f"{len(crystals)} crystals: {Counter(len(s.composition) for _, s in crystals)} by number of elements")

    jobs: list[tuple[int, Structure]] = []
    order = random.permutation(len(crystals))
    unseen = set(order[: len(order) // 10].tolist())
    for _ in range(shakes):
        for i in order.tolist():
            if sum(len(s) for _, s in jobs) < 1.1 * atoms:
                jobs.append((i, shaken(repeated(crystals[i][1], 8), random)))
    found = label(model, [s for _, s in jobs])
    rows = []
    for (i, s), p in zip(jobs, found, strict=True):
        if np.abs(p["forces"]).max() < 10 and not crowded(s) and sum(len(r[0]) for r in rows) < atoms:
            split = "unseen" if i in unseen else "test" if random.random() < 0.1 else "train"
            rows.append((s, p, split, crystals[i][0]))
    if phonopy is not None:
        rows += [(s, p, "dft", "KCl PBEsol") for s, p in potassium_chloride(phonopy, 20)]
    random.shuffle(rows)
    np.savez_compressed(
        out,
        numbers=np.concatenate([np.array(s.atomic_numbers, np.uint8) for s, *_ in rows]),
        positions=np.concatenate([s.cart_coords.astype(np.float32) for s, *_ in rows]),
        forces=np.concatenate([np.asarray(p["forces"], np.float32) for _, p, *_ in rows]),
        cells=np.stack([s.lattice.matrix for s, *_ in rows]).astype(np.float32),
        energies=np.array([p["energy"] for _, p, *_ in rows], np.float64),
        stresses=np.stack([p["stress"] for _, p, *_ in rows]).astype(np.float32),
        counts=np.array([len(s) for s, *_ in rows], np.int32),
        splits=np.array([SPLITS.index(split) for *_, split, _ in rows], np.uint8),
        names=np.array([name for *_, name in rows]),
    )
    print(f"{out}: {len(rows)} structures, {sum(len(s) for s, *_ in rows)} atoms, {out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    typer.run(main)
