"""The causal language-model loss straight from hidden states, without all logits at once.

The guard in a model's ``forward`` calls ``kernel(model, hidden_states, labels, vocab_size, output_class,
loss_kwargs, output_kwargs)`` and gets the model's output back; `head` says how the loss gets into
``lm_head.__call__``, `output` how ``logits`` stay available.
"""

from __future__ import annotations

from veomni_hook.kernels.registry import Kernel, Op

OP = Op(
    "linear_cross_entropy",
    variants={
        "next_token": "cross_entropy(float32(x @ weight.T + bias), next label): mean, or sum / num_items"
    },
)

KERNELS = (
    Kernel(
        op="linear_cross_entropy",
        variant="next_token",
        backend="torch",
        load="veomni_hook.kernels.linear_cross_entropy.torch:causal_lm_output",
        refuses="veomni_hook.kernels.linear_cross_entropy.causal_lm:refuses",
        loses="veomni_hook.kernels.linear_cross_entropy.torch:loses",
        description="rows in chunks; gradients are computed with the loss, ignored positions are left out",
    ),
)
