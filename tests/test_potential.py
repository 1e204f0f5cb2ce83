"""What a materials scientist would check of the potential that ships: symmetries, derivatives, smoothness, dynamics."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from adatom.potential import fit
from adatom.potential import graph as neighbours
from adatom.potential import model as potentials
from adatom.potential.graph import graph
from adatom.potential.model import Potential, harmonics, plain

F64 = torch.float64
MOLECULE = np.array([3, 17, 8]), np.array([[0.0, 0, 0], [2.0, 0, 0], [1.0, 1, 1]]), None


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model():
    """Small, in float64, and random in every part."""
    torch.manual_seed(0)
    found = Potential(width=16, heads=4, kv_heads=2, scalars=8, degree=2, radial=6, cutoff=4.0).double()
    found.reference.copy_(torch.randn(8))
    pairs = 0.1 * torch.randn_like(found.pairs)
    found.pairs.copy_(pairs + pairs.transpose(0, 1))
    torch.nn.init.normal_(found.readout[2].weight, std=0.1)
    for block in found.blocks:
        torch.nn.init.normal_(block.near.bias)
    return found


def salt(seed=0, scale=0.15):
    """A shaken rhombohedral cell of rocksalt, twice repeated: (numbers, positions, cell)."""
    cell = 4.3 * np.array([[1, 0.5, 0.5], [0.0, 0.5, 0.5], [0.0, -0.5, 0.5]]) @ np.diag([1.0, 1.05, 1.0])
    x = np.array([[0, 0, 0], [0.5, 0.5, 0.5]]) @ cell
    x = np.concatenate([x, x + cell[0]])
    cell = np.diag([2, 1, 1]) @ cell
    return np.array([12, 8, 12, 8]), x + scale * np.random.default_rng(seed).normal(size=x.shape), cell


def predict(model, *structures):
    return model.predict(graph(structures, model.elements, model.cutoff))


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=tolerance, atol=tolerance)


def rotation(seed=1):
    q = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))[0]
    return q * np.linalg.det(q)


# Neighbours ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cutoff", [2.5, 4.0, 7.0])
def test_neighbours_by_definition(cutoff):
    numbers, x, cell = salt()
    x = x + np.array([5.0, -9.0, 3.0])  # outside of the cell
    i, j, shift = neighbours.pairs(x, cell, cutoff)
    found = {(a, b, *n) for a, b, n in zip(i.tolist(), j.tolist(), shift.astype(int).tolist())}
    span = range(-8, 9)
    images = [np.array((a, b, c)) for a in span for b in span for c in span]
    offset = np.floor(x @ np.linalg.inv(cell))
    expected = set()
    for a in range(len(x)):
        for b in range(len(x)):
            for n in images:
                n = n + (offset[a] - offset[b]).astype(int)
                if np.linalg.norm(x[b] - x[a] + n @ cell) < cutoff and (a != b or n.any()):
                    expected.add((a, b, *n.tolist()))
    assert len(found) == len(i) and found == expected
    back = neighbours.opposite(i, j, shift)
    assert (i[back] == j).all() and (j[back] == i).all() and (shift[back] == -shift).all()


def test_selected_structures_predict_the_same(model):
    structures = [salt(0), salt(1, 0.3), (np.array([3, 17]), np.array([[0.0, 0, 0], [2.0, 0, 0]]), None), salt(2)]
    whole = graph(structures, model.elements, model.cutoff)
    some = model.predict(whole.select(torch.tensor([3, 0, 2])))
    assert some.energies.shape == (3,) and torch.isnan(some.stresses[2]).all()
    for n, i in enumerate((3, 0, 2)):
        one = predict(model, structures[i])
        close(some.energies[n], one.energies[0])
        start = (0, 4, 8)[n]
        close(some.forces[start : start + len(one.forces)], one.forces)
    assert whole.select(torch.tensor([2])).others.shape[1] == 8 < whole.others.shape[1]
    roomy = graph(structures, model.elements, model.cutoff, 96).select(torch.tensor([2, 3]))
    assert roomy.others.shape[1] == 96
    close(model.predict(roomy).energies, some.energies[[2, 0]])


def test_no_structure_is_selected(model):
    none = graph([salt()], *model.sees).select(torch.zeros(0, dtype=torch.int64))
    found = model.predict(none)
    assert found.energies.shape == (0,) and found.forces.shape == (0, 3) and found.stresses.shape == (0, 3, 3)
    with pytest.raises(TypeError, match=r"an integer index \(n,\) on the CPU; got structures=bool"):
        none.select(torch.zeros(0, dtype=torch.bool))


@pytest.mark.parametrize("number", [26, 12.5])
def test_unknown_elements_are_refused(model, number):
    with pytest.raises(ValueError, match=rf"elements among .*; got numbers=\[{number}\]"):
        predict(model, (np.array([number]), np.zeros((1, 3)), None))


@pytest.mark.parametrize("where", ["nothing", "positions", "cell"])
def test_what_is_not_there_is_refused(model, where):
    """Atoms at NaN have no neighbours, so that dynamics which fell apart would look well."""
    numbers, x, cell = salt()
    if where == "nothing":
        numbers, x = numbers[:0], x[:0]
    else:
        {"positions": x, "cell": cell}[where][0, 0] = np.nan
    with pytest.raises(ValueError, match="atoms, at finite positions"):
        predict(model, (numbers, x, cell))


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda n, x, cell: (n[1:], x, cell), "expected positions"),
        (lambda n, x, cell: (n, x, cell[:2]), "a cell \\(3, 3\\)"),
        (lambda n, x, cell: (n, x, 0 * cell), "a cell that has a volume"),
        (lambda n, x, cell: (n, np.repeat(x[:1], len(x), 0), cell), "two of them coincide"),
    ],
)
def test_what_is_no_structure_is_refused(model, change, says):
    with pytest.raises(ValueError, match=says):
        predict(model, change(*salt()))
    with pytest.raises(ValueError, match="at least one structure"):
        graph([], *model.sees)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"degree": 3}, "degree 1 or 2; got degree=3"),
        ({"cutoff": -1.0}, "a positive cutoff in Å; got cutoff=-1.0"),
        ({"cutoff": float("nan")}, "a positive cutoff"),
        ({"elements": (3, 17, 3)}, r"different elements .*; got elements=\(3, 17, 3\)"),
        ({"elements": (3, 17.5)}, "atomic number"),
        ({"elements": ()}, "at least one"),
    ],
)
def test_what_is_no_potential_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Potential(**options)
    if options.keys() & {"elements", "cutoff"}:
        with pytest.raises(ValueError, match=says):
            graph([salt()], **{"elements": (12, 8), "cutoff": 4.0} | options)


@pytest.mark.parametrize(
    "given, says",
    [
        ((5, (12, 8), 4.0), "at least one structure"),
        (([salt()[:2]], (12, 8), 4.0), r"structures \(numbers, positions, cell\), .*; got structures=\[\(array"),
        (([None], (12, 8), 4.0), r"structures .*; got structures=\[None\]"),
        ((salt(), (12, 8), 4.0), r"structures .*; got structures=\[array\(\[12,"),
        (([salt()], 12, 4.0), "elements as a sequence of atomic numbers; got elements=12"),
    ],
)
def test_what_is_no_sequence_is_refused_in_words(given, says):
    with pytest.raises(ValueError, match=says):
        graph(*given)


SLIGHT = {"width": 8, "heads": 2, "kv_heads": 1, "radial": 4, "layers": 1}
OTHERS = [((17, 11), 4.0), ((11, 17), 3.0), ((1, 8, 11, 17), 4.0), ((11,), 4.0)]


@pytest.fixture
def table_salt():
    """A model of two elements, and a molecule that it knows."""
    return Potential((11, 17), cutoff=4.0, **SLIGHT), (np.array([11, 11]), np.array([[0.0, 0, 0], [2.4, 0, 0]]), None)


@pytest.mark.parametrize("sees", OTHERS)
def test_a_graph_of_others_is_refused(table_salt, sees):
    """Of other elements, another order of them or another cutoff: its energies would be wrong."""
    model, molecule = table_salt
    says = r"a Graph of the model's elements .*; got graph=\(\(.*\), .*\), model=\(\(11, 17\), 4.0\)"
    other = graph([molecule], *sees).to("cpu", torch.float32)
    for g in (other, other.select(torch.tensor([0])), pickle.loads(pickle.dumps(other))):
        for call in (model, model.predict):
            with pytest.raises(ValueError, match=says):
                call(g)
    data = fit.Data(other, torch.zeros(1), torch.zeros(2, 3), torch.zeros(1, 3, 3), [""])
    with pytest.raises(ValueError, match=says):
        fit.calibrate(model, data)


def test_a_graph_knows_what_it_is_of(table_salt):
    """Also from numbers of NumPy, moved and selected; its model's, copied and converted, takes it."""
    model, molecule = table_salt
    g = graph([molecule], np.array([11, 17]), np.float64(4)).to("cpu", torch.float64).select(torch.tensor([0]))
    assert (g.elements, g.cutoff) == model.sees and {type(e) for e in (*g.elements, g.cutoff)} == {int, float}
    expected = model.double()(g)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), Potential(iter((11, 17)), 4, **SLIGHT)):
        other.double().load_state_dict(model.state_dict())
        close(other(g), expected)


