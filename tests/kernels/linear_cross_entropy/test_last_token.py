from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss, ForSequenceClassificationLoss

from tests.kernels.low_precision import KINDS, convert
from veomni_hook.kernels.linear_cross_entropy import last_token, reference

HIDDEN = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def test_scores_are_where_and_as_many_as_the_hidden_states():
    scores = last_token.Scores(HIDDEN, nn.Identity())
    assert scores.device == HIDDEN.device and scores.shape == (2, 5)


@pytest.mark.parametrize("last", [-1, torch.tensor([0, 3])])
def test_what_is_picked_is_what_the_reference_has_there(last):
    score = nn.Linear(8, 3)
    index = (torch.arange(2), last)
    picked = last_token.Scores(HIDDEN, score)[index]
    assert torch.allclose(picked, reference.last_token(HIDDEN, score)[index], atol=1e-6)


def test_only_the_loss_that_ignores_all_scores_will_do():
    score = nn.Linear(8, 3)
    assert (
        last_token.refuses(SimpleNamespace(loss_function=ForSequenceClassificationLoss), HIDDEN, score)
        is None
    )
    assert last_token.refuses(SimpleNamespace(), HIDDEN, score) is None
    assert "ForCausalLMLoss" in last_token.refuses(
        SimpleNamespace(loss_function=ForCausalLMLoss), HIDDEN, score
    )


def test_hooks_and_what_is_no_module():
    score = nn.Sequential(nn.Linear(8, 3))
    assert "function" in last_token.refuses(SimpleNamespace(), HIDDEN, lambda x: x)
    score[0].register_forward_pre_hook(lambda *_: None)
    assert "hook" in last_token.refuses(SimpleNamespace(), HIDDEN, score)


@pytest.mark.parametrize("kind", KINDS)
def test_one_scale_for_all_positions_needs_all_positions(kind):
    score = nn.Linear(16, 16, bias=False)
    hidden = torch.randn(2, 5, 16)
    hidden[0, 0] *= 20  # its scale is that of a position that is not picked
    assert last_token.refuses(SimpleNamespace(), hidden, score) is None
    score = convert(nn.ModuleDict({"score": score}), kind)["score"]
    of_all, of_picked = score(hidden)[:, -1], score(hidden[:, -1])
    assert not torch.allclose(of_all, of_picked, atol=1e-2)
    assert "more than one position" in last_token.refuses(SimpleNamespace(), hidden, score)


def test_columns_that_all_rows_choose_need_all_positions():
    classes = [
        type(name, (nn.Module,), {"__module__": "bitsandbytes.nn"}) for name in ("Linear8bitLt", "Linear4bit")
    ]
    refusals = [last_token.refuses(SimpleNamespace(), HIDDEN, kind()) for kind in classes]
    assert "Linear8bitLt" in refusals[0] and refusals[1] is None
