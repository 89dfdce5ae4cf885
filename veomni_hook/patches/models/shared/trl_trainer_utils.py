"""TRL's fused head: log-probabilities, entropies and accuracy of tokens come from `token_log_probs`.

SFT, DPO, GRPO, KTO and RLOO give a model a forward (``add_fused_lm_head``) that passes hidden states and the
head's weight to one autograd function. This config puts our function in its place. What is around it stays
TRL's: which positions count, adapters, reference models, sharded weights, losses. A release that has this
head in another form stays as it is, and `explain` says so (of a pattern of modules, nothing needs to match).
"""

from __future__ import annotations

from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="trl.trainer.utils*",
    description="log-probabilities of TRL's trainers come from veomni_hook.token_log_probs",
)

config.add_import(
    "veomni_hook.kernels.linear_cross_entropy.trainer_head",
    ["compacts as veomni_compacts", "log_probs as veomni_log_probs"],
)
config.rewrite(
    "add_fused_lm_head",
    pattern="_ChunkedLogProbFunction.apply(*{operands})",
    replacement="veomni_log_probs(self, _ChunkedLogProbFunction, *{operands})",
    matches=None,
    description="our kernel, or the function that is given",
)
config.rewrite(
    "add_fused_lm_head",
    pattern="_use_triton({device})",
    replacement="veomni_compacts(_use_triton, {device})",
    matches=None,
    description="positions without a label are left out on a CPU as well",
)
