"""What was decided in a forward pass is what a checkpoint's recomputation gets, whatever has changed since."""

import copy
import runpy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.kernels.matching import close
from tests.kernels.patched_qwen3 import batch, pair
from veomni_hook.kernels.bind import bind
from veomni_hook.kernels.selection.binding import use_kernels
from veomni_hook.kernels.selection.process_choice import set_active, set_choice
from veomni_hook.kernels.shared import repeated
from veomni_hook.kernels.slot import Slot
from veomni_hook.tools.report.explanation import explain

tells_hooks = pytest.mark.skipif(repeated.hooks_in_force is repeated._unknown, reason="torch 2.8 tells hooks")


@pytest.fixture(autouse=True)
def chosen():
    set_choice("torch")


def hooked(model):
    """Hooks on all modules without parts, so that no kernel runs."""
    parts = (module for module in model.modules() if not any(module.children()))
    return [module.register_forward_hook(lambda *_: None) for module in parts]


def unhook(hooks):
    for hook in hooks:
        hook.remove()


CHANGES = {
    "nothing": (lambda model: None, lambda model, before: None),
    "kernels switched off": (lambda model: None, lambda model, before: set_choice("eager")),
    "kernels switched on": (lambda model: set_choice("eager"), lambda model, before: set_choice("torch")),
    "bound to upstream's": (lambda model: None, lambda model, before: bind(model, "eager")),
    "bound to kernels": (lambda model: bind(model, "eager"), lambda model, before: bind(model, "torch")),
    "deactivated": (lambda model: None, lambda model, before: set_active(False)),
    "activated": (lambda model: set_active(False), lambda model, before: set_active(True)),
    "hooks removed": (hooked, lambda model, before: unhook(before)),
    "hooks added": (lambda model: None, lambda model, before: hooked(model)),
}
WAYS = {"whole": ("whole",), "layers": ("layers",), "nested": ("whole", "layers")}


def run(model, inputs, way, change=CHANGES["nothing"], *, backward=1, early_stop=True):
    """The gradients of a step; the change is made in two parts, before the forward and before the backward."""
    first, second = change
    before = first(model)
    if "layers" in way:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    embeds = model.get_input_embeddings()(inputs["input_ids"])

    def loss_of(embeds):
        return model(inputs_embeds=embeds, labels=inputs["labels"], use_cache=False).loss

    with nullcontext() if early_stop else set_checkpoint_early_stop(False):
        loss = checkpoint(loss_of, embeds, use_reentrant=False) if "whole" in way else loss_of(embeds)
    second(model, before)
    for last in reversed(range(backward)):
        loss.backward(retain_graph=last > 0)
    return {name: weight.grad / backward for name, weight in model.named_parameters()}


@pytest.mark.sample(4)
@tells_hooks
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_recomputation_gets_what_its_forward_got(patched, change, way):
    upstream, model = pair(patched)
    inputs = batch()
    expected = run(upstream, inputs, way)
    got = run(model, inputs, way, change)
    close(got, expected, 1e-5)


@tells_hooks
@pytest.mark.parametrize("more", [{"backward": 2}, {"early_stop": False}], ids=str)
def test_every_recomputation_begins_anew(patched, more):
    upstream, model = pair(patched)
    inputs = batch()
    expected = run(upstream, inputs, "whole")
    got = run(model, inputs, "whole", CHANGES["kernels switched off"], **more)
    close(got, expected, 1e-5)


def test_the_next_forward_decides_anew(patched):
    _, model = pair(patched)
    run(model, batch(), "whole", CHANGES["kernels switched off"])
    model.zero_grad()
    run(model, batch(), "whole")
    row = next(row for row in explain(model).rows if row.op == "rms_norm")
    assert row.backend == "eager" and "chosen" in row.reason


SLOT = Slot("rms_norm", "cast_before_weight", __name__)


class Twice(nn.Module):
    """Asks its slot twice, and notes the answers; an operand in float64 is refused."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.answers = []

    def forward(self, x):
        runs = [SLOT.kernel(self, each, self.weight, 1e-6) for each in (x, x.double(), x)]
        self.answers.append([run is not None for run in runs])
        return (x * self.weight).sin()


@tells_hooks
def test_calls_of_one_module_are_told_apart_by_their_order():
    module = Twice()
    x = torch.randn(2, 8, requires_grad=True)
    losses = [checkpoint(module, x, use_reentrant=False).sum()]
    set_choice("eager")
    losses.append(checkpoint(module, x, use_reentrant=False).sum())
    set_choice("torch")
    for loss in losses:
        loss.backward()
    fused, plain = [True, False, True], [False] * 3
    assert module.answers == [fused, plain, fused, plain]


def test_calls_that_the_forward_did_not_make_are_decided():
    module = Twice()
    x = torch.randn(2, 8, requires_grad=True)
    times = [1]

    def several(x):
        first, *_ = [module(x) for _ in range(times[0])]
        return first

    with set_checkpoint_early_stop(False):
        loss = checkpoint(several, x, use_reentrant=False).sum()
    times[0] = 2
    with pytest.raises(torch.utils.checkpoint.CheckpointError):  # as without this package
        loss.backward()
    assert module.answers == [[True, False, True]] * 3


@tells_hooks
def test_recomputed_calls_are_counted_as_what_they_got():
    module = Twice()
    loss = checkpoint(module, torch.randn(2, 8, requires_grad=True), use_reentrant=False).sum()
    with use_kernels("reference"):
        loss.backward()
    (row,) = (row for row in explain(module).rows if row.op == "rms_norm")
    assert {each.backend: each.times for each in row.training} == {"torch": 4, "eager": 2}


@tells_hooks
def test_a_copy_is_another_module():
    module = Twice()
    other = copy.deepcopy(module)
    x = torch.randn(2, 8, requires_grad=True)
    loss = checkpoint(module, x, use_reentrant=False).sum()
    set_choice("eager")
    other(x)
    loss.backward()
    assert (module.answers, other.answers) == ([[True, False, True]] * 2, [[False] * 3])


def test_a_torch_that_tells_no_hooks(monkeypatch):
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks", raising=False)
    decided = runpy.run_path(repeated.__file__)["decided"]
    monkeypatch.undo()  # from 2.14 on, torch's checkpoints ask for them
    answers = iter("ab")
    x = torch.ones(2, requires_grad=True)
    loss = checkpoint(
        lambda x: x.sin() if decided("key", lambda: next(answers)) else x, x, use_reentrant=False
    )
    loss.sum().backward()
    assert not list(answers)
