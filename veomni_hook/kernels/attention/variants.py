"""The variants of attention that torch's fused ``scaled_dot_product_attention`` cannot compute."""

from __future__ import annotations

from veomni_hook.kernels.selection.declaration import Requirement, Variant
from veomni_hook.kernels.selection.table import ANYWHERE, TRITON, backend, op

__all__ = ["OP"]

_OPERANDS = ("query", "key", "value", "attention_mask", "module", "scaling", "dropout")
_FLEX = backend(
    "flex",
    ".flex:with_sinks",
    refuses=".flex:refuses",
    loses=".flex:loses",
    requires=Requirement(
        devices=("cuda",), min_capability=(8, 0), triton=True, distributions=("torch>=2.7",)
    ),
    traceable=True,
    beats_inductor=True,
    description="torch's flex_attention, compiled; no score is stored; skips blocks that the mask hides",
)
# Not in compiled code: a step of Gemma-2-9B's shapes took 122 ms on an H200, Inductor's eager attention 119.
_FLEX_SOFTCAP = backend(
    "flex",
    ".flex:with_softcap",
    refuses=".flex:refuses",
    loses=".flex:loses",
    requires=_FLEX.requires,
    traceable=True,
    description=_FLEX.description,
)

_FLASH = backend(
    "flash",
    ".flash:sliding_window",
    refuses=".flash:refuses",
    loses=".flash:loses",
    requires=Requirement(devices=("cuda",), min_capability=(8, 0), distributions=("torch>=2.6",), rocm=False),
    traceable=True,
    beats_inductor=True,
    description="torch's flash attention with a window; skips keys that the window hides",
)

_TILES = backend(
    "tiles",
    ".tiles:with_sinks",
    refuses=".tiles:refuses",
    loses=".tiles:loses",
    requires=TRITON,
    traceable=True,
    beats_inductor=True,
    description="no score is stored; any mask; skips tiles that it hides; for heads that share one key",
)

VARIANTS = {
    "sinks": Variant(
        "softmax over the scores and one sink a head, in the dtype of the scores; the sink has no value",
        operands=_OPERANDS,
        kernels=(_FLEX, _TILES),
    ),
    "sinks_float32_softmax": Variant(
        "sinks, softmax in float32",
        operands=_OPERANDS,
        kernels=(_FLEX, _TILES),
    ),
    "sinks_rescaled": Variant(
        "attention without sinks, times sigmoid(logsumexp(scores) - sink)",
        operands=_OPERANDS,
        kernels=(_FLEX, _TILES),
    ),
    "softcap": Variant(
        "softmax over softcap * tanh(scores / softcap), in float32",
        operands=(*_OPERANDS, "softcap"),
        kernels=(_FLEX_SOFTCAP,),
    ),
    "sliding_window": Variant(
        "softmax over the scores of a causal window, in float32",
        reference=".masked:{variant}",
        operands=_OPERANDS,
        kernels=(_FLASH,),
    ),
}
OP = op(
    "attention",
    VARIANTS,
    invariant=ANYWHERE,
    yields=".provenance:users_choice",
    overrides=".provenance:overridden",
    prepares=".masks:watch",
    bypassed=".provenance:bypassed",
)
