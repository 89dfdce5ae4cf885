"""Cases of the pieces that Gluon computes on Hopper, and their results in float64. Needs no pytest."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from veomni_hook.kernels.gated_mlp.triton import ACTIVATIONS
from veomni_hook.kernels.moe_experts import triton_products
from veomni_hook.kernels.moe_experts.triton_products import Expert
from veomni_hook.kernels.moe_experts.triton_routing import route
from veomni_hook.kernels.shared.activations import FUNCTIONS

BF16, F16 = torch.bfloat16, torch.float16
PRODUCT, ALONE = 0, 4


@dataclass(frozen=True)
class Case:
    """Sizes and forms; ``spread`` is how ids are drawn."""

    hidden: int = 512
    inner: int = 768
    dtype: torch.dtype = BF16
    tokens: int = 700
    top_k: int = 4
    experts: int = 16
    spread: str = "uneven"
    activation: str = "silu"
    form: int = PRODUCT
    transposed: bool = False
    apart: int = 0  # columns between rows of tokens

    @property
    def expert(self) -> Expert:
        return Expert(
            self.form, ACTIVATIONS[self.activation], transposed=self.transposed, alone=self.form == ALONE
        )


CASES = {
    "even": Case(2048, 768, spread="even", tokens=1024),
    "uneven": Case(),
    "float16": Case(dtype=F16),
    "skewed": Case(tokens=1500, spread="skewed"),
    "one row each": Case(spread="one row each", tokens=1300),
    "nobody": Case(spread="nobody"),
    "one expert": Case(experts=1, top_k=1, spread="even"),
    "transposed": Case(transposed=True),
    "transposed, float16": Case(576, 704, F16, transposed=True),
    "alone": Case(form=ALONE, activation="relu_squared"),
    "alone, transposed": Case(320, 320, form=ALONE, activation="silu", transposed=True),
    "parts of tiles": Case(576, 1408),
    "narrow": Case(64, 64),
    "gelu_tanh": Case(activation="gelu_tanh"),
    "gelu": Case(activation="gelu"),
    "quick_gelu": Case(activation="quick_gelu"),
    "rows apart": Case(apart=16),
    "wide": Case(4096, 1536, experts=4, tokens=300),
}


def drawn(case: Case, generator: torch.Generator) -> torch.Tensor:
    """Ids [tokens, top_k], some of which have no expert."""
    shape, experts = (case.tokens, case.top_k), case.experts
    ids = torch.randint(experts, shape, generator=generator)
    if case.spread in ("uneven", "skewed"):
        scores = torch.randn(case.tokens, experts, generator=generator) + torch.linspace(-2, 2, experts)
        scores[:, 3] = -math.inf  # without rows
        ids = scores.topk(case.top_k, dim=1).indices
        ids[::50, 1], ids[::70, 2] = experts, -1
    if case.spread == "skewed":
        ids[torch.rand(shape, generator=generator) < 1 / 6] = 5
    if case.spread == "one row each":
        ids = torch.full(shape, 7)
        ids.view(-1)[:experts] = torch.arange(experts)
    if case.spread == "nobody":
        ids = torch.full(shape, experts)
    return ids


class Operands:
    """Of one case; rows without an expert hold nan."""

    def __init__(self, case: Case, device: str = "cuda") -> None:
        self.case = case
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(device, case.dtype)

        ids = drawn(case, generator).to(device)
        self.routing = route(ids, case.experts, 128)
        self.weights = torch.rand(ids.shape, generator=generator).to(device, case.dtype)
        self.tokens = normal(case.tokens, case.hidden + case.apart)[:, : case.hidden]
        shape = (case.inner, case.hidden) if case.transposed else (case.hidden, case.inner)
        self.down = normal(case.experts, *shape, scale=case.hidden**-0.5)
        pairs, width = self.routing.num_pairs, case.inner * (1 if case.form == ALONE else 2)
        self.rows, self.products = normal(pairs, case.inner), normal(pairs, width)
        self.end = int(self.routing.offsets[case.experts])
        for each in (self.rows, self.products):
            each[self.end :] = math.nan

    def of_expert(self, expert: int) -> slice:
        first, end = self.routing.offsets[expert : expert + 2].tolist()
        return slice(first, end)


def weight_gradients(given: Operands) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What the library returns for both sides' gathering, and what it should."""
    routing, tokens, rows = given.routing, given.tokens, given.rows
    found = [
        triton_products.weight_gradient(tokens, rows, routing, gathered=(True, False)),
        triton_products.weight_gradient(rows, tokens, routing, gathered=(False, True)),
    ]
    truth = torch.zeros(given.case.experts, tokens.shape[1], rows.shape[1], dtype=torch.float64)
    truth = truth.to(tokens.device)
    for expert in range(given.case.experts):
        own = given.of_expert(expert)
        truth[expert] = tokens[routing.tokens[own].long()].double().T @ rows[own].double()
    return found, [truth, truth.transpose(1, 2)]


def gate_up_backward(given: Operands, *, spend: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients of gate and up, w h and the sums of the rows that have an expert; and what they should be."""
    case, routing, end = given.case, given.routing, given.end
    products = given.products.clone()
    gradients, h, partial = triton_products.gate_up_backward(
        given.tokens, given.down, products, routing, given.weights, case.expert, spend=spend
    )
    assert (gradients is products) is spend
    if spend:
        assert gradients[end:].isnan().all()
    else:
        torch.testing.assert_close(products, given.products, rtol=0, atol=0, equal_nan=True)
    found = [gradients[:end], h[:end], partial.sum(0)[:end]]
    leaf = given.products[:end].double().requires_grad_()
    activation = FUNCTIONS[case.activation]
    if case.form == ALONE:
        y = activation(leaf)
    else:
        gate, up = leaf.chunk(2, dim=1)
        y = activation(gate) * up
    dh = torch.zeros_like(y)
    for expert in range(case.experts):
        own = given.of_expert(expert)
        matrix = given.down[expert].double()
        matrix = matrix.T if case.transposed else matrix
        dh[own] = given.tokens[routing.tokens[own].long()].double() @ matrix
    weight = given.weights.flatten()[routing.pairs[:end].long()].double()[:, None]
    (dz,) = torch.autograd.grad(y, leaf, dh * weight)
    return found, [dz, (y * weight).detach(), (dh * y).sum(1).detach()]


def errors(found: list[torch.Tensor], truth: list[torch.Tensor]) -> list[float]:
    """The largest relative error of an expert's matrix or of all rows, for each result; nan if one is not finite."""
    worst = []
    for ours, exact in zip(found, truth, strict=True):
        assert ours.shape == exact.shape, (ours.shape, exact.shape)
        # A matrix of an expert, or all rows.
        dims = (1, 2) if exact.ndim == 3 else None
        size = torch.linalg.vector_norm(exact, dim=dims)
        gap = torch.linalg.vector_norm(ours.double() - exact, dim=dims)
        # An expert without rows has exact zeros.
        share = torch.where(size > 0, gap / size, torch.where(gap == 0, 0.0, math.inf))
        worst.append(float(share.max()) if share.numel() else 0.0)
    return worst
