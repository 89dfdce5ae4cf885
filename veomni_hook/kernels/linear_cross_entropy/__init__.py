"""Language-model loss from hidden states without all logits in memory; scores of a classifier's last token.

``next_token``: the guard in a model's ``forward`` calls ``kernel(model, hidden_states, head, labels,
vocab_size, loss_kwargs, options)`` and gets ``loss, logits, finish`` (`causal_lm`). It builds the model's
output from the first two as upstream does, and returns ``finish(output)``. `head` explains how the loss is
computed inside the head's ``__call__``, `output` how ``logits`` stay available.

`options` holds further options for training loops. `functional` offers the same for tensors without a model.

``last_token``: ``kernel(hidden_states, score)`` replaces ``score(hidden_states)`` (`pooled`).
"""

from __future__ import annotations

from veomni_hook.kernels.selection.registry import NPU, Kernel, Op, Requirement, Variant

_HERE = "veomni_hook.kernels.linear_cross_entropy"

OP = Op(
    "linear_cross_entropy",
    variants={
        "next_token": Variant(
            "cross_entropy(float32(t(x @ weight.T + bias)), next label): mean, or sum / num_items; "
            "t scales and caps; loss_options add smoothing, z-loss, weights and statistics of tokens",
            f"{_HERE}.reference:linear_cross_entropy",
            operands=("model", "hidden_states", "head", "labels", "vocab_size", "loss_kwargs", "options"),
            unasked="the model was never asked for a loss: its forward got no labels, "
            "or the trainer computes the loss itself, as TRL's do",
        ),
        "last_token": Variant("score(x)[row, last position of row]", f"{_HERE}.reference:last_token"),
    },
)

KERNELS = (
    Kernel(
        op="linear_cross_entropy",
        variant="next_token",
        backend="triton",
        load=f"{_HERE}.triton:causal_lm_output",
        refuses=f"{_HERE}.triton:refuses",
        requires=Requirement(devices=("cuda",), min_capability=(8, 0), triton=True),
        priority=10,
        description="rows in chunks, cuBLAS products; the forward also computes the gradients",
        traceable=True,
        beats_inductor=True,
    ),
    Kernel(
        op="linear_cross_entropy",
        variant="next_token",
        backend="npu",
        load=f"{_HERE}.npu:causal_lm_output",
        refuses=f"{_HERE}.npu:refuses",
        requires=NPU,
        priority=10,
        description="rows in chunks, npu_cross_entropy_loss; PyTorch for what this operator lacks",
        traceable=True,
        beats_inductor=True,
    ),
    Kernel(
        op="linear_cross_entropy",
        variant="next_token",
        backend="torch",
        load=f"{_HERE}.torch:causal_lm_output",
        refuses=f"{_HERE}.causal_lm:refuses",
        loses=f"{_HERE}.torch:loses",
        description="rows in chunks; the forward also computes the gradients; skips ignored positions",
        traceable=True,
    ),
    Kernel(
        op="linear_cross_entropy",
        variant="next_token",
        backend="liger",
        load=f"{_HERE}.liger:causal_lm_output",
        refuses=f"{_HERE}.liger:refuses",
        requires=Requirement(devices=("cuda",), triton=True, distributions=("liger_kernel",)),
        description="liger_kernel's fused linear cross-entropy",
        automatic=False,
    ),
    Kernel(
        op="linear_cross_entropy",
        variant="next_token",
        backend="reference",
        load=f"{_HERE}.causal_lm:reference_output",
        refuses=f"{_HERE}.causal_lm:cannot",
        description="the formula in plain PyTorch; for checking results, not for speed",
        automatic=False,
    ),
    *(
        Kernel(
            op="linear_cross_entropy",
            variant="last_token",
            backend=backend,
            load=f"{_HERE}.pooled:last_token",
            refuses=f"{_HERE}.pooled:refuses",
            requires=NPU if backend == "npu" else Requirement(),
            description="applies the score module only to the position that is used, on any device",
            automatic=backend == "torch",
        )
        # Also registered for users who select Triton or torch_npu for the op; neither could do more here.
        for backend in ("torch", "triton", "npu")
    ),
)
