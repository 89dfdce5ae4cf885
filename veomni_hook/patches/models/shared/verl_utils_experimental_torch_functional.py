"""verl's fused head (``FusedLinearForPPO``): log-probabilities and entropies come from `token_log_probs`.

With ``use_fused_kernels=True`` and ``impl_backend: torch``, verl gives models a forward that passes hidden
states, the head's weight, the next tokens and the temperature to one autograd function. This config puts our
function in its place, for all of verl's models. Its triton backend is another function, and stays, as does a
release that has another form.
"""

from __future__ import annotations

from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="verl.utils.experimental.torch_functional*",
    description="log-probabilities of verl's actors come from veomni_hook.token_log_probs",
)

config.add_import("veomni_hook.kernels.linear_cross_entropy.actor_head", ["log_probs as veomni_log_probs"])
config.rewrite(
    "FusedLinearForPPO.forward",
    pattern="FusedLinearForPPOFunction.apply(*{operands})",
    replacement="veomni_log_probs(FusedLinearForPPOFunction, *{operands})",
    matches=None,
    description="our kernel, or the function that is given",
)
