"""The variants of experts.

E is the number of experts, H the hidden size, I an expert's inner size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from veomni_hook.kernels.selection.declaration import NPU, Requirement, Variant
from veomni_hook.kernels.selection.table import LIGER, TRITON, backend, op

__all__ = ["LAYOUTS", "OP", "Layout"]


class Layout(NamedTuple):
    """A variant with stacked weights, as the fused kernels see it.

    Attributes:
        gate: the name of the gate in `torch_gating`.
        transposed: weights are ``[E, in, out]``, not ``[E, out, in]``.
        interleaved: gate and up are the even and odd columns of the first product, not its halves.
        in_float32: operands are cast to float32 first.
    """

    gate: str
    transposed: bool = False
    interleaved: bool = False
    in_float32: bool = False


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
_STACKED = (_TRITON, _NPU, _TORCH)
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
    ".torch_composed:{variant}",
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
        kernels=(*_STACKED, _LIGER),
        form=Layout("product"),
    ),
    "gated_clamped": Variant(
        "gated, gate <= limit and |up| <= limit before the activation",
        kernels=_STACKED,
        form=Layout("clamped"),
    ),
    "gated_clamped_after": Variant(
        "gated, act(gate) <= limit and |up| <= limit",
        kernels=_STACKED,
        form=Layout("clamped_after"),
    ),
    "gated_float32_product": Variant(
        "gated, activation and product in float32",
        kernels=_STACKED,
        form=Layout("product_float32"),
    ),
    "gated_jointly": Variant(
        "sum_k w_k * act(gate, up) Wd^T, added up in float32",
        kernels=(_COMPOSED,),
    ),
    "gated_normalised": Variant(
        "sum_k w_k * norm((act(gate) * up) Wd^T)",
        kernels=(_COMPOSED,),
    ),
    "gated_transposed": Variant(
        "gated, gate_up [E, H, 2I] and down [E, I, H]",
        kernels=_STACKED,
        form=Layout("product", transposed=True),
    ),
    "gated_or_identity": Variant(
        "gated; the experts from num_experts on return their input",
        kernels=_OR_IDENTITY,
    ),
    "alpha_gated": Variant(
        "sum_k w_k * ((up + 1) * gate * sigmoid(alpha * gate)) Wd^T, gate and up clamped",
        kernels=_STACKED,
        form=Layout("scaled_sigmoid"),
    ),
    "biased_interleaved_alpha_gated": Variant(
        "alpha_gated with biases, transposed, gate in the even columns",
        kernels=_STACKED,
        form=Layout("scaled_sigmoid", transposed=True, interleaved=True),
    ),
    "biased_alpha_gated_float32": Variant(
        "alpha_gated with biases, transposed, all in float32",
        kernels=_IN_FLOAT32,
        form=Layout("scaled_sigmoid", transposed=True, in_float32=True),
    ),
    "ungated": Variant(
        "sum_k w_k * act(x Wu^T) Wd^T, added up in the dtype of w",
        kernels=_STACKED,
        form=Layout("activation"),
    ),
    "batched_gated": Variant("every expert on its own equal share of the rows: (up * act(gate)) Wd"),
    "shared_gated": Variant("every token through all experts: sum_e (w_e * act(gate) * up) Wd^T, in float32"),
    "grouped_linear": Variant("rows sorted by expert: x_e W_e^T"),
    "modules": Variant("sum_k w_k * expert_k(x), each expert a module"),
}
LAYOUTS: dict[str, Layout] = {name: row.form for name, row in VARIANTS.items() if row.form is not None}
OP = op(
    "moe_experts",
    VARIANTS,
    invariant=("cpu",),
    yields=".provenance:users_choice",
    offers=".interface:offer",
    overrides=".provenance:overridden",
    prepares=".peft_adapters:watch",
    remarks=".peft_adapters:remark",
)
