"""Functions with the arguments and results of VeOmni's slots, made from our kernels.

Each one here takes the name of a backend, behind that of a variant where several fit, and returns what
VeOmni's slot calls. Where the slot calls with the operands of our reference, it gets a `Backend` itself.
What a slot calls with, and what it expects, is what VeOmni's generated files do
(``veomni/models/transformers/*/generated``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from veomni_hook.errors import KernelError
from veomni_hook.integrations.veomni.backend import BACKENDS, Backend, name_of
from veomni_hook.integrations.veomni.upstream import attribute

__all__ = [
    "LEGACY",
    "biased_experts",
    "entry",
    "experts",
    "fused_experts",
    "gated_rms_norm",
    "load_balancing_loss",
    "norm_forward",
    "rotary",
    "swiglu_mlp",
    "unweighted_rms_norm",
    "vision_rotary",
]

_GATES = {"silu": functional.silu, "swish": functional.silu, "sigmoid": torch.sigmoid}


def unweighted_rms_norm(backend: str) -> Callable[..., Tensor]:
    """``(hidden_states, None, eps)``."""
    kernel = Backend("rms_norm", "unweighted_rounded_scale", backend)

    def normalised(hidden_states: Tensor, weight: None, eps: float) -> Tensor:
        if weight is not None:
            raise _wrong("rms_norm/unweighted was called with a weight", "bind rms_norm/standard there")
        return kernel(hidden_states, eps)  # type: ignore[no-any-return]

    return normalised


def norm_forward(backend: str) -> Callable[..., Tensor]:
    """The ``forward`` of an RMSNorm module, whose epsilon is ``variance_epsilon`` or ``eps``."""
    kernel = Backend("rms_norm", "cast_before_weight", backend)

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        return kernel(hidden_states, self.weight, eps)  # type: ignore[no-any-return]

    return forward


def gated_rms_norm(backend: str) -> type[nn.Module]:
    """The class of a module: RMSNorm of the first argument, times the activation of the second."""
    kernel = Backend("rms_norm", "cast_before_weight_gated", backend)

    class GatedRMSNorm(nn.Module):
        """``weight * xhat * activation(gate)``, with the parameter of upstream's class."""

        def __init__(
            self,
            hidden_size: int,
            eps: float = 1e-6,
            *,
            activation: str = "silu",
            device: Any = None,
            dtype: torch.dtype | None = None,
        ) -> None:
            super().__init__()
            if activation not in _GATES:
                raise _wrong(
                    f"a gated RMSNorm got the activation {activation!r}", f"one of {', '.join(_GATES)}"
                )
            self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
            self.variance_epsilon = eps
            self.activation = activation

        def reset_parameters(self) -> None:
            """Fill the weight with ones."""
            nn.init.ones_(self.weight)

        def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
            """Return the gated norm of ``hidden_states`` ``[..., hidden]``; ``gate`` has its shape."""
            activation = _GATES[self.activation]
            operands = hidden_states, gate, self.weight, self.variance_epsilon, activation
            return kernel(*operands)  # type: ignore[no-any-return]

        def extra_repr(self) -> str:
            """Return the size, epsilon, activation and backend."""
            size = self.weight.shape[0]
            return f"{size}, eps={self.variance_epsilon}, {self.activation}, {name_of(backend)}"

    return GatedRMSNorm


