"""Derivatives of routed sites, and that a backward which counts a path twice, or not at all, is found."""

import pytest

from tests.processes import facts, started

#: Proves a module in a process of its own: the kernels, the module, how it is spoiled, and the ops.
SCRIPT = """
import json, sys
from unittest.mock import patch

import torch

from tests.proof import runner

kernels, module, spoiled, *ops = sys.argv[1:]
runner._start(kernels, derived=True)
from veomni_hook.kernels.shared import autograd

spoilers = {
    "nothing": lambda: None,
    "operands keep their history": lambda: patch.object(torch.Tensor, "view_as", lambda x, other: x).start(),
    "gradients have no history": lambda: patch.object(autograd, "_grad_enabled", lambda: False).start(),
}
spoilers[spoiled]()
print(json.dumps([verdict.to_dict() for verdict in runner.prove_module(module, ops)]))
"""


def proved(tmp_path, *arguments):
    return facts(started("-c", SCRIPT, *arguments, cache=tmp_path))


NEXT = "transformers.models.qwen3_next.modeling_qwen3_next"
MOE = "transformers.models.qwen3_moe.modeling_qwen3_moe"


@pytest.mark.slow
def test_all_derivatives_of_a_model_are_upstreams(tmp_path):
    verdicts = proved(tmp_path, "torch", NEXT, "nothing")
    assert {verdict["outcome"] for verdict in verdicts} <= {"equal", "rounding"}, verdicts
    assert len({verdict["op"] for verdict in verdicts}) >= 11


@pytest.mark.slow
@pytest.mark.parametrize("spoiled", ["operands keep their history", "gradients have no history"])
def test_what_is_spoiled_is_found(tmp_path, spoiled):
    ops = ("linear_cross_entropy", "moe_experts")
    verdicts = proved(tmp_path, "torch", MOE, spoiled, *ops)
    assert {verdict["op"]: verdict["outcome"] for verdict in verdicts} == dict.fromkeys(ops, "differs"), (
        verdicts
    )


@pytest.mark.slow
@pytest.mark.parametrize("module", [NEXT, MOE])
def test_triton_in_its_interpreter(tmp_path, module):
    verdicts = proved(tmp_path, "triton", module, "nothing")
    assert {verdict["outcome"] for verdict in verdicts} <= {"equal", "rounding"}, verdicts
