import functools

import pytest
import torch
import transformers.loss.loss_utils as loss_utils
from torch import nn

from veomni_hook.kernels.linear_cross_entropy import losses

LABELS = torch.tensor([[3, 1, -100, 2]])


def own_loss(logits, labels, vocab_size, **kwargs):
    return loss_utils.ForCausalLMLoss(logits, labels, vocab_size, **kwargs) * 2


@pytest.mark.parametrize("loss", [loss_utils.ForCausalLMLoss, loss_utils.ForMaskedLMLoss])
def test_the_two_known_ones(loss):
    assert losses.refuses(loss) is None
    assert losses.refuses(loss) is None


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), lambda **_: torch.zeros(()), own_loss])
def test_others_are_the_models_own(loss):
    assert "own" in losses.refuses(loss)


def test_a_wrapper_that_says_it_is_one_is_the_models_own():
    wrapped = functools.wraps(loss_utils.ForCausalLMLoss)(own_loss)
    assert wrapped.__qualname__ == "ForCausalLMLoss" and "own_loss" in losses.refuses(wrapped)


def plus_one(*args, **kwargs):
    return PLAIN(*args, **kwargs) + 1


PLAIN = loss_utils.fixed_cross_entropy


@pytest.mark.parametrize("loss", [loss_utils.ForCausalLMLoss, loss_utils.ForMaskedLMLoss])
def test_parts_that_are_replaced_after_it_was_trusted(loss, monkeypatch):
    assert losses.refuses(loss) is None
    with monkeypatch.context() as patch:
        patch.setattr(loss_utils, "fixed_cross_entropy", functools.wraps(PLAIN)(plus_one))
        assert "fixed_cross_entropy was replaced by" in losses.refuses(loss)
        patch.setattr(loss_utils, "fixed_cross_entropy", None)
        assert "fixed_cross_entropy was replaced by" in losses.refuses(loss)
    assert losses.refuses(loss) is None
    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "cross_entropy", functools.wraps(nn.functional.cross_entropy)(plus_one))
        assert "torch.nn.functional.cross_entropy was replaced by" in losses.refuses(loss)
    assert losses.refuses(loss) is None
    with monkeypatch.context() as patch:
        patch.setattr(loss, "__code__", (lambda logits, labels, vocab_size, **_: logits.sum()).__code__)
        assert "own" in losses.refuses(loss)
    assert losses.refuses(loss) is None


@pytest.mark.parametrize("loss", [loss_utils.ForCausalLMLoss, loss_utils.ForMaskedLMLoss])
def test_one_of_another_release_that_answers_otherwise_or_not(loss, monkeypatch):
    name = loss.__name__
    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", plus_one)
    assert f"{name} returned an unexpected loss" in losses._questioned(loss, name)
    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", None)
    assert "TypeError" in losses._questioned(loss, name)


def test_one_that_smooths_labels_is_noticed(monkeypatch):
    def smoothed(source, target, num_items_in_batch=None, ignore_index=-100, label_smoothing=0.0, **_):
        reduction = "mean" if num_items_in_batch is None else "sum"
        options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
        total = nn.functional.cross_entropy(source, target, **options)
        return total if num_items_in_batch is None else total / num_items_in_batch

    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", smoothed)
    assert "label_smoothing" in losses._questioned(loss_utils.ForCausalLMLoss, "ForCausalLMLoss")


def test_targets():
    causal, masked = loss_utils.ForCausalLMLoss, loss_utils.ForMaskedLMLoss
    assert losses.targets(causal, LABELS, None, -100).tolist() == [1, -100, 2, -100]
    assert losses.targets(causal, LABELS, None, 7).tolist() == [1, -100, 2, 7]
    assert losses.targets(causal, None, LABELS, -100).tolist() == [3, 1, -100, 2]
    assert losses.targets(masked, LABELS, LABELS * 0, -100).tolist() == [3, 1, -100, 2]
    assert losses.reads_shift_labels(causal) and not losses.reads_shift_labels(masked)
