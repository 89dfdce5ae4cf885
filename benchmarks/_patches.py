"""Patches for the two modules that have no built-in spec yet: enough for the import benchmark to be real.

They are named through the `patches` setting, like a user's own: loaded on a miss, digested on every hit. The
arithmetic does not matter here, because no model is built.
"""

from __future__ import annotations

import torch
from torch import nn

from veomni_hook import PatchConfig


def _rms_norm_forward(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    normed = nn.functional.rms_norm(hidden_states, hidden_states.shape[-1:], None, self.variance_epsilon)
    return self.weight * normed


def _mlp_forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _rotary(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)  # noqa: F821 - the module's


def _config(module: str, norms: list[str], mlps: list[str]) -> PatchConfig:
    config = PatchConfig(source_module=module)
    for norm in norms:
        config.override_method(f"{norm}.forward", _rms_norm_forward, description="benchmark: RMS norm")
    for mlp in mlps:
        config.override_method(f"{mlp}.forward", _mlp_forward, description="benchmark: gated MLP")
    config.replace_function("apply_rotary_pos_emb", _rotary, description="benchmark: rotary embedding")
    return config


configs = [
    _config("transformers.models.qwen3_vl.modeling_qwen3_vl", ["Qwen3VLTextRMSNorm"], ["Qwen3VLTextMLP"]),
    _config(
        "transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe",
        ["Qwen3OmniMoeThinkerTextRMSNorm", "Qwen3OmniMoeTextRMSNorm"],
        ["Qwen3OmniMoeThinkerTextMLP"],
    ),
]
