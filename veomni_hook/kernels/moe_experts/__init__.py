"""The experts of a mixture-of-experts layer: each token goes through the experts that its router chose.

Kernels are called with the hidden states, the router's indices and weights, then the experts' own operands,
in the order of the variant's reference function; guards ask with the same operands. The user's choice in
transformers' ``experts_implementation`` takes precedence over ``auto``.
"""

from __future__ import annotations

from veomni_hook.kernels.selection.registry import NPU, Kernel, Op, Requirement, Variant

_HERE = "veomni_hook.kernels.moe_experts"

_FORMULAS = {
    "gated": "sum_k w_k * (act(x Wg^T) * (x Wu^T)) Wd^T, gate_up [E, 2I, H]",
    "gated_clamped": "gated, gate <= limit and |up| <= limit before the activation",
    "gated_clamped_after": "gated, act(gate) <= limit and |up| <= limit",
    "gated_float32_product": "gated, activation and product in float32",
    "gated_jointly": "sum_k w_k * act(gate, up) Wd^T, added up in float32",
    "gated_normalised": "sum_k w_k * norm((act(gate) * up) Wd^T)",
    "gated_transposed": "gated, gate_up [E, H, 2I] and down [E, I, H]",
    "gated_or_identity": "gated; the experts from num_experts on return their input",
    "alpha_gated": "sum_k w_k * ((up + 1) * gate * sigmoid(alpha * gate)) Wd^T, gate and up clamped",
    "biased_interleaved_alpha_gated": "alpha_gated with biases, transposed, gate in the even columns",
    "biased_alpha_gated_float32": "alpha_gated with biases, transposed, all in float32",
    "ungated": "sum_k w_k * act(x Wu^T) Wd^T, added up in the dtype of w",
    "batched_gated": "every expert on its own equal share of the rows: (up * act(gate)) Wd",
    "shared_gated": "every token through all experts: sum_e (w_e * act(gate) * up) Wd^T, in float32",
    "grouped_linear": "rows sorted by expert: x_e W_e^T",
    "modules": "sum_k w_k * expert_k(x), each expert a module",
}

OP = Op(
    "moe_experts",
    variants={name: Variant(formula, f"{_HERE}.reference:{name}") for name, formula in _FORMULAS.items()},
    yields=f"{_HERE}.provenance:users_choice",
    offers=f"{_HERE}.interface:offer",
    overrides=f"{_HERE}.provenance:overridden",
)

# Variants with stacked expert weights, selected by id.
_STACKED = (
    "gated",
    "gated_clamped",
    "gated_clamped_after",
    "gated_float32_product",
    "gated_transposed",
    "gated_or_identity",
    "alpha_gated",
    "biased_interleaved_alpha_gated",
    "biased_alpha_gated_float32",
    "ungated",
)
# torch._grouped_mm supports only bfloat16.
_IN_FLOAT32 = ("biased_alpha_gated_float32",)

KERNELS = (
    *(
        Kernel(
            op="moe_experts",
            variant=variant,
            backend="triton",
            load=f"{_HERE}.triton:{variant}",
            refuses=f"{_HERE}.triton:refuses{'_or_identity' if variant == 'gated_or_identity' else ''}",
            loses=f"{_HERE}.triton:loses{'_in_float32' if variant in _IN_FLOAT32 else ''}",
            requires=Requirement(devices=("cuda",), min_capability=(8, 0), triton=True),
            priority=10,
            traceable=True,
            beats_inductor=True,
            description="grouped products fused with gather and gate; saves one activation",
        )
        for variant in _STACKED
    ),
    *(
        Kernel(
            op="moe_experts",
            variant=variant,
            backend="npu",
            load=f"{_HERE}.npu:{variant}",
            refuses=f"{_HERE}.npu:refuses{'_or_identity' if variant == 'gated_or_identity' else ''}",
            requires=NPU,
            priority=10,
            traceable=True,
            description="rows permuted, npu_grouped_matmul forward and backward; saves one activation",
        )
        for variant in _STACKED
    ),
    *(
        Kernel(
            op="moe_experts",
            variant=variant,
            backend="torch",
            load=f"{_HERE}.torch:{variant}",
            refuses=f"{_HERE}.torch:refuses{'_or_identity' if variant == 'gated_or_identity' else ''}",
            loses=f"{_HERE}.torch:loses",
            requires=Requirement(devices=("cpu",) if variant in _IN_FLOAT32 else ("cpu", "cuda")),
            description="pairs sorted by expert, one product for each expert; saves one activation",
            traceable=True,
        )
        for variant in _STACKED
    ),
    *(
        Kernel(
            op="moe_experts",
            variant=variant,
            backend="torch",
            load=f"{_HERE}.torch_composed:{variant}",
            refuses=f"{_HERE}.torch_composed:refuses",
            loses=f"{_HERE}.torch:loses",
            requires=Requirement(devices=("cpu",)),
            description="pairs sorted by expert, one product for each expert; any function between products",
        )
        for variant in ("gated_jointly", "gated_normalised")
    ),
    Kernel(
        op="moe_experts",
        variant="gated",
        backend="liger",
        load=f"{_HERE}.liger:gated",
        refuses=f"{_HERE}.liger:refuses",
        requires=Requirement(devices=("cuda",), triton=True, distributions=("liger_kernel",)),
        description="Liger's grouped kernels: SiLU; synchronises with the device, uses atomics",
        automatic=False,
    ),
)
