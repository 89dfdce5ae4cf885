"""A causal language model of two norms and two matrices."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_pebble import PebbleConfig
from .norms_pebble import PebbleInnerRMSNorm


class PebbleOuterRMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states):
        wide = states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(states.dtype)


class PebbleForCausalLM(PreTrainedModel):
    config_class = PebbleConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.inner = PebbleInnerRMSNorm(config.hidden_size)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)
        self.outer = PebbleOuterRMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.head(self.outer(self.mix(self.inner(self.embed(input_ids)))))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)
