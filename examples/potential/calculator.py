"""The potential as an ASE calculator, and molecular dynamics with it.

pip install ase
python calculator.py runs/full/checkpoint.pt    # KCl at 300 K without a thermostat: is the energy conserved?
"""

from pathlib import Path
from typing import Annotated, Any

import ase.build
import numpy as np
import torch
import typer
from ase import Atoms, units
from ase.calculators.calculator import Calculator, all_changes
from ase.md.verlet import VelocityVerlet

from adatom.potential.graph import graph
from adatom.potential.model import Potential


class AttentionPotential(Calculator):
    """Energies in eV, forces in eV/Å, stress in eV/Å^3 (Voigt), in the model's own dtype and on its device."""

    implemented_properties = ["energy", "free_energy", "forces", "stress"]

    def __init__(self, model: Potential, **options: Any) -> None:
        super().__init__(**options)
        self.model = model

    def calculate(self, atoms: Atoms | None = None, properties: Any = None, system_changes: Any = all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        assert self.atoms is not None
        if self.atoms.pbc.any() != self.atoms.pbc.all():
            raise ValueError(f"periodic in all directions or none; got pbc {self.atoms.pbc.tolist()}")
        cell = self.atoms.cell.array if self.atoms.pbc.all() else None
        parameter = next(self.model.parameters())
        g = graph([(self.atoms.numbers, self.atoms.positions, cell)], *self.model.sees)
        found = self.model.predict(g.to(parameter.device, parameter.dtype))
        energy = float(found.energies[0])
        self.results = {"energy": energy, "free_energy": energy, "forces": found.forces.double().cpu().numpy()}
        if cell is not None:
            self.results["stress"] = found.stresses[0].double().cpu().numpy()[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]


def dynamics(atoms: Atoms, kelvin: float, femtoseconds: float, steps: int, seed: int = 0) -> np.ndarray:
    """Velocity Verlet without a thermostat: (steps + 1, 2) potential and kinetic energy, in eV/atom."""
    random, masses = np.random.default_rng(seed), atoms.get_masses()[:, None]
    momenta = random.normal(size=(len(atoms), 3)) * (masses * 2 * kelvin * units.kB) ** 0.5  # half turns potential
    atoms.set_momenta(momenta - masses * momenta.sum(0) / masses.sum())
    energies = []
    run = VelocityVerlet(atoms, timestep=femtoseconds * units.fs)
    run.attach(lambda: energies.append((atoms.get_potential_energy(), atoms.get_kinetic_energy())))
    run.run(steps)
    return np.array(energies) / len(atoms)


def main(
    checkpoint: Annotated[Path, typer.Argument(exists=True, dir_okay=False)],
    kelvin: Annotated[float, typer.Option(min=0.0)] = 300.0,
    femtoseconds: Annotated[float, typer.Option(min=1e-3, help="Of a step.")] = 2.0,
    steps: Annotated[int, typer.Option(min=1)] = 500,
    double: Annotated[bool, typer.Option(help="float64 instead of float32.")] = False,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Molecular dynamics of 64 atoms of KCl; prints how well the energy is conserved."""
    from train import restore

    model = restore(checkpoint, device)[0]
    atoms = ase.build.bulk("KCl", "rocksalt", a=6.39, cubic=True) * (2, 2, 2)
    atoms.calc = AttentionPotential(model.double() if double else model)
    energies = dynamics(atoms, kelvin, femtoseconds, steps)
    total = energies.sum(1)
    slope = np.polyfit(np.arange(len(total)) * femtoseconds * 1e-3, total, 1)[0]
    print(f"temperature {energies[len(energies) // 2 :, 1].mean() / (1.5 * units.kB):.0f} K")
    print(f"total energy: fluctuates by {1e3 * total.std():.3f} meV/atom, drifts by {1e3 * slope:.3f} meV/atom/ps")
    print(f"potential energy: fluctuates by {1e3 * energies[:, 0].std():.3f} meV/atom")


if __name__ == "__main__":
    typer.run(main)
