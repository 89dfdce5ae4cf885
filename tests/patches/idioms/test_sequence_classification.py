import textwrap

import pytest
import torch
from torch import nn

from tests.kernels.matching import close
from tests.patches.idioms.applied import executed, sites_of, spliced
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms.linear_cross_entropy import find as linear_cross_entropy
from veomni_hook.patches.idioms.linear_cross_entropy import sequence_classification as idiom
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import SlotSpec, Status

SLOT = "veomni_linear_cross_entropy_last_token"

MODULE = """
from types import SimpleNamespace

import torch
from torch import nn
from transformers.loss.loss_utils import ForSequenceClassificationLoss

class Tiny(nn.Module):
    loss_function = staticmethod(ForSequenceClassificationLoss)

    def __init__(self):
        super().__init__()
        self.body, self.score = nn.Embedding(9, 8), nn.Linear(8, 3, bias=False)
        self.config = SimpleNamespace(num_labels=3, problem_type=None)

    def forward(self, ids, labels=None):
        hidden = self.body(ids)
{tail}
        return SimpleNamespace(loss=loss, logits=pooled_logits)
"""

TAIL = """
logits = self.score(hidden)
batch = logits.shape[0]
steps = torch.arange(ids.shape[-1], device=logits.device)
last = (steps * (ids != 0).to(logits.device)).argmax(-1)
pooled_logits = logits[torch.arange(batch, device=logits.device), last]
loss = None
if labels is not None:
    loss = self.loss_function(logits=logits, labels=labels, pooled_logits=pooled_logits, config=self.config)
"""
OWN_LOSS = TAIL.partition("loss = None")[0] + "loss = nn.functional.cross_entropy(pooled_logits, labels)"


@pytest.fixture(autouse=True)
def chosen():
    set_choice("torch")


def source(tail):
    return MODULE.replace("{tail}", textwrap.indent(tail, "        "))


def site_of(tail):
    (found,) = sites_of(idiom, source(tail))
    return found


def inputs():
    ids = torch.randint(1, 9, (3, 7))
    ids[0, 4:] = 0  # padded on the right
    ids[1, :3] = 0  # and on the left
    return ids, torch.tensor([2, 0, 1])


def step(model, ids, labels):
    model.zero_grad()
    output = model(ids, labels)
    output.loss.backward()
    return (
        output.loss.detach(),
        output.logits.detach(),
        {name: p.grad for name, p in model.named_parameters()},
    )


def twins(tail):
    upstream = executed(source(tail))["Tiny"]()
    scope = executed(source(tail), [site_of(tail)])
    routed = scope["Tiny"]()
    routed.load_state_dict(upstream.state_dict())
    return upstream, routed, scope[SLOT]


def assert_equal_steps(upstream, routed):
    given = inputs()
    expected, got = step(upstream, *given), step(routed, *given)
    close(got[0], expected[0], 1e-6)
    close(got[1], expected[1], 1e-6)
    close(got[2], expected[2], 1e-6)


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
@pytest.mark.parametrize("tail", [TAIL, OWN_LOSS], ids=["loss_function", "a loss of its own"])
def test_a_routed_classifier_computes_the_same(tail, backend):
    set_choice(backend)
    upstream, routed, slot = twins(tail)
    assert_equal_steps(upstream, routed)
    assert slot.outcome(routed).backend == ("torch" if backend == "auto" else backend)