@pytest.mark.parametrize("sees", OTHERS)
def test_a_state_dict_of_others_is_refused(table_salt, sees):
    """Before any of it is copied, also within another module."""
    other = Potential(*sees, **SLIGHT)
    before = copy.deepcopy(other.state_dict())
    for into, state in ((other, table_salt[0]), (torch.nn.Sequential(other), torch.nn.Sequential(table_salt[0]))):
        with pytest.raises(ValueError, match=r"a state dict of the model's .*; got given=\[4.0, 11.0, 17.0\], model="):
            into.load_state_dict(state.state_dict())
    assert all(torch.equal(t, before[name]) for name, t in other.state_dict().items())


def test_a_state_dict_is_of_tensors_that_may_be_cast_and_stored(tmp_path):
    """And one from before it said what it is of still loads."""
    model = Potential((11, 17), cutoff=4.3, **SLIGHT)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    stored = torch.load(tmp_path / "weights.pt", weights_only=True)
    low = {name: t.bfloat16() for name, t in stored.items()}
    again = {name: t.half().float() for name, t in stored.items()}
    before = {name: t for name, t in stored.items() if name != "_extra_state"}
    for state in (stored, low, again, before):
        loaded = Potential((11, 17), cutoff=4.3, **SLIGHT)
        assert str(loaded.load_state_dict(state)) == "<All keys matched successfully>"
        torch.testing.assert_close(loaded.embed[0].weight, model.embed[0].weight, rtol=1e-2, atol=1e-2)
    assert len(before) == len(stored) - 1