def rotary(variant: str, backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """``(q, k, cos, sin, position_ids=None, unsqueeze_dim=1)``."""
    kernel = Backend("rotary", variant, backend)

    def both(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: object = None, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        operands = q, k, cos, sin, unsqueeze_dim
        # The rule's last operand is the function that the kernel replaces: any function of modeling code.
        return kernel.asked(*operands, both)(*operands)  # type: ignore[no-any-return]

    return both


def vision_rotary(backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """``(q, k, cos, sin)``: q and k ``[length, heads, head_dim]``, turned in float32."""
    turned = rotary("half_split_fp32", backend)

    def both(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: object = None, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        # Upstream gives these tables their heads at -2, whatever it is told.
        return turned(q, k, cos, sin, unsqueeze_dim=-2)

    return both


def swiglu_mlp(backend: str) -> Callable[..., Tensor]:
    """``(mlp, x)``: ``mlp.down_proj`` of the gated product of the two other projections."""
    kernel = Backend("gated_mlp", "product", backend)

    def forward(mlp: Any, x: Tensor) -> Tensor:
        activation = getattr(mlp, "act_fn", functional.silu)
        run = kernel.asked(x, activation)
        return mlp.down_proj(run(mlp.gate_proj(x), mlp.up_proj(x), activation))  # type: ignore[no-any-return]

    return forward


def experts(backend: str) -> Callable[..., Tensor]:
    """``(module, hidden_states, top_k_index, top_k_weights)``; clamped if the module has a ``limit``."""
    plain, clamped = (Backend("moe_experts", variant, backend) for variant in ("gated", "gated_clamped"))
    check = _check_for_expert_parallelism()

    def forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        check()
        activation = getattr(module, "act_fn", functional.silu)
        operands = (
            hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj, activation,
        )  # fmt: skip
        limit = getattr(module, "limit", None)
        return plain(*operands) if limit is None else clamped(*operands, limit)  # type: ignore[no-any-return]

    return forward


def biased_experts(backend: str) -> Callable[..., Tensor]:
    """``(module, hidden_states, router_indices, routing_weights)`` with biases, gate in the even columns."""
    kernel = Backend("moe_experts", "biased_interleaved_alpha_gated", backend)
    check = _check_for_expert_parallelism()

    def forward(
        module: Any, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor
    ) -> Tensor:
        check()
        return kernel(  # type: ignore[no-any-return]
            hidden_states, router_indices, routing_weights, module.gate_up_proj, module.gate_up_proj_bias,
            module.down_proj, module.down_proj_bias, module.alpha, module.limit,
        )  # fmt: skip

    return forward


def fused_experts(backend: str) -> Callable[..., Tensor]:
    """The function behind VeOmni's ``fused_moe_forward``: stacked weights as arguments, SiLU."""
    plain, clamped = (Backend("moe_experts", variant, backend) for variant in ("gated", "gated_clamped"))
    check = _check_for_expert_parallelism()

    def fused_moe_forward(  # noqa: PLR0913, PLR0917 - VeOmni's signature
        num_experts: int,
        routing_weights: Tensor,
        selected_experts: Tensor,
        hidden_states: Tensor,
        fc1_1_weight: Tensor | None,
        fc1_2_weight: Tensor | None,
        fc2_weight: Tensor,
        fc1_1_2_weight: Tensor | None = None,
        swiglu_limit: float | None = None,
    ) -> Tensor:
        check()
        if fc1_1_2_weight is None:
            if fc1_1_weight is None or fc1_2_weight is None:
                raise _wrong("the experts have no gate and up weights", "pass both, or fc1_1_2_weight")
            fc1_1_2_weight = torch.cat((fc1_1_weight, fc1_2_weight), dim=1)
        operands = (
            hidden_states, selected_experts, routing_weights, fc1_1_2_weight, fc2_weight, functional.silu,
        )  # fmt: skip
        if swiglu_limit is None:
            return plain(*operands)  # type: ignore[no-any-return]
        return clamped(*operands, swiglu_limit)  # type: ignore[no-any-return]

    fused_moe_forward.__name__ = f"{name_of(backend)}_fused_moe_forward"
    return fused_moe_forward


def load_balancing_loss(backend: str) -> Callable[..., Tensor | int]:
    """``(gate_logits, num_experts, top_k, attention_mask)``; softmax in float32, 0 if nothing is kept."""
    kernel = Backend("load_balancing_loss", "softmax_topk", backend)

    def loss(
        gate_logits: object,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Tensor | int:
        if not isinstance(gate_logits, tuple):
            return 0
        device = gate_logits[0].device
        layers = tuple(gate_logit.to(device, torch.float32) for gate_logit in gate_logits)
        if attention_mask is None:
            return kernel(layers, num_experts, top_k, None)  # type: ignore[no-any-return]
        kept = attention_mask.to(device, torch.float32)
        # Without a token, upstream's quotient is 0 / 0; VeOmni's loss is 0.
        some = (kept != 0).any()
        return kernel(layers, num_experts, top_k, kept.where(some, 1.0)) * some  # type: ignore[no-any-return]

    loss.__name__ = f"{name_of(backend)}_load_balancing_loss"
    return loss


def _check_for_expert_parallelism() -> Callable[[], None]:
    """Return a function that raises KernelError under expert parallelism, after calling it."""
    home = "veomni.distributed.parallel_state"
    initialised, state = (
        attribute(home, name) for name in ("is_parallel_state_initialized", "get_parallel_state")
    )

    def check() -> None:
        # Asking for a state that is not there makes one.
        if initialised() and state().ep_enabled:
            raise _wrong(
                "expert parallelism is on, and our kernels for experts do not exchange tokens between ranks",
                "set ep_size to 1, or moe_implementation to one of VeOmni's own, such as fused_triton",
            )

    check()
    return check


def _wrong(what: str, fix: str) -> KernelError:
    return KernelError(what, where="a kernel of veomni_hook in VeOmni", fix=fix)


#: The ops of VeOmni's older registry (``OpSpec.backends``) that are offered: what makes the function, and
#: whether it is a ``forward``.
LEGACY: dict[str, tuple[Callable[[str], Any], bool]] = {
    "load_balancing_loss": (load_balancing_loss, False),
    "rms_norm": (norm_forward, True),
}


def entry(op: str, backend: str) -> str:
    """Return the reference ``module:attribute`` by which the older registry loads a function."""
    return f"{__name__}:{op}_{backend}"


@cache
def __getattr__(name: str) -> object:
    # On request: VeOmni reads these names when it applies a configuration, and a kernel that cannot run on
    # the machine must be an error then, and not when this module is imported.
    op, _, backend = name.rpartition("_")
    if op in LEGACY and backend in BACKENDS:
        return LEGACY[op][0](backend)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
