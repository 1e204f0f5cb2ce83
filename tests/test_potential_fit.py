"""The data of the potential, its fit, and the scripts of examples/potential."""

import copy
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from adatom.potential.fit import SPLITS, Errors, Plan, calibrate, composition, errors, fit, load, predict
from adatom.potential.model import Potential

FOLDER = Path(__file__).parents[1] / "examples" / "potential"
TINY = {"width": 8, "heads": 2, "kv_heads": 1, "cutoff": 3.2, "radial": 6}


pytestmark = pytest.mark.usefixtures("one_thread")


def script(name):
    """The module examples/potential/<name>.py."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    return Potential(**TINY)


@pytest.fixture(scope="module")
def data(tiny):
    return {name: load(name, tiny, 12).to("cpu") for name in SPLITS}


def test_the_data_is_small_and_whole():
    path = Path(__file__).parents[1] / "adatom" / "potential" / "crystals.npz"
    assert path.stat().st_size <= 1_100_000
    with np.load(path) as stored:
        raw = {name: stored[name] for name in stored.files}
    atoms, structures = int(raw["counts"].sum()), len(raw["counts"])
    assert raw["positions"].shape == raw["forces"].shape == (atoms, 3) and len(raw["numbers"]) == atoms
    assert len(raw["energies"]) == len(raw["cells"]) == len(raw["names"]) == structures > 1000
    names = [set(raw["names"][raw["splits"] == i]) for i in range(len(SPLITS))]
    train, test, unseen, dft = names
    assert test and not train & unseen and not test & unseen and dft == {"KCl PBEsol"}
    assert np.abs(raw["forces"]).max() < 10 and np.isfinite(raw["energies"]).all()
    assert np.isfinite(raw["stresses"][raw["splits"] < 3]).all()


def test_labels_belong_to_their_structures(data):
    """The forces of labels sum to nothing, structure by structure, which they would not if atoms were mixed up."""
    for name in ("train", "unseen", "dft"):
        d = data[name]
        sums = torch.zeros(len(d.energies), 3).index_add_(0, d.graph.systems, d.forces)
        assert sums.abs().max() < 5e-3 * len(d.forces) ** 0.5


def test_selected_data_keep_their_labels(data):
    whole = data["train"]
    some = whole.select(torch.tensor([5, 2]))
    ends = whole.graph.sizes.cumsum(0)
    expected = torch.cat([whole.forces[ends[i] - whole.graph.sizes[i] : ends[i]] for i in (5, 2)])
    assert (some.forces == expected).all() and some.names == [whole.names[5], whole.names[2]]
    assert (some.energies == whole.energies[[5, 2]]).all()


def test_calibration_finds_the_pair_potential_that_made_the_labels(tiny, data):
    """Labels from random pair potentials are fitted exactly, and the model then predicts them."""
    truth, model = copy.deepcopy(tiny).double(), copy.deepcopy(tiny).double()
    for m in (truth, model):
        torch.nn.init.zeros_(m.readout[2].weight)
        torch.nn.init.zeros_(m.readout[2].bias)
    pairs = torch.randn_like(truth.pairs)
    truth.pairs.copy_(pairs + pairs.transpose(0, 1))
    truth.reference.copy_(torch.randn(8))
    d = data["train"].to("cpu", torch.float64)
    p = predict(truth, d)
    d = d._replace(energies=p.energies, forces=p.forces)
    calibrate(model, d, batch=5, ridge=1e-14)
    found = predict(model, d)
    torch.testing.assert_close(found.energies, d.energies, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.forces, d.forces, rtol=1e-5, atol=1e-5)
    assert model.scale < 1e-5 and (composition(d.graph, 8).sum(1) == d.graph.sizes).all()


def test_errors_by_hand(tiny, data):
    d = data["dft"]
    found = predict(tiny, d)
    shifted = found._replace(energies=(d.energies + 3 * d.graph.sizes), forces=d.forces + 0.5)
    e = errors(tiny, d, shifted)
    assert isinstance(e, Errors) and e.energy == pytest.approx(3000, rel=1e-4)
    assert e.force == pytest.approx(500, rel=1e-4) and e.stress != e.stress  # no stress is known
    assert errors(tiny, d, shifted, same_zero=False).energy < 1e-3
    assert e.deviation == pytest.approx(1e3 * float(d.forces.std()))


def test_fitting_improves_is_deterministic_and_goes_on_where_it_stopped(tiny, data):
    plan = Plan(24, batch=4, every=12, rate=1e-2)

    def start():
        model = copy.deepcopy(tiny)
        calibrate(model, data["train"])
        model.pairs.zero_()  # leaves something to learn
        return model

    whole, halves, kept = start(), start(), {}

    def keep(state):
        if state.step == 5:
            kept["state"] = copy.deepcopy(state)
            kept["model"] = copy.deepcopy(halves.state_dict())

    before = errors(whole, data["train"]).force
    first = fit(whole, data["train"], data["test"], plan)
    fit(halves, data["train"], data["test"], plan, keep)
    for a, b in zip(whole.parameters(), halves.parameters()):
        assert (a == b).all()
    again = start()
    again.load_state_dict(kept["model"])
    second = fit(again, data["train"], data["test"], plan, state=kept["state"])
    assert [float(x) for x in second.losses] == first.losses and second.history == first.history
    for a, b in zip(whole.parameters(), again.parameters()):
        assert (a == b).all()
    assert errors(whole, data["train"]).force < 0.97 * before and [h[0] for h in first.history] == [12, 24]


def test_plans_and_splits_that_are_none_are_refused(tiny, data):
    for plan in (Plan(0), Plan(-3), Plan(5, batch=0), Plan(5, warmup=0), Plan(5, every=0)):
        with pytest.raises(ValueError, match="at least 1 of steps, batch, .*; got plan="):
            fit(copy.deepcopy(tiny), data["train"], data["test"], plan)
    for seconds in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"more than 0 seconds; got plan=.*seconds={seconds}"):
            fit(copy.deepcopy(tiny), data["train"], data["test"], Plan(5, seconds=seconds))
    with pytest.raises(ValueError, match="one of train, test, unseen, dft; got split='nonsense'"):
        load("nonsense", tiny)
    none = data["train"].select(torch.zeros(0, dtype=torch.int64))
    assert len(none.energies) == len(none.forces) == len(none.names) == 0


def test_training_script(tmp_path, monkeypatch, data):
    train = script("train")
    monkeypatch.setitem(train.MODES, "small", (Plan(4, batch=2, every=2), TINY))
    monkeypatch.setattr(train, "load", lambda name, model: data[name])
    app = train.typer.Typer()
    app.command()(train.main)
    out = tmp_path / "run"
    result = CliRunner().invoke(app, ["--out", str(out), "--device", "cpu"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert (out / "report.png").stat().st_size > 10_000 and "unseen" in result.output
    assert "2 steps, " in result.output  # where no bar is drawn
    told = json.loads((out / "report.json").read_text())
    assert [point["step"] for point in told["curve"]] == [2, 4] and told["seconds of this run"] > 0
    assert told["pairs only"]["unseen"]["force"] > 0 and told["trained"]["dft"]["stress"] is None
    model, options, plan, state = train.restore(out / "checkpoint.pt")
    assert options == TINY and state.step == 4 and plan.steps == 4
    done, further = ["--resume", str(out / "checkpoint.pt"), "--device", "cpu"], tmp_path / "new" / "run"
    result = CliRunner().invoke(app, [*done, "--out", str(further)])  # nothing is left to do
    assert result.exit_code == 0 and "4 steps" in result.output
    assert {path.name for path in further.iterdir()} == {"checkpoint.pt", "report.json", "report.png"}
    result = CliRunner().invoke(app, [*done, "--steps", "6"])  # into the folder that it goes on from
    assert result.exit_code == 0 and train.restore(out / "checkpoint.pt")[3].step == 6
    assert CliRunner().invoke(app, ["--mode", "huge"]).exit_code == 2
    assert CliRunner().invoke(app, ["--resume", str(tmp_path / "nothing.pt")]).exit_code == 2
    for option in ("--steps=0", "--steps=-3", "--seconds=0", "--seconds=-1"):
        result = CliRunner().invoke(app, [*done, option])
        assert result.exit_code == 2 and "Invalid value for" in result.output
    result = CliRunner().invoke(app, [*done, "--seconds", "0.001", "--steps", "900"])  # then time is up
    assert result.exit_code == 0 and 6 < train.restore(out / "checkpoint.pt")[3].step < 20
    torch.save({"weights": torch.zeros(1)}, tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    (tmp_path / "empty.pt").touch()
    for name in ("other", "text", "empty"):
        result = CliRunner().invoke(app, ["--resume", str(tmp_path / f"{name}.pt")], env={"COLUMNS": "400"})
        assert result.exit_code == 2 and "is no checkpoint of train.py" in result.output
    if not torch.cuda.is_available():
        assert "no CUDA device" in CliRunner().invoke(app, ["--device", "cuda"]).output


def test_measuring_script(tmp_path):
    measure = script("measure")
    rows = measure.compare(64, torch.device("cpu"), 1.0, **TINY)
    assert [(r["phase"], r["contender"]) for r in rows] == [
        (phase, name) for phase in ("training", "forces") for name in ("adatom", "sdpa_math")
    ]
    assert all(r["ms"] > 0 and r["peak_bytes"] > 0 for r in rows)
    measure.plot(tmp_path / "plot.png", rows)
    assert (tmp_path / "plot.png").exists()


def test_calculator(monkeypatch, tiny):
    pytest.importorskip("ase")
    from ase.build import bulk

    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    calculator = script("calculator")
    torch.manual_seed(0)
    model = Potential(**{**TINY, "cutoff": 4.0}).double()
    torch.nn.init.normal_(model.readout[2].weight, std=0.1)
    model.pairs.copy_(0.1 * torch.randn(len(model.waves)))
    atoms = bulk("KCl", "rocksalt", a=5.0, cubic=True)
    atoms.rattle(0.1, seed=1)
    atoms.calc = calculator.AttentionPotential(model)
    forces, stress = atoms.get_forces(), atoms.get_stress(voigt=False)
    change, h = np.random.default_rng(0).normal(size=forces.shape), 1e-4
    strain = np.array([[1.0, 2, 0], [2, 0, 3], [0, 3, -1]])
    push, squeeze = [], []
    for s in (h, -h):
        moved = atoms.copy()
        moved.calc = atoms.calc
        moved.positions += s * change
        push.append(moved.get_potential_energy())
        moved = atoms.copy()
        moved.calc = atoms.calc
        moved.set_cell(atoms.cell.array @ (np.eye(3) + s * strain), scale_atoms=True)
        squeeze.append(moved.get_potential_energy())
    assert (push[0] - push[1]) / (2 * h) == pytest.approx(-(forces * change).sum(), rel=1e-6, abs=1e-8)
    assert (squeeze[0] - squeeze[1]) / (2 * h * atoms.get_volume()) == pytest.approx((stress * strain).sum(), rel=1e-4)
    energies = calculator.dynamics(atoms, kelvin=100, femtoseconds=1.0, steps=40)
    assert energies.shape == (41, 2)
    assert np.ptp(energies.sum(1)) < 0.02 * np.ptp(energies[:, 1])
    app = calculator.typer.Typer()
    app.command()(calculator.main)
    for option in ("--steps=0", "--steps=-5", "--femtoseconds=0", "--kelvin=-1"):
        result = CliRunner().invoke(app, [str(Path(__file__)), option])
        assert result.exit_code == 2 and "Invalid value for" in result.output
    atoms.pbc = (True, False, False)
    with pytest.raises(ValueError, match="periodic in all directions or none"):
        atoms.get_potential_energy()
