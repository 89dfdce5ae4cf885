"""Language-model loss from hidden states without all logits in memory; scores of a classifier's last token.

``next_token``: the guard in a model's ``forward`` calls ``kernel(model, hidden_states, head, labels,
vocab_size, loss_kwargs, options)`` and gets ``loss, logits, finish`` (`causal_lm`). It builds the model's
output from the first two as upstream does, and returns ``finish(output)``. `head` explains how the loss is
computed inside the head's ``__call__``, `output` how ``logits`` stay available.

`options` holds further options for training loops. `functional` offers the same for tensors without a model.

``last_token``: ``kernel(hidden_states, score)`` replaces ``score(hidden_states)`` (`last_token`).

`variants` declares the op.
"""
