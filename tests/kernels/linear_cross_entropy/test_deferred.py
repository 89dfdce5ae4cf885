import copy
import pickle

import pytest
import torch
from accelerate import Accelerator
from torch.nn import functional

from tests.kernels.linear_cross_entropy.routed import batch, held_logits, pair
from veomni_hook.kernels.linear_cross_entropy import deferred
from veomni_hook.kernels.linear_cross_entropy.deferred import logits_are_read
from veomni_hook.kernels.selection.process_choice import set_choice


@pytest.fixture
def made(patched):
    """A patched model in training, its output with unread logits, upstream's model and its output."""
    set_choice("linear_cross_entropy=torch")
    upstream, model = pair(patched)
    inputs = batch()
    return model, model(**inputs), upstream, upstream(**inputs)


MASK = torch.zeros(2, 12, dtype=torch.bool).index_put(
    (torch.tensor([0, 1]), torch.tensor([3, 8])), torch.tensor(True)
)
ANSWERS = {
    "argmax": lambda logits: logits.argmax(-1),
    "argmax, named": lambda logits: logits.argmax(dim=-1, keepdim=True),
    "argmax, positive": lambda logits: torch.argmax(logits, 2),
    "argmax, as numpy has it": lambda logits: logits.argmax(axis=-1),
    "argmax of predicted": lambda logits: logits[:, :-1].argmax(-1),
    "argmax of predicted, whole rows": lambda logits: logits[..., :-1, :].argmax(-1),
    "argmax, detached": lambda logits: logits.detach().argmax(-1),
    "argmax of one sample": lambda logits: logits[1].argmax(-1),
    "form": lambda logits: (logits.shape, logits.dtype, logits.device, logits.ndim, logits.requires_grad, len(logits)),
    "sizes": lambda logits: (logits.size(), logits.size(-1), logits.dim(), logits.numel(), logits.stride()),
    "form of a part": lambda logits: (logits[:, -1].shape, logits[MASK].shape, logits[:, None, 2:4].shape),
    "kind": lambda logits: (isinstance(logits, torch.Tensor), torch.is_floating_point(logits), logits is None),
    "hash": lambda logits: hash(logits) == hash(logits),
    "last": lambda logits: logits[:, -1].float().softmax(-1),
    "last, whole rows": lambda logits: logits[..., -1, :].logsumexp(-1),
    "one position": lambda logits: logits[0, 3] * 2,
    "masked": lambda logits: logits[MASK].sum(),
    "by number": lambda logits: logits[torch.arange(2), torch.tensor([4, 2])].sum(),
    "of a part": lambda logits: logits[:, 2:5][:, -1].sum(),
    "without gradients": lambda logits: logits[:, -1].detach() + 1,
}  # fmt: skip


@pytest.mark.parametrize("ask", ANSWERS.values(), ids=ANSWERS)
def test_what_needs_no_logits_computes_none(made, ask, monkeypatch):
    model, output, _, expected = made
    monkeypatch.setattr(deferred, "CHUNK", 61 * 4)
    computed = deferred.DeferredLogits.rows
    rows = []
    monkeypatch.setattr(
        deferred.DeferredLogits, "rows", lambda *args: rows.append(computed(*args)) or rows[-1]
    )
    got, wanted = ask(output.logits), ask(expected.logits)
    if isinstance(got, torch.Tensor):
        torch.testing.assert_close(got, wanted)
        assert got.requires_grad is wanted.requires_grad and type(got) is torch.Tensor
    else:
        assert got == wanted
    assert logits_are_read(model) is None and held_logits(output).logits is None
    assert all(part.numel() <= 61 * 4 for part in rows)


