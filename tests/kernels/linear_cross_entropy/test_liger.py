"""The adapter alone: what it hands to Liger, what it refuses. `tests.kernels.test_on_gpu` runs Liger itself."""

import inspect

import pytest
import torch
from torch import nn

from tests.kernels.declared import refusal
from tests.kernels.linear_cross_entropy.objectives import operands
from tests.kernels.linear_cross_entropy.routed import batch, pair
from veomni_hook.errors import KernelError
from veomni_hook.kernels.linear_cross_entropy import causal_lm, liger, reference
from veomni_hook.kernels.linear_cross_entropy.objective import Objective, Transform, Wanted
from veomni_hook.kernels.linear_cross_entropy.options import loss_options

PREDICTIONS = Wanted(predictions=True)


class Double:
    """Liger's function with the parameters that its release 0.8.5 has, computed by the reference."""

    @staticmethod
    def apply(
        x, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0,
        label_smoothing=0.0, reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None,
        use_token_scaling=False, return_token_accuracy=False, return_predicted_tokens=False,
    ):  # fmt: skip
        assert ce_weight is None and not (return_z_loss or use_token_scaling or return_token_accuracy)
        objective = Objective(
            ignore_index, None if reduction == "mean" else 1, Transform(softcap=softcap), label_smoothing,
            lse_square_scale, accumulate="float32" if accum_dtype is torch.float32 else "weight",
        )  # fmt: skip
        wanted = Wanted(predictions=return_predicted_tokens)
        loss, found = reference.loss_and_statistics(x, weight, bias, target, objective, wanted)
        tokens = found.predictions
        return loss, None, None, None if tokens is None else tokens.where(target != ignore_index, -1)


@pytest.fixture(autouse=True)
def double(monkeypatch):
    monkeypatch.setattr(liger, "_function", lambda: Double)


@pytest.mark.parametrize(
    "objective",
    [
        Objective(),
        Objective(num_items=7),
        Objective(num_items=torch.tensor(7)),
        Objective(5, None, Transform(softcap=3.0), 0.1, 0.2, accumulate="float32"),
    ],
    ids=["plain", "number", "tensor", "all"],
)
def test_hands_on_what_is_asked(objective):
    (x, weight, bias), target = operands(torch.float32)
    target = target.where(target != -100, objective.ignore_index)
    got, found = liger.loss_and_statistics(x, weight, bias, target, objective, PREDICTIONS)
    expected, truth = reference.loss_and_statistics(x, weight, bias, target, objective, PREDICTIONS)
    torch.testing.assert_close(got, expected)
    assert torch.equal(found.predictions, truth.predictions)


def test_the_double_has_ligers_parameters():
    ops = pytest.importorskip("liger_kernel.ops.fused_linear_cross_entropy")
    real = list(inspect.signature(ops.LigerFusedLinearCrossEntropyFunction.forward).parameters)[1:]
    assert real[3:15] == list(inspect.signature(Double.apply).parameters)[3:15]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"objective": Objective(loss_weights=torch.ones(3))}, "weights of tokens"),
        ({"objective": Objective(transform=Transform(scale=2.0))}, "does not scale"),
        ({"wanted": Wanted(log_probs=True)}, "log-probabilities"),
        ({"wanted": Wanted(entropy=True)}, "entropies"),
        ({"x": torch.ones(3, 4)}, "no gradient of the weight"),
    ],
)
def test_says_what_it_cannot(change, reason):
    call = {
        "x": torch.ones(3, 4, requires_grad=True),
        "weight": torch.ones(5, 4, requires_grad=True),
        "objective": Objective(),
        "wanted": PREDICTIONS,
    }
    assert liger.unable(**call) is None
    assert reason in liger.unable(**(call | change))
    with pytest.raises(KernelError, match="cannot compute log-probabilities"):
        liger.token_statistics()


def test_under_autocast():
    ones = torch.ones(3, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in liger.unable(ones, ones, Objective(), PREDICTIONS)


def test_refuses_calls_of_a_model_or_raises_for_options(patched):
    _, model = pair(patched)
    hidden = torch.randn(2, 12, 32, requires_grad=True)
    call = (hidden, model.lm_head, batch()["labels"], 61, {})
    assert liger.refuses(model, *call) is None
    assert "does not scale" in liger.refuses(model, *call, {"scale": 2.0})
    with pytest.raises(KernelError, match="weights of tokens"), loss_options(loss_weights=torch.ones(2, 12)):
        liger.refuses(model, *call)
    assert isinstance(liger.causal_lm_output(model, *call), causal_lm.Fused)
    assert "eval" in refusal("linear_cross_entropy", "next_token", "liger")(nn.Module().eval(), *call)