def test_a_graph_without_slots_is_refused(model):
    with pytest.raises(ValueError, match="a multiple of at least 1; got multiple=0"):
        graph([salt()], *model.sees, multiple=0)


# Derivatives ---------------------------------------------------------------------------------------------------------


def test_forces_are_finite_differences_of_the_energy(model):
    numbers, x, cell = salt()
    forces = predict(model, (numbers, x, cell)).forces
    h = 1e-4
    for a in range(2):
        for c in range(3):
            step = np.zeros_like(x)
            step[a, c] = h
            up, down = predict(model, (numbers, x + step, cell), (numbers, x - step, cell)).energies
            close(-(up - down) / (2 * h), forces[a, c], 1e-7)
    close(forces.sum(0), torch.zeros(3, dtype=F64))


def test_stress_is_finite_differences_under_strain(model):
    numbers, x, cell = salt()
    stress = predict(model, (numbers, x, cell)).stresses[0]
    close(stress, stress.mT)
    h = 1e-5
    for a, b in ((0, 0), (1, 1), (1, 2), (0, 2)):
        strain = np.zeros((3, 3))
        strain[a, b] += h / 2
        strain[b, a] += h / 2
        moved = [(numbers, x @ (np.eye(3) + s * strain), cell @ (np.eye(3) + s * strain)) for s in (1, -1)]
        up, down = predict(model, *moved).energies
        close((up - down) / (2 * h) / abs(np.linalg.det(cell)), stress[a, b], 1e-7)