USES = {
    "a product": lambda logits: logits * 2,
    "of the vocabulary": lambda logits: logits[..., 3],
    "of the vocabulary, after positions": lambda logits: logits[0, 1, 2],
    "many positions": lambda logits: logits[:, :-1].float().sum(-1),
    "by a list": lambda logits: logits[[0, 1]],
    "by a truth value": lambda logits: logits[True],
    "argmax over positions": lambda logits: logits.argmax(1),
    "argmax over everything": lambda logits: logits.argmax(),
    "a copy": lambda logits: copy.deepcopy(logits.detach()),
    "a pickle": lambda logits: pickle.loads(pickle.dumps(logits.detach())),
    "an array": lambda logits: logits.detach().numpy().sum(),
    "a loss": lambda logits: functional.cross_entropy(logits.view(-1, 61), torch.arange(logits[..., 0].numel())),
    "an out argument": lambda logits: torch.add(logits.detach(), 1, out=torch.empty(logits.shape)),
    "argmax into a tensor": lambda logits: torch.argmax(logits, -1, out=torch.empty(logits.shape[:-1]).long()),
    "comparison": lambda logits: logits == logits,
    "memory": lambda logits: logits.data_ptr() % 4,
    "gathered": lambda logits: Accelerator(cpu=True).gather_for_metrics(logits.detach()).float(),
    "cast": lambda logits: logits.double(),
    "a list": lambda logits: logits.tolist()[0][0],
}  # fmt: skip


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_other_use_computes_them(made, use):
    model, output, _, expected = made
    got, wanted = use(output.logits), use(expected.logits)
    torch.testing.assert_close(got, wanted)
    assert type(got) is type(wanted)
    assert "read" in logits_are_read(model)
    assert type(output.logits) is torch.Tensor and output.logits is output["logits"]


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.square().sum()

    @staticmethod
    def backward(ctx, gradient):
        (logits,) = ctx.saved_tensors
        return 2 * logits * gradient


def in_cpp(logits):
    with torch._C.DisableTorchFunction():
        return logits.square().sum()


LOSSES = {
    "torch": lambda logits: logits.square().sum(),
    "an autograd function": Squares.apply,
    "an autograd function, of a part": lambda logits: Squares.apply(logits[:, -1]),
    "an operator of C++": in_cpp,
    "a part": lambda logits: logits[:, -1].square().sum() + logits[0].square().mean(),
    "a part and all": lambda logits: (logits[:, -1] * logits.sum(1)).sum(),
    "compiled": torch.compile(lambda logits: logits.square().sum(), backend="eager"),
    "without gradients": lambda logits: logits[:, -1].detach().sum() + logits.detach().sum(),
}  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("twice", [False, True], ids=["", "twice"])
def test_gradients_are_those_of_logits(made, loss, twice):
    model, _, upstream, _ = made
    inputs = batch()
    for each in (model, upstream):
        each.double().set_attn_implementation("eager")  # the others have no second derivatives on a CPU
        output = each(**inputs)
        total = output.loss + loss(output.logits)
        if twice:
            weights = list(each.parameters())
            first = torch.autograd.grad(total, weights, create_graph=True)
            total = sum(gradient.square().sum() for gradient in first)
        total.backward()
    for (name, got), (_, wanted) in zip(model.named_parameters(), upstream.named_parameters(), strict=True):
        torch.testing.assert_close(
            got.grad, wanted.grad, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_logits_that_somebody_holds_are_of_the_weights_before_the_step(made, compiled):
    model, output, _, expected = made
    held, part = output.logits, output.logits[:, -1]
    output.loss.backward()
    step = torch.optim.SGD(model.parameters(), lr=0.5).step
    (torch.compile(step, backend="eager") if compiled else step)()
    torch.testing.assert_close(held.detach() + 0, expected.logits.detach())
    torch.testing.assert_close(part.detach() + 0, expected.logits[:, -1].detach())


def test_logits_that_nobody_holds_are_not_computed_at_a_step(made):
    model, output, _, _ = made
    assert output.logits.argmax(-1).shape == output.logits.shape[:-1]
    output.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert held_logits(output).logits is None and logits_are_read(model) is None


def test_what_is_written_into_a_part_is_written_into_the_logits(made):
    _, output, _, expected = made
    for of in (output, expected):
        with torch.no_grad():
            last = of.logits[:, -1]
            assert last.sum()
            last += 1
            of.logits[:, 0] = 7
            of.logits.detach()[:, 1].zero_()
    assert torch.equal(output.logits, expected.logits)


def test_a_cap_and_a_cast_are_part_of_what_is_answered(patched):
    set_choice("linear_cross_entropy=torch")
    upstream, model = pair(patched)
    inputs = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, expected = model(**inputs), upstream(**inputs)
    assert output.logits.dtype is expected.logits.dtype is torch.bfloat16
    assert torch.equal(output.logits[:, -1] + 0, expected.logits[:, -1])
    assert torch.equal(output.logits.argmax(-1), expected.logits.argmax(-1))
