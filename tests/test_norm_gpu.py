"""Norms on a GPU: programs that wait for each other, beside others."""

import pytest
import torch

import adatom

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("length", [12288, 32768, 131072])
def test_shared_rows_beside_other_work(cuda, length):
    """Backwards on four streams at once, which take each other's multiprocessors, end with the bits of one alone."""
    x = torch.randn(300, length, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    w, b = (torch.randn(length, device=cuda, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    dy = torch.randn_like(x)
    y = adatom.layer_norm(x, w, b)
    alone = torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)
    torch.cuda.synchronize()
    found = []
    streams = [torch.cuda.Stream() for _ in range(4)]
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                given = [t.detach().requires_grad_() for t in (x, w, b)]  # PyTorch warns of leaves of other streams
                found.append(torch.autograd.grad(adatom.layer_norm(*given), given, dy))
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for grads in found for one, other in zip(alone, grads))
