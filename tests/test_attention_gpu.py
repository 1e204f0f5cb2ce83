"""Attention on a GPU: captured in CUDA graphs, and the same bits a thousand times beside other work."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

import adatom

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
BF16, F32 = torch.bfloat16, torch.float32
TRIANGLE = ((1, 256, 4, 256, 32),) * 3


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return adatom.attention(q, k, v, causal=True)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return adatom.attention(q, k, v, bias=bias)


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ends = torch.arange(0, 1025, 256, device=q.device, dtype=torch.int32)
    return adatom.attention_varlen(q, k, v, ends, ends, causal=True)


CALLS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], torch.dtype, bool]] = {
    # the call, the shapes of its tensors, their dtype, and whether it is differentiated twice
    "head_dim 64": (causal, ((2, 8, 1000, 64),) * 3, BF16, False),
    "head_dim 128, shared keys": (causal, ((2, 8, 1000, 128), *((2, 2, 1000, 128),) * 2), BF16, False),
    "head_dim 192": (causal, ((1, 4, 1000, 192),) * 3, BF16, False),
    "a bias": (biased, (*((2, 4, 1000, 64),) * 3, (4, 1000, 1000)), BF16, False),
    "a bias that rows share": (biased, (*TRIANGLE, (1, 1, 4, 256, 256)), BF16, False),
    "a bias that rows share, float32": (biased, (*TRIANGLE, (1, 1, 4, 256, 256)), F32, False),
    "packed": (packed, ((1024, 4, 128),) * 3, BF16, False),
    "decoding": (causal, ((4, 16, 1, 128), *((4, 2, 4000, 128),) * 2), BF16, False),
    "one tile, twice": (biased, (*((500, 8, 32, 16),) * 3, (500, 1, 1, 32)), F32, True),
    "twice": (biased, (*((1, 4, 300, 64),) * 3, (300, 300)), F32, True),
}


def inputs(name: str, device: torch.device) -> list[Tensor]:
    return [(torch.randn(shape) * 0.5).to(device, CALLS[name][2]).requires_grad_() for shape in CALLS[name][1]]


def results(name: str, given: list[Tensor]) -> list[Tensor]:
    """Out, its gradients and, if the call is differentiated twice, theirs."""
    call, _, _, twice = CALLS[name]
    out = call(*given)
    found = [out, *torch.autograd.grad(out, given, out.detach(), create_graph=twice)]
    if twice:
        found += torch.autograd.grad(sum(g.square().sum() for g in found[1:]), given)
    return [t.detach() for t in found]


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", CALLS)
def test_capture(cuda: torch.device, deterministic: None, name: str) -> None:
    """A captured step gives what an eager one gives, bit for bit, also of other numbers in the same places."""
    given = inputs(name, cuda)
    with torch.cuda.stream(torch.cuda.Stream()):
        results(name, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = results(name, given)
    with torch.no_grad():
        for t in given:
            t.mul_(-0.5)
    graph.replay()
    want = results(name, given)
    torch.cuda.synchronize()
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_a_thousand_times(cuda: torch.device, deterministic: None, name: str) -> None:
    """While another stream keeps the memory busy."""
    given, beside = inputs(name, cuda), torch.cuda.Stream()
    source = torch.zeros(2**27, device=cuda, dtype=torch.uint8)
    target, changed = torch.empty_like(source), torch.zeros((), device=cuda, dtype=torch.bool)
    want = results(name, given)
    torch.cuda.synchronize()
    for _ in range(1000):
        with torch.cuda.stream(beside):
            target.copy_(source)
        for one, other in zip(want, results(name, given), strict=True):
            changed |= (one != other).any()
    torch.cuda.synchronize()
    assert not changed.item()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dim", "heads", "kv_heads", "dtype"), [
    (64, 4, 4, BF16), (128, 4, 4, BF16), (64, 8, 2, torch.float16), (128, 16, 2, BF16), (40, 6, 3, torch.float16),
])  # fmt: skip
def test_packed_sequences_do_not_see_each_other(
    cuda: torch.device, dim: int, heads: int, kv_heads: int, dtype: torch.dtype, causal: bool
) -> None:
    """NaN and infinities in some sequences change no bit of the gradients of others, also where these are empty."""
    pytest.importorskip("triton.experimental.gluon")
    from adatom.ops.attention import hopper_bwd, hopper_fwd
    from adatom.ops.attention.api import inputs_of

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    lens_q, lens_k, bad = (300, 0, 1, 65, 40, 129, 500, 128, 7), (290, 30, 1, 129, 0, 64, 640, 128, 9), (1, 3, 6, 8)
    ends = [torch.tensor((0, *lens)).cumsum(0).int().to(cuda) for lens in (lens_q, lens_k)]
    at_q, at_k = (torch.arange(len(lens)).repeat_interleave(torch.tensor(lens)) for lens in (lens_q, lens_k))
    good_q, good_k = (torch.tensor([int(s) not in bad for s in at], device=cuda) for at in (at_q, at_k))

    def rows(n: int, h: int) -> Tensor:
        return torch.randn(n, h, dim, device=cuda, dtype=dtype)

    clean = [rows(sum(lens_q), heads), *(rows(sum(lens_k), kv_heads) for _ in "kv"), rows(sum(lens_q), heads)]
    x, o, _ = inputs_of(*clean[:3], *ends, causal=causal)
    out, lse = hopper_fwd.forward(x, o)
    found = []
    for value in (None, math.nan, math.inf, -math.inf):
        if value is not None:
            for t in (x.q, clean[3], out, lse.T):
                t[~good_q] = value
            for t in (x.k, x.v):
                t[~good_k] = value
        for backward in (hopper_bwd.backward_ordered, hopper_bwd.backward):
            dq, dk, dv, _, _ = backward(x, o, out, lse, clean[3], None, False)
            found.append([dq[good_q], dk[good_k], dv[good_k]])
            assert all(bool(t.isfinite().all()) for t in found[-1])
    for others in found[2::2]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others))
    for others in found[3::2]:  # the fast row adds dQ in any order
        assert all(torch.equal(a, b) for a, b in zip(found[1][1:], others[1:]))


SHARING = """
import sys, time, torch, adatom

