"""A compact attention potential: each atom's neighbours attend to each other; energy, forces and stress.

Energies are exactly invariant under rotations, reflections, translations and permutations, and extensive. They are
twice continuously differentiable as neighbours come and go at the cutoff: the weight of a key falls to zero there.
Angles enter through the dot product of queries and keys, whose components are scalars times spherical harmonics of the
neighbours' directions: by the addition theorem their product is a sum of Legendre polynomials of the angle between two
neighbours. Tokens for pairs that attend around each atom follow PET (Pozdnyakov and Ceriotti, arXiv:2305.19302), which
learns invariance instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import adatom
from adatom.check import require, whole
from adatom.potential.graph import Graph, known
from adatom.potential.parts import seen, silu, swap, turn

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

GAIN = 1.4
ELEMENTS = (3, 8, 9, 11, 12, 17, 19, 20)  # Li O F Na Mg Cl K Ca


def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, lens: Tensor) -> Tensor:
    """adatom.attention: q (atoms, heads, slots, dim), k and v, bias (atoms, heads, 1, slots), lens (atoms,)."""
    out = adatom.attention(q, k, v, bias=bias, kv_lens=lens)
    assert isinstance(out, Tensor)  # a pair only with return_lse
    return out


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, lens: Tensor) -> Tensor:
    """The same by PyTorch's own attention, in its only form that can be differentiated twice."""
    hidden = torch.arange(k.shape[2], device=k.device) >= lens[:, None, None, None]
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, bias.masked_fill(hidden, -torch.inf), enable_gqa=True)


def harmonics(u: Tensor, degree: int) -> Tensor:
    """Of directions u (..., 3), for l = 1 to `degree` (at most 2), 2 l + 1 numbers with y(u) . y(w) = P_l(u . w)."""
    if degree == 1:
        return u
    x, y, z = u.unbind(-1)
    second = (x * y, y * z, z * x, (x * x - y * y) / 2, (2 * z * z - x * x - y * y) / 12**0.5)
    return torch.cat([u, torch.stack(second, -1) * 3**0.5], -1)


class Silu(nn.Module):
    """silu."""

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return silu(x)


