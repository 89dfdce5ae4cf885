"""The variants of routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from veomni_hook.kernels.selection.declaration import NPU, Variant
from veomni_hook.kernels.selection.table import TRITON, backend, op
from veomni_hook.patterns import combinations

__all__ = ["LAYOUTS", "OP", "Layout", "derived"]

#: What variants that choose by scores and a bias differ in, an axis a table, in the form of
#: `veomni_hook.kernels.moe_experts.variants.AXES`; `Layout` has the words.
AXES: tuple[Mapping[str, Mapping[str, Any]], ...] = (
    {
        "biased_topk": {"grouped": False, "any_score": True, "always": True},
        "grouped_topk": {"grouped": True, "any_score": False, "always": False},
    },
    {"{}": {}, "{}_of_any_score": {"any_score": True, "always": False}},
)


class Layout(NamedTuple):
    """A variant that chooses by scores and a bias.

    Attributes:
        grouped: the choice is within the best groups.
        any_score: the score and the epsilon are operands, not the sigmoid and 1e-20.
        always: weights are divided by their sum, whatever an operand says.
    """

    grouped: bool
    any_score: bool
    always: bool

    @property
    def operands(self) -> tuple[str, ...]:
        """The operands, in the order of `reference.scored`."""
        groups = ("num_experts", "num_group", "topk_group") * self.grouped
        score, flag = ("score",) * self.any_score, () if self.always else ("normalise",)
        rest = (*("epsilon",) * self.any_score, *("fill",) * self.grouped, "sorted_")
        return ("router_logits", "bias", "top_k", *groups, *score, *flag, *rest)


LAYOUTS = {name: Layout(**meant) for name, meant in combinations(AXES).items()}

_TRITON = backend(
    "triton",
    ".triton:{variant}",
    refuses=".triton:refuses_in_autocast",
    requires=TRITON,
    priority=10,
    traceable=True,
    beats_inductor=True,
    invariant=("cuda",),
    description="one launch forward and one backward; saves the chosen logits; deterministic",
)
_NPU = backend(
    "npu",
    ".npu:{variant}",
    refuses=".npu:refuses_in_autocast",
    requires=NPU,
    priority=10,
    description="npu_moe_gating_top_k_softmax; the backward is a formula over the chosen experts",
)
_TORCH = backend(
    "torch",
    ".torch:{variant}",
    refuses=".torch:refuses",
    traceable=True,
    description="computes weights only for the chosen experts and saves nothing for the others",
)
_TORCH_ON_NPU = replace(
    _TORCH,
    backend="npu",
    requires=NPU,
    traceable=False,
    description="the torch kernel; some torch_npu releases have no operator with a gradient for it",
    automatic=False,
)

VARIANTS = {
    "softmax_topk": Variant(
        "top_k of softmax(float32(logits)); weights / sum(weights) if normalise",
        kernels=(
            replace(_TRITON, refuses=".triton:refuses"),
            replace(_NPU, refuses=".npu:refuses"),
            _TORCH,
        ),
    ),
    "topk_softmax": Variant(
        "softmax over the top_k of logits",
        kernels=(_TRITON, _NPU, _TORCH),
    ),
    "biased_topk": Variant(
        "scores = score(logits) at the top_k of scores + bias; weights / (sum(weights) + epsilon)",
    ),
    "grouped_topk": Variant(
        "scores = sigmoid(logits) at the top_k of scores + bias within the topk_group best groups; "
        "weights / (sum(weights) + 1e-20) if normalise",
    ),
}


def derived(name: str) -> Variant | None:
    """Return the row of a combination of `AXES`, in the table or not; None for another name."""
    layout = LAYOUTS.get(name)
    if layout is None:
        return None
    base = name.removesuffix("_of_any_score")
    row = VARIANTS.get(name, Variant(f"{base} with any score and epsilon, normalised or not"))
    kernels = tuple(
        replace(each, load=each.load.replace(":{variant}", ":kernel({variant})"))
        for each in (_TRITON, _TORCH_ON_NPU, _TORCH)
    )
    return replace(
        row, reference=".reference:of({variant})", operands=layout.operands, kernels=kernels, form=layout
    )


OP = op(
    "moe_router",
    {name: derived(name) or row for name, row in VARIANTS.items()},
    invariant=("cpu",),
    derives=".variants:derived",
    prepares=".seam:watch",
)