torch.use_deterministic_algorithms(True)
q, k, v, dout = (torch.randn(1, 16, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
bias = torch.randn(1, 16, 8192, 8192, device="cuda", dtype=torch.bfloat16)
given = [t.requires_grad_() for t in (q, k, v, bias)]
out = adatom.attention(q, k, v, bias=bias)
first = torch.autograd.grad(out, given, dout, retain_graph=True)
print("made", flush=True)
sys.stdin.readline()
end = time.time() + 15
while time.time() < end:
    assert all(map(torch.equal, torch.autograd.grad(out, given, dout, retain_graph=True), first))
"""


def test_results_repeat_while_other_processes_share_the_gpu(cuda):
    """It then goes from one to the other in the middle of kernels. Beside a bias, with barriers that nobody looked at,
    hardly a gradient was without NaN then."""
    if torch.cuda.get_device_properties(cuda).total_memory < 70e9:
        pytest.skip("needs a GPU with 70 GB")
    pipe, several = subprocess.PIPE, []
    with ExitStack() as ends:  # of each: killed, if it still runs, its pipes closed and waited for
        for _ in range(5):
            process = subprocess.Popen([sys.executable, "-c", SHARING], stdin=pipe, stdout=pipe, text=True)
            several.append(ends.enter_context(process))
            ends.callback(process.kill)
        for process in several:
            assert process.stdout.readline() == "made\n"
        for process in several:
            process.stdin.write("\n")
            process.stdin.flush()
        assert [process.wait(120) for process in several] == [0] * 5
