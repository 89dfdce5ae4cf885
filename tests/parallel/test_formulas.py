"""Which calls of attention a ring of processes may compute, and what it knows of them."""

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from veomni_hook.parallel.formulas import known
from veomni_hook.parallel.partial_attention import Formula

HEADS, WIDTH = 4, 16
FUSED, EAGER = sdpa_attention_forward, modeling_llama.eager_attention_forward
MASK = torch.ones(1, 1, 8, 8, dtype=torch.bool)
MODULE = SimpleNamespace(training=True, head_dim=64, sinks=torch.zeros(HEADS))


def asked(implementation, mask=None, *others, **operands):
    return known(implementation, MODULE, torch.zeros(2, HEADS, 4, WIDTH), mask, others, operands)


def test_what_is_known():
    assert asked(FUSED) == (Formula(0.25), True, None)
    assert asked(FUSED, is_causal=False, scaling=0.5) == (Formula(0.5), False, None)
    assert asked(EAGER, MASK.float(), scaling=0.5, position_ids=torch.zeros(1)) == (Formula(0.5), False, None)
    capped = modeling_gemma2.eager_attention_forward
    assert asked(capped, MASK, softcap=3.0) == (Formula(0.125, 3.0), False, None)
    told = asked(modeling_gpt_oss.eager_attention_forward, scaling=0.5)
    assert told.formula == Formula(0.5) and told.sinks is MODULE.sinks


CALLS = {
    "more positions": (FUSED, (None, 0.5), {}),
    "dropout": (EAGER, (), {"dropout": 0.1, "scaling": 1.0}),
    "is a tensor": (EAGER, (), {"scaling": torch.ones(())}),
    "the operand `softcap`": (FUSED, (), {"softcap": 1.0}),
    "mask is a dict": (FUSED, ({},), {}),
    "mask is a Tensor, not constant": (FUSED, (MASK.float().requires_grad_(),), {}),
    "not constant numbers": (FUSED, (MASK.int(),), {}),
    "of four dimensions": (FUSED, (MASK[0],), {}),
    "mask is [1, 2, 8, 8]": (FUSED, (MASK.expand(1, 2, 8, 8),), {}),
    "as many queries as keys": (FUSED, (MASK[:, :, :3],), {}),
    "`asked` is not known: it computes something else": (asked, (), {}),
    "`mul` is not known: it is no function of a module": (torch.mul, (), {}),
}  # fmt: skip


@pytest.mark.parametrize("reason", CALLS)
def test_what_is_refused(reason):
    implementation, others, operands = CALLS[reason]
    assert reason in asked(implementation, *others, **operands)