def test_gradient_of_a_force_loss_is_right(model):
    """The second derivative, against finite differences in every parameter along a random direction."""
    g = graph([salt()], model.elements, model.cutoff)
    weights = torch.randn(4, 3, dtype=F64), torch.randn(1, 3, 3, dtype=F64)

    def loss():
        p = model.predict(g, training=True)
        return (p.forces * weights[0]).sum() + (p.stresses * weights[1]).sum() + p.energies.sum()

    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss(), parameters)
    h = 1e-5
    for p, grad in zip(parameters, grads):
        direction = torch.randn_like(p)
        values = []
        for s in (h, -2 * h):
            p.data.add_(direction, alpha=s)
            values.append(loss().detach())
        p.data.add_(direction, alpha=h)
        close((values[0] - values[1]) / (2 * h), (grad * direction).sum(), 1e-6)


def test_a_molecule_leaves_the_gradient_of_a_loss_finite(model):
    """Its stress is NaN, and what no label is known for must not reach the weights."""
    g = graph([MOLECULE, salt()], *model.sees)
    stresses = torch.full((2, 3, 3), torch.nan, dtype=F64)
    data = fit.Data(g, torch.zeros(2, dtype=F64), torch.zeros(len(g.species), 3, dtype=F64), stresses, ["", ""])
    found = model.predict(g, training=True)
    assert found.stresses[0].isnan().all() and found.stresses[1].isfinite().all()
    grads = torch.autograd.grad(fit.loss(found, data), list(model.parameters()))
    assert all(grad.isfinite().all() for grad in grads) and any((grad != 0).any() for grad in grads)


def test_inference_mode_is_refused(model):
    g = graph([salt()], *model.sees)
    with torch.no_grad():
        close(model.predict(g).energies, model(g))
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"expected torch.no_grad\(\) instead of"):
        model.predict(g)


def test_the_plain_model_is_the_same_model(model):
    g = graph([salt(), salt(1, 0.4)], model.elements, model.cutoff)
    results = []
    for attend in (potentials.fused, plain):
        model.attend = attend
        p = model.predict(g, training=True)
        grads = torch.autograd.grad(p.forces.square().sum() + p.energies.sum(), list(model.parameters()))
        results.append((*p, *grads))
    for a, b in zip(*results):
        close(a, b, 1e-9)


# Symmetries ----------------------------------------------------------------------------------------------------------


def test_harmonics_multiply_to_legendre_polynomials():
    u, w = torch.nn.functional.normalize(torch.randn(2, 50, 3, dtype=F64), dim=-1)
    cos = (u * w).sum(-1)
    product = harmonics(u, 2) * harmonics(w, 2)
    close(product[:, :3].sum(-1), cos)
    close(product[:, 3:].sum(-1), (3 * cos**2 - 1) / 2)
    assert (harmonics(u, 1) == u).all() and (harmonics(torch.zeros(3), 2) == 0).all()


@pytest.mark.parametrize("mirror", [1, -1])
def test_rotation_and_reflection(model, mirror):
    numbers, x, cell = salt()
    q = mirror * rotation()
    before, after = predict(model, (numbers, x, cell)), predict(model, (numbers, x @ q.T, cell @ q.T))
    close(before.energies, after.energies)
    close(before.forces @ torch.from_numpy(q.T), after.forces)
    close(q @ before.stresses[0].numpy() @ q.T, after.stresses[0])


def test_translation_wrapping_and_other_lattice_vectors(model):
    numbers, x, cell = salt()
    before = predict(model, (numbers, x, cell))
    wrapped = x + np.array([[1, 0, 0], [-2, 1, 0], [0, 0, 3], [0, 0, 0]]) @ cell
    sheared = np.array([[1, 0, 0], [2, 1, 0], [-1, 3, 1]]) @ cell
    for structure in ((numbers, x + 1.7, cell), (numbers, wrapped, cell), (numbers, x, sheared)):
        after = predict(model, structure)
        for a, b in zip(before, after):
            close(a, b)


def test_permutation(model):
    numbers, x, cell = salt()
    order = np.array([2, 0, 3, 1])
    before, after = predict(model, (numbers, x, cell)), predict(model, (numbers[order], x[order], cell))
    close(before.energies, after.energies)
    close(before.forces[order], after.forces)


