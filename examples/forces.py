"""Forces from an energy: train a small attention potential on -dE/dx, which differentiates attention twice."""

import torch
from torch import nn

import adatom


class Potential(nn.Module):
    """Energy of atoms at positions (batch, atoms, 3): attention whose bias is a learned function of distance."""

    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(heads, 1, dim) * 0.3)
        self.radial = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, heads + 1))
        self.values = nn.Linear(1, heads * dim)
        self.energy = nn.Sequential(nn.Linear(heads * dim, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        atoms = x.shape[1]
        d2 = (x[:, :, None] - x[:, None]).square().sum(-1)
        bias, density = self.radial(d2[..., None]).split((self.tokens.shape[0], 1), -1)
        density = density.squeeze(-1).mean(-1, keepdim=True)
        v = self.values(density).unflatten(-1, (self.tokens.shape[0], -1)).transpose(1, 2)
        q = k = self.tokens.expand(x.shape[0], -1, atoms, -1)
        out = adatom.attention(q, k, v, bias=bias.permute(0, 3, 1, 2))
        return self.energy(out.transpose(1, 2).flatten(2)).sum((1, 2))


def forces(energy, x: torch.Tensor, training: bool = False) -> torch.Tensor:
    """-dE/dx (batch, atoms, 3)."""
    x = x.requires_grad_()
    return -torch.autograd.grad(energy(x).sum(), x, create_graph=training)[0]


def main(steps: int = 80) -> tuple[float, float]:
    """Returns the error of the forces before and after, relative to their size."""
    torch.manual_seed(0)

    def morse(x):  # the truth: pairs that repel when close and attract when far
        i, j = torch.triu_indices(x.shape[1], x.shape[1], 1)
        r = (x[:, i] - x[:, j]).norm(dim=-1)
        return (1 - torch.exp(1.5 - r)).square().sum(-1)

    x = torch.randn(64, 6, 3) * 1.5
    target = forces(morse, x).clamp(-3, 3)
    model = Potential()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    errors = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (forces(model, x, training=True) - target).square().mean()
        loss.backward()  # through the gradient: the second derivative of attention
        optimizer.step()
        errors.append((loss / target.square().mean()).sqrt().item())
    print(f"error of the forces {errors[0]:.1%} -> {errors[-1]:.1%}")
    return errors[0], errors[-1]


if __name__ == "__main__":
    main()
