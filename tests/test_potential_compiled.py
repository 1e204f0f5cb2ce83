"""The potential under torch.compile, torch.func and forward mode: its derivatives are those of eager calls."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from adatom import device
from adatom.potential import parts
from adatom.potential.graph import graph
from adatom.potential.model import Potential, fused, plain

SALT = np.array([12, 8]), np.array([[0.1, 0.0, 0.2], [2.2, 2.0, 2.1]]), 4.2 * (1 - np.eye(3)) / 2
MOLECULE = np.array([3, 17, 8]), np.array([[0.0, 0, 0], [2.0, 0, 0], [1.0, 1, 1]]), None

pytestmark = pytest.mark.usefixtures("one_thread")

compiles = pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="this PyTorch does not trace torch.autograd.grad"
)


@pytest.fixture
def slight():
    """The least that has all parts, in float64; with the Graph of a crystal and a molecule."""
    torch.manual_seed(0)
    found = Potential(width=8, heads=2, kv_heads=1, radial=4, cutoff=3.5, layers=1).double()
    found.pairs.copy_(torch.randn_like(found.pairs))
    torch.nn.init.normal_(found.readout[2].weight, std=0.1)
    return found, graph([SALT, MOLECULE], *found.sees)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def compiled(function, **options):
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager", **options)


@compiles
@pytest.mark.parametrize("attend", [fused, plain])
def test_energies_and_forces_compile_to_one_graph(slight, attend):
    """Also the gradient of a loss of forces by the weights, which differentiates every part twice."""
    model, g = slight
    model.attend = attend
    vectors = g.vectors.requires_grad_()

    def both(vectors):
        energies = model(g._replace(vectors=vectors))
        return energies, torch.autograd.grad(energies.sum(), vectors, create_graph=True)[0]

    def derivatives(function):
        energies, pull = function(vectors)
        loss = energies.square().sum() + pull.square().sum()
        return energies, pull, *torch.autograd.grad(loss, list(model.parameters()))

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        got = derivatives(compiled(both, fullgraph=True))
    for a, b in zip(got, derivatives(both)):
        close(a, b)


@compiles
def test_predictions_compile(slight):
    """Of a crystal and a molecule, whose stress is NaN; with the weights' gradient of a loss without stresses."""
    model, g = slight

    def derivatives(function):
        found = function(g)
        loss = found.energies.square().sum() + found.forces.square().sum()
        return *found, *torch.autograd.grad(loss, list(model.parameters()))

    def training(g):
        return model.predict(g, training=True)

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        got, alone = derivatives(compiled(training)), compiled(model.predict, fullgraph=True)(g)
    expected = derivatives(training)
    for a, b in (*zip(got, expected), *zip(alone, expected)):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-10, atol=1e-10, equal_nan=True)
    assert got[2][1].isnan().all() and all(grad.isfinite().all() for grad in got[3:])


@compiles
def test_compiled_models_of_several_cutoffs_refuse_each_others_graphs(slight):
    """They share their code, and guard what they are of."""
    options = {"width": 8, "heads": 2, "kv_heads": 1, "radial": 4, "layers": 1}
    models = [Potential(cutoff=cutoff, **options).double() for cutoff in (3.5, 3.0, 4.0)]
    graphs = [graph([SALT], *model.sees) for model in models]
    torch.compiler.reset()
    energies = [torch.compile(model, backend="aot_eager") for model in models]
    for n, (energy, model, g) in enumerate(zip(energies, models, graphs)):
        close(torch.compile(model, backend="aot_eager", fullgraph=True)(g), model(g))
        close(energy(g), model(g))
        with pytest.raises(ValueError, match="a Graph of the model's"):
            energy(graphs[n - 1])
        with pytest.raises(ValueError, match="a Graph of the model's"):
            energy(g._replace(elements=g.elements[::-1]))


def test_transforms_are_those_of_autograd(slight):
    model, g = slight

    def energy(vectors):
        return model(g._replace(vectors=vectors)).sum()

    v, tangent = g.vectors, torch.randn_like(g.vectors)
    x = v.clone().requires_grad_()
    (pull,) = torch.autograd.grad(energy(x), x, create_graph=True)
    along = [torch.autograd.grad(pull, x, t, retain_graph=True)[0] for t in (tangent, torch.zeros_like(v))]
    first, second = torch.func.jvp(torch.func.grad(energy), (v,), (tangent,))
    close(first, pull.detach())
    close(second, along[0])
    hessian = torch.func.hessian(energy)(v)
    close(torch.tensordot(hessian, tangent, 3), along[0])
    close(hessian.flatten(3).flatten(0, 2), hessian.flatten(3).flatten(0, 2).mT)
    slope = (pull.detach() * tangent).sum()
    close(torch.func.jvp(energy, (v,), (tangent,))[1], slope)
    with forward_ad.dual_level():
        close(forward_ad.unpack_dual(energy(forward_ad.make_dual(v, tangent))).tangent, slope)


@pytest.mark.parametrize("how", ["compiled", "grad", "tangents", "traced"])
def test_only_eager_calls_launch_kernels(how):
    """An autograd Function would lose the derivative of its backward in a graph, and torch.func refuses it."""
    met = []

    def note(x):
        met.append(parts.fuses(x))
        return x.sum()

    x = torch.ones(3)
    with device.pretend(device.Device("cuda", 90, 132, 232448)):
        assert parts.fuses(x)
        if how == "compiled":
            met.append(bool(compiled(lambda x: x * 1 if parts.fuses(x) else x * 0, fullgraph=True)(x).any()))
        elif how == "grad":
            torch.func.grad(note)(x)
        elif how == "traced":
            make_fx(note)(x)
        else:
            with forward_ad.dual_level():
                note(x)
        assert met and not any(met)
        assert parts.fuses(x)


COMPILED_ON_GPU = """
import torch
from adatom.potential import parts
from adatom.potential.graph import graph
from adatom.potential.model import Potential, plain

torch.manual_seed(0)
model = Potential(width=8, heads=2, kv_heads=1, radial=4, cutoff=3.5, layers=1, attend=plain).double()
torch.nn.init.normal_(model.readout[2].weight, std=0.1)
g = graph([([3, 17, 8], [[0.0, 0, 0], [2.0, 0, 0], [1.0, 1, 1]], None)], *model.sees)
vectors = g.vectors.requires_grad_()
assert parts.fuses(vectors)

def pull(vectors):
    return torch.autograd.grad(model(g._replace(vectors=vectors)).sum(), vectors, create_graph=True)[0]

def gradients(function):
    return torch.autograd.grad(function(vectors).square().sum(), list(model.parameters()), allow_unused=True)

expected = gradients(pull)
with torch._dynamo.config.patch(trace_autograd_ops=True):
    got = gradients(torch.compile(pull, backend="eager", fullgraph=True))
for a, b in zip(got, expected):
    assert (a is None) == (b is None)
    if a is not None:
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
"""


@compiles
def test_what_a_compiler_sees_has_the_derivatives_of_the_kernels():
    """In Triton's interpreter, in a process of its own."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COMPILED_ON_GPU]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