def test_a_supercell_has_the_energy_of_its_cells(model):
    numbers, x, cell = salt()
    times = (2, 1, 3)
    shifts = np.array([(a, b, c) for a in range(2) for b in range(1) for c in range(3)]) @ cell
    big = np.tile(numbers, 6), (shifts[:, None] + x).reshape(-1, 3), np.diag(times) @ cell
    before, after = predict(model, (numbers, x, cell)), predict(model, big)
    close(6 * before.energies, after.energies)
    close(before.forces.repeat(6, 1), after.forces)
    close(before.stresses, after.stresses)


def test_far_molecules_do_not_see_each_other(model):
    a = np.array([12, 8]), np.array([[0.0, 0, 0], [1.8, 0, 0]]), None
    both = np.tile(a[0], 2), np.concatenate([a[1], a[1] + 50]), None
    close(2 * predict(model, a).energies, predict(model, both).energies)
    single = predict(model, (a[0][:1], a[1][:1], None))
    assert (single.forces == 0).all() and single.energies.isfinite().all()


def test_padding_and_order_of_neighbours_do_not_matter(model):
    g = graph([salt(), salt(1)], model.elements, model.cutoff)
    before = model.predict(g)
    more = -1 % g.others.shape[1] + 1 + 16
    wide = torch.nn.functional.pad
    atoms, slots = g.others.shape
    extra = more - slots
    reverse = torch.arange(atoms * more).view(atoms, more)
    reverse[:, :slots] = g.reverse // slots * more + g.reverse % slots
    padded = g._replace(
        others=wide(g.others, (0, extra), value=5),
        vectors=wide(g.vectors, (0, 0, 0, extra), value=0.7),  # what padding holds is never looked at
        reverse=reverse,
    )
    after = model.predict(padded)
    for a, b in zip(before, after):
        close(a, b)
    flip = torch.arange(slots).repeat(atoms, 1)
    for row, n in zip(flip, g.counts.tolist()):
        row[1:n] = row[1:n].flip(0)
    where = torch.empty(atoms * slots, dtype=torch.int64)
    old = torch.arange(atoms)[:, None] * slots + flip
    where[old.flatten()] = torch.arange(atoms * slots)
    turned = g._replace(
        others=g.others.gather(1, flip),
        vectors=g.vectors.gather(1, flip[..., None].expand(-1, -1, 3)),
        reverse=where[g.reverse.gather(1, flip)],
    )
    for a, b in zip(before, model.predict(turned)):
        close(a, b)


# Smoothness and dynamics ---------------------------------------------------------------------------------------------


def test_smooth_as_atoms_cross_the_cutoff(model):
    """Energy, force and the force's slope are continuous where a third atom comes within reach of a pair."""

    def at(distance):
        x = np.array([[0.0, 0, 0], [2.0, 0, 0], [0.0, distance, 0]])
        p = predict(model, (np.array([12, 8, 8]), x, None))
        return p.energies[0], p.forces

    h = 1e-3
    (e0, f0), (e1, f1), (e2, f2) = (at(model.cutoff + s) for s in (-h, -1e-9, 1e-9))
    close(e1, e2, 1e-12)
    close(f1, f2, 1e-9)
    assert (f0 - f1).abs().max() / h < 1e-2  # the slope falls to zero with the distance to the cutoff
    steps = torch.linspace(-0.3, 0.3, 61, dtype=F64).tolist()
    energies = torch.stack([at(model.cutoff + s)[0] for s in steps])
    assert energies.diff().diff().abs().max() < 5 * (energies.max() - energies.min())