class Block(nn.Module):
    """One layer: neighbours of an atom attend to each other, then each pair looks at itself from its other end.

    A head has `scalars` plain components and one amplitude for each l, which multiplies the harmonics of the direction.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, scalars: int, degree: int, radial: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.scalars, each = heads, kv_heads, scalars, scalars + degree
        self.q, self.kv = nn.Linear(width, heads * each), nn.Linear(width, 2 * kv_heads * each)
        self.bias = nn.Parameter(torch.randn(heads, radial) * 0.1)
        self.out = nn.Linear(heads * each, width)
        self.near, self.far = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.mix = nn.Linear(width, width)

    def forward(self, h: Tensor, y: Tensor, radial: Tensor, falloff: Tensor, g: Graph, attend: Attend) -> Tensor:
        """h (atoms, slots, width), radial (atoms, slots, n), falloff (atoms, 1, slots) and y of `harmonics`."""
        weight, offset = torch.cat([self.q.weight, self.kv.weight]), torch.cat([self.q.bias, self.kv.bias])
        heads = self.heads, self.kv_heads, self.kv_heads
        x = F.linear(h, weight, offset).unflatten(-1, (sum(heads), -1))
        q, k, v = turn(x, y, self.scalars, heads)
        bias = self.bias @ radial.mT + falloff
        out = seen(attend(q, k, v, bias[:, :, None], g.counts), y, self.scalars)
        h = h + self.out(out.flatten(2))
        met = swap(self.far(h).flatten(0, 1), g.reverse.flatten(), self.near(h).flatten(0, 1))
        return h + self.mix(silu(met).view_as(h))


class Prediction(NamedTuple):
    """Of a Graph of several structures."""

    energies: Tensor  # (structures,) eV
    forces: Tensor  # (atoms, 3) eV/Å
    stresses: Tensor  # (structures, 3, 3) eV/Å^3: (dE/dstrain) / volume; NaN where nothing is periodic


class Potential(nn.Module):
    """Energy of atoms from their neighbours within `cutoff` Å. `attend` computes attention: `fused` or `plain`.

    `elements` are atomic numbers. head_dim is `scalars` + 3, or + 8 with `degree` 2: keep it a multiple of 8. Raises
    ValueError for elements that are none or come twice, a cutoff that is not positive, and other degrees; and for a
    Graph, and a state dict, of other elements or another cutoff.
    """

    waves: Tensor
    reference: Tensor
    pairs: Tensor
    scale: Tensor

    def __init__(
        self,
        elements: Iterable[int] = ELEMENTS,
        cutoff: float = 5.0,
        width: int = 48,
        heads: int = 16,
        kv_heads: int = 4,
        scalars: int = 5,
        degree: int = 1,
        layers: int = 2,
        radial: int = 12,
        attend: Attend = fused,
    ) -> None:
        super().__init__()
        require(degree in (1, 2), "harmonics up to degree 1 or 2", degree=degree)
        sizes = {"width": width, "heads": heads, "kv_heads": kv_heads, "scalars": scalars, "radial": radial}
        require(all(whole(n, 1) for n in sizes.values()), "positive integers", **sizes)
        require(whole(layers, 0), "layers of at least 0", layers=layers)
        require(heads % kv_heads == 0, "heads to be a multiple of kv_heads", heads=heads, kv_heads=kv_heads)
        (self.elements, self.cutoff), self.degree, self.attend = known(elements, cutoff), degree, attend
        features = radial + 2 * len(self.elements) + 1
        self.embed = nn.Sequential(nn.Linear(features, width), Silu(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, scalars, degree, radial) for _ in range(layers))
        last = nn.Linear(width, 1)
        self.readout = nn.Sequential(nn.Linear(width, width), Silu(), last)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):  # signals keep their size through the layers
                nn.init.normal_(layer.weight, std=GAIN * layer.in_features**-0.5)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        nn.init.zeros_(last.weight)  # starts as the pair potential
        self.register_buffer("waves", torch.arange(1, radial + 1) * torch.pi / self.cutoff)
        # Fitted beforehand by least squares: energies of elements, and a potential of each pair of elements.
        self.register_buffer("reference", torch.zeros(len(self.elements)))  # eV
        self.register_buffer("pairs", torch.zeros(len(self.elements), len(self.elements), radial))  # eV
        self.register_buffer("scale", torch.ones(()))  # eV: the size of what attention adds

    @property
    def sees(self) -> tuple[tuple[int, ...], float]:
        """What `graph` asks for: the elements and the cutoff."""
        return self.elements, self.cutoff

    def require_seen(self, g: Graph) -> None:
        """Raise ValueError for a Graph of other elements or another cutoff, which would give wrong energies."""
        given, expected = (g.elements, g.cutoff), "a Graph of the model's elements and cutoff, graph(s, *model.sees)"
        require(given == self.sees, expected, graph=given, model=self.sees)

    def get_extra_state(self) -> Tensor:
        """What the state dict says of the model: the cutoff, then the elements, in float64."""
        return torch.tensor([self.cutoff, *self.elements], dtype=torch.float64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Raise ValueError if the state, which may have been cast, is of other elements or another cutoff."""
        mine = self.get_extra_state()
        given = mine if state.is_meta else state.double().cpu()  # a model without values is of any
        casts = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        same = any(torch.equal(given, mine.to(dtype).double()) for dtype in casts)
        require(same, "a state dict of the model's cutoff and elements", given=given.tolist(), model=mine.tolist())

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Compares before any of it is copied. State dicts from before they said what they are of are trusted."""
        self.set_extra_state(state_dict.setdefault(f"{prefix}_extra_state", self.get_extra_state()))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def radial(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """Of distances r (...): 1 - (r / cutoff)^2, whose cube is the cutoff function; and waves (..., n)."""
        near = (1 - (r / self.cutoff).square()).clamp_min(1e-12)
        return near, torch.sin(r[..., None] * self.waves) * (self.cutoff / 2 / r[..., None])

    def forward(self, g: Graph) -> Tensor:
        """Energies (structures,) in eV; differentiable twice with respect to g.vectors. Raises ValueError for a Graph
        of other elements or another cutoff."""
        self.require_seen(g)
        slot = torch.arange(g.others.shape[1], device=g.others.device)
        pair = (slot > 0) & (slot < g.counts[:, None])  # (atoms, slots)
        r = (g.vectors.square().sum(-1) + ~pair).sqrt()  # 1 where there is no pair
        near, radial = self.radial(r)
        near = torch.where(pair, near, 1.0)
        y = harmonics(g.vectors / r[..., None], self.degree)
        soft = radial * (self.waves[0] / self.waves)  # equal slopes: else fast waves drown forces in noise
        falloff = 3 * near.log()[:, None]
        kinds = torch.arange(len(self.elements), device=slot.device)
        known = [(g.species[:, None] == kinds)[:, None].expand(-1, len(slot), -1), g.others[..., None] == kinds]
        centre = (slot == 0)[:, None].expand(len(pair), -1, 1)
        h = self.embed(torch.cat([soft, torch.cat([*known, centre], -1).to(r.dtype)], -1))
        for block in self.blocks:
            h = block(h, y, soft, falloff, g, self.attend)
        weight = torch.where(slot < g.counts[:, None], near**3, 0.0)
        atoms = self.scale * (self.readout(h).squeeze(-1) * weight).sum(1) + self.reference[g.species]
        half = (radial * self.pairs[g.species[:, None], g.others]).sum(-1) * torch.where(pair, weight / 2, 0.0)
        atoms = atoms + half.sum(1)
        member = g.systems == torch.arange(len(g.volumes), device=slot.device)[:, None]
        return member.to(atoms.dtype) @ atoms  # a product, not atomic additions: deterministic

    def predict(self, g: Graph, training: bool = False) -> Prediction:
        """Energies, forces and stresses; with a graph for the gradient of a loss if `training`.

        The energy depends on positions and cell through the vectors alone, so one gradient gives both: with
        G = dE/dvectors, the force on an atom is the sum of G over its pairs less that over their opposites, and the
        stress is the sum of vector x G. Raises RuntimeError under torch.inference_mode().
        """
        g = g._replace(vectors=g.vectors.detach().requires_grad_())
        with torch.enable_grad():
            energies = self(g)
            require(energies.requires_grad, "torch.no_grad() instead of torch.inference_mode()", RuntimeError)
            (pull,) = torch.autograd.grad(energies.sum(), g.vectors, create_graph=training)
        forces = (pull - swap(pull.flatten(0, 1), g.reverse.flatten()).view_as(pull)).sum(1)
        strain = torch.einsum("nia,nib->nab", g.vectors, pull)
        member = (g.systems == torch.arange(len(g.volumes), device=pull.device)[:, None]).to(pull.dtype)
        strain = (member @ strain.flatten(1)).unflatten(1, (3, 3))
        volumes, periodic = g.volumes[:, None, None], g.volumes.isfinite()[:, None, None]
        stresses = (strain + strain.mT) / (2 * torch.where(periodic, volumes, 1.0))  # NaN there would enter gradients
        stresses = torch.where(periodic, stresses, torch.nan)
        found = Prediction(energies, forces, stresses)
        return found if training else Prediction(*(t.detach() for t in found))
