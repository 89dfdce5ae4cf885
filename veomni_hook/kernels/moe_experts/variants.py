"""The variants of experts.

E is the number of experts, H the hidden size, I an expert's inner size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from veomni_hook.kernels.selection.declaration import NPU, Requirement, Variant
from veomni_hook.kernels.selection.table import LIGER, TRITON, backend, op
from veomni_hook.patterns import combinations

__all__ = ["LAYOUTS", "OP", "Layout", "Whole", "derived"]


#: What experts with stacked weights differ in, an axis a table: a part of a variant's name, around the names
#: of the axes before it, and what it means. `Layout` has the words. Recognisers read this as text.
AXES: tuple[Mapping[str, Mapping[str, Any]], ...] = (
    {
        "gated": {"gate": "product", "rest": ("act_fn",)},
        "gated_clamped": {"gate": "clamped", "rest": ("act_fn", "limit")},
        "gated_clamped_after": {"gate": "clamped_after", "rest": ("act_fn", "limit")},
        "gated_float32_product": {"gate": "product_float32", "rest": ("act_fn",)},
        "gated_jointly": {"gate": "jointly", "rest": ("act_fn",), "summed_in": "float32"},
        "alpha_gated": {"gate": "scaled_sigmoid", "rest": ("alpha", "limit")},
        "ungated": {"gate": "activation", "rest": ("act_fn",), "summed_in": "weights"},
    },
    {"{}": {"normalised": False}, "{}_normalised": {"normalised": True}},
    {"{}": {"interleaved": False}, "interleaved_{}": {"interleaved": True}},
    {
        "{}": {"biased": False, "transposed": False},
        "{}_transposed": {"biased": False, "transposed": True},
        "biased_{}": {"biased": True, "transposed": True},
        "biased_{}_not_transposed": {"biased": True, "transposed": False},
    },
    {"{}": {"in_float32": False}, "{}_float32": {"in_float32": True, "summed_in": "float32"}},
)


class Layout(NamedTuple):
    """A variant with stacked weights, as the kernels see it.

    Attributes:
        gate: the name of the gate in `reference.gate`.
        rest: the operands after the weights, but for the norm.
        normalised: an expert ends with a norm, which is the last operand.
        interleaved: gate and up are the even and odd columns of the first product, not its halves.
        biased: the products have biases.
        transposed: weights are ``[E, in, out]``, not ``[E, out, in]``.
        in_float32: operands are cast to float32 first.
        summed_in: the dtype in which upstream adds up results: ``float32``, or that of ``hidden`` states or
            of routing ``weights``.
    """

    gate: str
    rest: tuple[str, ...]
    normalised: bool
    interleaved: bool
    biased: bool
    transposed: bool
    in_float32: bool
    summed_in: str = "hidden"

    @property
    def operands(self) -> tuple[str, ...]:
        """The operands after hidden states, ids and routing weights."""
        weights = ("gate_up_proj", "gate_up_bias", "down_proj", "down_bias")
        return (*weights[:: 1 if self.biased else 2], *self.rest, *("norm",) * self.normalised)

    @property
    def fused(self) -> bool:
        """Whether the kernels know all that is between and after the products."""
        return self.gate != "jointly" and not self.normalised


class Whole(NamedTuple):
    """A variant whose call is not ``(hidden states, ids, weights)``: why experts are not divided by it."""

    reason: str


LAYOUTS = {name: Layout(**meant) for name, meant in combinations(AXES).items()}

_TRITON = backend(
    "triton",
    ".triton:kernel({variant})",
    refuses=".triton:refuses",
    loses=".triton:loses",
    requires=TRITON,
    priority=10,
    traceable=True,
    beats_inductor=True,
    invariant=("cuda",),
    description="grouped products fused with gather and gate, Gluon on Hopper; saves one activation",
)
_NPU = backend(
    "npu",
    ".npu:kernel({variant})",
    refuses=".npu:refuses",
    requires=NPU,
    priority=10,
    traceable=True,
    description="rows permuted, npu_grouped_matmul forward and backward; saves one activation",
)
_TORCH = backend(
    "torch",
    ".torch:kernel({variant})",
    refuses=".torch:refuses",
    loses=".torch:loses",
    requires=Requirement(devices=("cpu", "cuda")),
    invariant=("cpu",),
    description="pairs sorted by expert, one product for each expert; saves one activation",
    traceable=True,
)
_FLOAT8 = backend(
    "float8",
    ".float8:kernel({variant})",
    refuses=".float8:refuses",
    requires=Requirement(devices=("cpu", "cuda"), rocm=False),
    traceable=True,
    automatic=False,
    description="as triton, or torch on a CPU, with products in float8 where experts have many rows",
)
_MXFP8 = replace(
    _FLOAT8,
    backend="mxfp8",
    load=".float8:kernel_in_mx({variant})",
    refuses=".float8:refuses_mx",
    description="as float8, in MX: 32 neighbours share a scale (Blackwell)",
)
_STACKED = (_TRITON, _NPU, _TORCH, _FLOAT8, _MXFP8)
# torch._grouped_mm supports only bfloat16.
_IN_FLOAT32 = (
    replace(_TRITON, loses=".triton:loses_in_float32"),
    _NPU,
    replace(_TORCH, requires=Requirement(devices=("cpu",))),
)
_OR_IDENTITY = (
    replace(_TRITON, load=".triton:gated_or_identity", refuses=".triton:refuses_or_identity"),
    replace(_NPU, load=".npu:gated_or_identity", refuses=".npu:refuses_or_identity"),
    replace(_TORCH, load=".torch:gated_or_identity", refuses=".torch:refuses_or_identity"),
)
_COMPOSED = backend(
    "torch",
    ".torch_composed:kernel({variant})",
    refuses=".torch_composed:refuses",
    loses=".torch:loses",
    requires=Requirement(devices=("cpu",)),
    invariant=("cpu",),
    description="pairs sorted by expert, one product for each expert; any function between products",
)
_LIGER = backend(
    "liger",
    ".liger:{variant}",
    refuses=".liger:refuses",
    requires=LIGER,
    description="Liger's grouped kernels: SiLU; synchronises with the device, uses atomics",
    automatic=False,
)

VARIANTS = {
    "gated": Variant(
        "sum_k w_k * (act(x Wg^T) * (x Wu^T)) Wd^T, gate_up [E, 2I, H]",
        kernels=(_LIGER,),
    ),
    "gated_clamped": Variant("gated, gate <= limit and |up| <= limit before the activation"),
    "gated_clamped_after": Variant("gated, act(gate) <= limit and |up| <= limit"),
    "gated_float32_product": Variant("gated, activation and product in float32"),
    "gated_jointly": Variant("sum_k w_k * act(gate, up) Wd^T, added up in float32"),
    "gated_normalised": Variant("sum_k w_k * norm((act(gate) * up) Wd^T)"),
    "gated_transposed": Variant("gated, gate_up [E, H, 2I] and down [E, I, H]"),
    "gated_or_identity": Variant(
        "gated; the experts from num_experts on return their input",
        kernels=_OR_IDENTITY,
        form=Whole(
            "experts without weights are numbered after those with weights, so equal parts of the numbers "
            "are not equal parts of the weights"
        ),
    ),
    "alpha_gated": Variant("sum_k w_k * ((up + 1) * gate * sigmoid(alpha * gate)) Wd^T, gate and up clamped"),
    "biased_interleaved_alpha_gated": Variant(
        "alpha_gated with biases, transposed, gate in the even columns"
    ),
    "biased_alpha_gated_float32": Variant("alpha_gated with biases, transposed, all in float32"),
    "ungated": Variant("sum_k w_k * act(x Wu^T) Wd^T, added up in the dtype of w"),
    "batched_gated": Variant(
        "every expert on its own equal share of the rows: (up * act(gate)) Wd",
        form=Whole("every expert gets an equal share of the rows, not those that a router sends"),
    ),
    "shared_gated": Variant(
        "every token through all experts: sum_e (w_e * act(gate) * up) Wd^T, in float32",
        form=Whole("every token goes through all experts"),
    ),
    "grouped_linear": Variant(
        "rows sorted by expert: x_e W_e^T",
        form=Whole("its projections are separate modules that get rows sorted by expert"),
    ),
    "modules": Variant(
        "sum_k w_k * expert_k(x), each expert a module",
        form=Whole("each expert is a module of its own, not a part of stacked weights"),
    ),
}


def derived(name: str) -> Variant | None:
    """Return the row of a combination of `AXES`, in the table or not; None for another name."""
    layout = LAYOUTS.get(name)
    if layout is None:
        return None
    meant = ", ".join(f"{axis}={value}" for axis, value in layout._asdict().items())
    row = VARIANTS.get(name, Variant(f"sum_k w_k * expert_k(x) with {meant}"))
    stacked = (_COMPOSED,) if not layout.fused else _IN_FLOAT32 if layout.in_float32 else _STACKED
    return replace(
        row,
        reference=".reference:of({variant})",
        operands=("hidden_states", "top_k_index", "top_k_weights", *layout.operands),
        kernels=(*stacked, *row.kernels),
        form=layout,
    )


OP = op(
    "moe_experts",
    {name: derived(name) or row for name, row in VARIANTS.items()},
    invariant=("cpu",),
    derives=".variants:derived",
    yields=".provenance:users_choice",
    offers=".interface:offer",
    overrides=".provenance:overridden",
    prepares=".peft_adapters:watch",
    remarks=".peft_adapters:remark",
)
