"""A learned pair bias: fit relative positions through attention, and look at the curvature of the loss."""

import torch

import adatom


def main(steps: int = 60) -> tuple[float, float]:
    """Returns the loss before and after; prints the sharpness (largest curvature) of the loss in the bias."""
    torch.manual_seed(0)
    heads, length = 4, 32
    q, k, v = (torch.randn(2, heads, length, 16) for _ in range(3))
    offset = torch.arange(length) - torch.arange(length)[:, None]
    target = adatom.attention(q, k, v, bias=-0.3 * offset.abs())  # what is to be found: attend to neighbours

    table = torch.zeros(heads, 2 * length - 1, requires_grad=True)  # a bias for each head and distance

    def loss(table):
        return (adatom.attention(q, k, v, bias=table[:, offset + length - 1]) - target).square().mean()

    optimizer = torch.optim.Adam([table], lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(loss(table))
        losses[-1].backward()
        optimizer.step()

    direction = torch.randn_like(table)
    for _ in range(10):  # power iteration with Hessian-vector products: the second derivative of attention
        direction = direction / direction.norm()
        (gradient,) = torch.autograd.grad(loss(table), table, create_graph=True)
        (direction,) = torch.autograd.grad(gradient, table, direction)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, sharpness {direction.norm():.2e}")
    return losses[0].item(), losses[-1].item()


if __name__ == "__main__":
    main()
