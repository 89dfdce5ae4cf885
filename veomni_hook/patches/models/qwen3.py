"""Qwen3: guards and rewrites that ask kernel slots; every one falls through to the upstream code.

Written for transformers 5.2 to 5.23: the bodies of RMSNorm, MLP and the rotary functions are the same in all
of them (their fingerprints are below), attention and the causal-LM forward are matched where they change.
"""

from __future__ import annotations

from typing import Any

from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="transformers.models.qwen3.modeling_qwen3",
    description="Qwen3: kernels for RMSNorm, rotary embedding, MLP and the causal-LM loss",
)

veomni_rms_norm = config.add_slot("veomni_rms_norm", op="rms_norm", variant="cast_before_weight")
veomni_rotary = config.add_slot("veomni_rotary", op="rotary", variant="half_split")
veomni_gated_mlp = config.add_slot("veomni_gated_mlp", op="gated_mlp", variant="product")
veomni_linear_cross_entropy = config.add_slot(
    "veomni_linear_cross_entropy", op="linear_cross_entropy", variant="next_token"
)


def rms_norm(self: Any, hidden_states: Any) -> Any:
    if (kernel := veomni_rms_norm.kernel(self, hidden_states)) is not None:
        return kernel(hidden_states, self.weight, self.variance_epsilon)


config.insert_guard(
    "Qwen3RMSNorm.forward", rms_norm, fingerprints=["6e16a56ab42b9201"], description="RMSNorm from a kernel"
)


def gated_mlp(self: Any, x: Any) -> Any:
    if (kernel := veomni_gated_mlp.kernel(self, x, self.act_fn)) is not None:
        return self.down_proj(kernel(self.gate_proj(x), self.up_proj(x), self.act_fn))


config.insert_guard(
    "Qwen3MLP.forward",
    gated_mlp,
    fingerprints=["12e57c6c096c1151"],
    description="the gated middle of the MLP from a kernel; the projections stay modules",
)

# At the call and not in the function, because only here there is a module that a kernel can belong to.
config.rewrite(
    "Qwen3Attention.forward",
    pattern="apply_rotary_pos_emb({query}, {key}, {cos}, {sin})",
    replacement="""
(
    veomni_rotary.kernel(self, {query}, {key}, {cos}, {sin}, apply_rotary_pos_emb)
    or apply_rotary_pos_emb
)({query}, {key}, {cos}, {sin})
""",
    relies_on={"rotate_half": ["96e90fdf2ac7b293"], "apply_rotary_pos_emb": ["0452ddba8171723c"]},
    description="rotary embedding from a kernel",
)


def causal_lm_loss(
    self: Any,
    labels: Any,
    hidden: Any,
    vocab_size: Any,
    loss_kwargs: Any,
    output_class: Any,
    output_kwargs: Any,
) -> Any:
    if labels is not None:
        asked = (self, hidden, self.lm_head, labels, vocab_size, dict(**loss_kwargs))
        if (kernel := veomni_linear_cross_entropy.kernel(*asked)) is not None:
            fused, deferred, finish = kernel(*asked)
            return finish(output_class(loss=fused, logits=deferred, **output_kwargs))


config.insert_guard(
    "Qwen3ForCausalLM.forward",
    causal_lm_loss,
    before="""
logits = self.lm_head({hidden})
loss = None
if labels is not None:
    loss = self.loss_function(logits=logits, labels=labels, vocab_size={vocab_size}, **{loss_kwargs})
return {output_class}(loss=loss, logits=logits, **{output_kwargs})
""",
    fingerprints=(),
    description="the loss computed in lm_head without all logits; outputs.logits is computed when it is read",
)
