"""The examples run, and do what they say."""

import importlib.util
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


pytestmark = pytest.mark.usefixtures("one_thread")


def example(name):
    """The module examples/<name>.py."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_learned_bias():
    before, after = example("learned_bias").main()
    assert after < before / 10


def test_forces():
    before, after = example("forces").main()
    assert after < before / 2


def test_packed():
    assert example("packed").main() < 1e-5


def test_huggingface():
    pytest.importorskip("transformers", minversion="5.5")
    assert example("huggingface").main().shape == (2, 20)


def test_pair_bias():
    assert example("pair_bias").main() < 1e-12


def test_pair_bias_of_padded_tokens():
    """What padding holds changes nothing that exists, by adatom and by definition."""
    module = example("pair_bias")
    torch.manual_seed(0)
    for starting in (True, False):
        block = module.TriangleAttention(8, 2, 4, starting=starting).double()
        z = torch.randn(2, 7, 7, 8, dtype=torch.float64, requires_grad=True)
        lengths = torch.tensor([7, 4])
        assert module.difference(block, z, lengths=lengths) < 1e-12
        alone = block(z[1:, :4, :4], attention=module.by_definition)
        padded = block(z, lengths=lengths, attention=module.by_definition)[1:, :4, :4]
        torch.testing.assert_close(padded, alone)


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        *("learned_bias", "forces", "packed", "pair_bias", "huggingface")
    }