def test_only_one_position_of_each_row_is_scored(monkeypatch):
    _, routed, _ = twins(TAIL)
    seen, linear = [], nn.functional.linear

    def watched(x, weight, bias=None):
        if weight is routed.score.weight:
            seen.append(tuple(x.shape))
        return linear(x, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", watched)
    routed(*inputs())
    assert seen == [(3, 8)]


class Centred(nn.Module):
    """Uses all positions of a row."""

    def forward(self, x):
        return x - x.mean(dim=1, keepdim=True)


def test_a_score_that_looks_at_other_positions_gets_all():
    upstream, routed, slot = twins(TAIL)
    for model in (upstream, routed):
        model.score = nn.Sequential(Centred(), model.score)
    routed.load_state_dict(upstream.state_dict())
    assert_equal_steps(upstream, routed)
    assert "Centred, which may read more than one position" in slot.outcome(routed).reason


class Lora(nn.Module):
    __module__ = "peft.tuners.lora.layer"

    def __init__(self, base):
        super().__init__()
        self.base, self.up = base, nn.Linear(8, 3)

    def forward(self, x):
        return self.base(x) + self.up(x)


def test_a_wrapped_score_stays_a_module():
    upstream, routed, slot = twins(TAIL)
    for model in (upstream, routed):
        model.score = Lora(model.score)
    routed.load_state_dict(upstream.state_dict())
    assert_equal_steps(upstream, routed)
    assert slot.outcome(routed).backend == "torch"


def hooked(model):
    model.score.register_forward_hook(lambda *_: None)


def inner_hook(model):
    model.score = nn.Sequential(model.score)
    model.score[0].register_full_backward_hook(lambda *_: None)


def other_loss(model):
    model.loss_function = lambda logits, labels, pooled_logits, config: logits.sum() + pooled_logits.sum()


def no_module(model):
    score = model.score
    del model.score
    model.score = lambda x: score(x)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "hook"),
        (inner_hook, "backward hooks"),
        (other_loss, "own loss_function"),
        (no_module, "not a module"),
    ],
)
def test_all_positions_are_scored_for_who_may_look_at_them(change, reason):
    _, routed, slot = twins(TAIL)
    change(routed)
    assert routed(*inputs()).loss.requires_grad
    assert slot.outcome(routed).backend == "eager" and reason in slot.outcome(routed).reason


PICK = "pooled_logits = logits[torch.arange(batch, device=logits.device), last]"
MISSED = {
    "a mean": (TAIL.replace(PICK, "pooled_logits = logits.mean(dim=1)"), "for every row"),
    "rows by a mask, which takes positions too": (TAIL.replace(PICK, "pooled_logits = logits[ids.bool(), last]"), "for every row"),
    "chosen in a branch": (TAIL.replace(PICK, f"if batch:\n    {PICK}\nelse:\n    pooled_logits = logits[:, 0]"), "pooled in a branch"),
    "scores edited": (TAIL.replace(PICK, f"logits[..., 0] = 0\n{PICK}"), "used in another way"),
    "the loss reads them as well": (TAIL.replace("pooled_logits=pooled_logits, ", ""), "used in another way"),
    "scores of several modules": (TAIL.replace("logits = self.score(hidden)", "logits = other = self.score(hidden)"), "bound more than once"),
    "a name for the scores": (TAIL.replace("logits = self.score(hidden)", "scores = self.score(hidden)\nlogits = scores"), "not the result of a module"),
    "a second argument": (TAIL.replace("self.score(hidden)", "self.score(hidden, 1)"), "takes more than"),
    "costly hidden states": (TAIL.replace("self.score(hidden)", "self.score(self.body(ids))"), "takes more than"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSED)
def test_what_is_not_understood_is_not_routed(name):
    tail, reason = MISSED[name]
    site = site_of(tail)
    assert site.status is Status.MISSED and not site.edits and site.counted
    assert reason in site.reason and site.reason.startswith("nearest is last_token: ")


def test_the_text_and_the_site():
    site = site_of(TAIL)
    assert f"if (kernel := {SLOT}.kernel(self, hidden, self.score)) is not None" in spliced(
        source(TAIL), [site]
    )
    assert site.captures == {"score": "self.score", "hidden_states": "hidden", "logits": "logits"}
    assert site.slots == (SlotSpec(SLOT, "linear_cross_entropy", "last_token"),)
    assert (site.target, site.part, site.lineno) == ("Tiny.forward", idiom.PART, 19)


def test_the_first_position_is_no_candidate():
    assert not list(sites_of(idiom, source(TAIL.replace(PICK, "pooled_logits = logits[:, 0]"))))


def test_each_forward_is_listed_once():
    view = ModuleView(Document(source(TAIL)))
    assert not list(linear_cross_entropy.find(view))
    plain = MODULE.replace("{tail}", "        loss, pooled_logits = None, hidden")
    assert not sites_of(idiom, plain)
