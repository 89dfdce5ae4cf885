"""The variants of torch's ``nn.LayerNorm``: one, because torch's operator has one formula.

Which of weight and bias exist is a setting of the module, not of the code that calls it.
"""

from __future__ import annotations

from veomni_hook.kernels.selection.declaration import Variant
from veomni_hook.kernels.selection.table import TRITON, backend, op

__all__ = ["OP", "VARIANTS"]

# Not automatic: the host pays more for them than for torch's operator. With both ops, steps one after another
# took 0.98 to 1.00 of the time on an H200 at 8,192 tokens of StarCoder2, GPT-2-XL, Phi-2, GPT-NeoX and OPT,
# and 1.07 and 1.13 at 2,048 and 1,024 tokens of StarCoder2-3B, where the host is the limit.
_TRITON = backend(
    "triton",
    "..layer_norm.modules:{variant}",
    refuses="..layer_norm.modules:refuses",
    loses="..layer_norm.modules:loses",
    requires=TRITON,
    priority=10,
    traceable=True,
    invariant=("cuda",),
    description="the kernels of layer_norm; in large steps up to 2 % faster, in small ones slower",
    automatic=False,
)

VARIANTS = {
    "rounded_once": Variant(
        "(weight32 * ((x32 - m) * rs) + bias32).to(x.dtype); weight and bias may be absent",
        "..layer_norm.reference:{variant}",
        kernels=(_TRITON,),
        refuses="..layer_norm.skipped_calls:refuses",
    ),
}
OP = op("nn_layer_norm", VARIANTS, invariant=("cpu",))