def test_energy_is_conserved_without_a_thermostat(model):
    """Velocity Verlet, in Å, eV and femtoseconds; the drift falls with the square of the step."""
    numbers, x, cell = salt(scale=0.05)
    masses = np.where(numbers == 12, 24.305, 15.999)[:, None]
    acceleration = 9.6485e-3  # eV/Å/amu in Å/fs^2
    drifts = []
    for step, steps in ((2.0, 40), (1.0, 80)):
        p, v, total = x, np.random.default_rng(3).normal(size=x.shape) * 3e-3, []
        now = predict(model, (numbers, p, cell))
        for _ in range(steps):
            v = v + step / 2 * acceleration * now.forces.numpy() / masses
            p = p + step * v
            now = predict(model, (numbers, p, cell))
            v = v + step / 2 * acceleration * now.forces.numpy() / masses
            total.append(float(now.energies) + float((masses * v**2).sum()) / 2 / acceleration)
        drifts.append(max(total) - min(total))
    kinetic = float((masses * v**2).sum()) / 2 / acceleration
    assert drifts[0] < 0.05 * max(kinetic, 0.1) and drifts[1] < drifts[0] / 2.5


# The kernels around attention -----------------------------------------------------------------------------------------

FUSED = """
import sys, torch
from adatom.potential import parts

def derivatives(fused, scalars, degree, heads):
    torch.manual_seed(1)
    x = torch.randn(3, 5, sum(heads), scalars + degree, dtype=torch.float64, requires_grad=True)
    y = torch.randn(3, 5, degree * (degree + 2), dtype=torch.float64, requires_grad=True)
    reverse = torch.tensor([1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 14, 13, 12])
    takes = parts.fuses
    parts.fuses = takes if fused else lambda x: False
    q, *kv = parts.turn(x, y, scalars, heads)
    out = torch.tanh(q) * 1.5 + sum(t.sum(1, keepdim=True) for t in kv)
    rows = parts.seen(out, y, scalars).flatten(2).flatten(0, 1)
    z = parts.swap(0.3 * rows, reverse, rows.sin())
    energy = (parts.silu(z.T).T * (1 + parts.swap(z, reverse))).sum()
    first = torch.autograd.grad(energy, (x, y), create_graph=True)
    second = torch.autograd.grad(sum((g**3).sum() for g in first), (x, y))
    parts.fuses = takes
    return energy, *first, *second

assert parts.fuses(torch.ones(1)) and not parts.fuses(torch.ones(1).half())
for options in ((5, 1, (4, 2, 2)), (8, 2, (6, 3, 3)), (3, 1, (1, 1, 1))):
    for a, b in zip(derivatives(True, *options), derivatives(False, *options)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
"""


def test_kernels_and_their_two_derivatives_are_those_of_pytorch():
    """In Triton's interpreter, in a process of its own."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", FUSED]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_parts_fit_a_compiler_without_a_gpu():
    """Every kernel around attention, for sm_90: nothing is spilled."""
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


COMPILED = """
import torch
from adatom import compile, device
from adatom.potential import parts
from adatom.tiles.launch import observed

met = {}

def observe(kernel, args, meta, spill):
    args = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
    key = kernel.fn.__name__, tuple(sorted((k, v) for k, v in meta.items() if k != "num_warps"))
    met.setdefault(key, (kernel, args, meta))

with device.pretend(compile.DEVICES[90]), observed(observe):
    x, y = torch.zeros(4, 64, 24, 6, requires_grad=True), torch.zeros(4, 64, 3, requires_grad=True)
    q, k, v = parts.turn(x, y, 5, (16, 4, 4))
    rows = parts.seen(q * 1, y, 5).flatten(2).flatten(0, 1)
    z = parts.silu(parts.swap(rows, torch.arange(256), rows))
    first = torch.autograd.grad(z.sum() + (k * v).sum(), (x, y), create_graph=True)
    torch.autograd.grad(sum(g.square().sum() for g in first), (x, y))
assert {name for name, _ in met} == {"_turn_kernel", "_silu_kernel", "_swap_kernel"} and len(met) >= 10
for kernel, args, meta in met.values():
    with compile.offline(90):
        compiled = kernel.warmup(*args, grid=(1,), **meta)
    assert compile.read_cubin(compiled.asm["cubin"])["spill"] == 0, meta
"""


def test_elements_and_structures_may_come_one_by_one():
    """And numbers of NumPy serve."""
    numbers, x, cell = salt()
    found = graph(iter([(numbers, x, cell)]), iter([*range(1, 20)]), 4.0, np.int64(4))
    assert torch.equal(found.species, graph([(numbers, x, cell)], range(1, 20), 4.0, 4).species)
    assert Potential(elements=iter([3, 17])).elements == (3, 17)
