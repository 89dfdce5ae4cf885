from __future__ import annotations

import pytest
import torch
import transformers.loss.loss_utils as loss_utils
from torch import nn

from veomni_hook.kernels.linear_cross_entropy import losses

LABELS = torch.tensor([[3, 1, -100, 2]])


def own_loss(logits, labels, vocab_size, **kwargs):
    return loss_utils.ForCausalLMLoss(logits, labels, vocab_size, **kwargs) * 2


@pytest.fixture(autouse=True)
def forgetful(monkeypatch):
    monkeypatch.setattr(losses, "_known", {})


@pytest.mark.parametrize("loss", [loss_utils.ForCausalLMLoss, loss_utils.ForMaskedLMLoss])
def test_the_two_known_ones(loss):
    assert losses.refuses(loss) is None
    assert losses.refuses(loss) is None


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), lambda **_: torch.zeros(()), own_loss])
def test_others_are_the_models_own(loss):
    assert "own" in losses.refuses(loss)


@pytest.mark.parametrize("loss", [loss_utils.ForCausalLMLoss, loss_utils.ForMaskedLMLoss])
def test_one_that_answers_otherwise_or_not(loss, monkeypatch):
    plain = loss_utils.fixed_cross_entropy
    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", lambda *a, **k: plain(*a, **k) + 1)
    assert f"{loss.__name__} does not answer as known" in losses.refuses(loss)
    losses._known.clear()
    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", None)
    assert "TypeError" in losses.refuses(loss)


def test_one_that_smooths_labels_is_noticed(monkeypatch):
    def smoothed(source, target, num_items_in_batch=None, ignore_index=-100, label_smoothing=0.0, **_):
        reduction = "mean" if num_items_in_batch is None else "sum"
        options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
        total = nn.functional.cross_entropy(source, target, **options)
        return total if num_items_in_batch is None else total / num_items_in_batch

    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", smoothed)
    assert "label_smoothing" in losses.refuses(loss_utils.ForCausalLMLoss)


def test_targets():
    causal, masked = loss_utils.ForCausalLMLoss, loss_utils.ForMaskedLMLoss
    assert losses.targets(causal, LABELS, None, -100).tolist() == [1, -100, 2, -100]
    assert losses.targets(causal, LABELS, None, 7).tolist() == [1, -100, 2, 7]
    assert losses.targets(causal, None, LABELS, -100).tolist() == [3, 1, -100, 2]
    assert losses.targets(masked, LABELS, LABELS * 0, -100).tolist() == [3, 1, -100, 2]
    assert losses.reads_shift_labels(causal) and not losses.reads_shift_labels(masked)
