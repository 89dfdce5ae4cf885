"""Parts of heads: the forms of upstream's attention, and what is near them."""

import textwrap

import pytest
import torch

from tests.patches.idioms.applied import IMPORTS, compared, executed, site_of, sites_of
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.patches.idioms import head_parts
from veomni_hook.patches.site import Status

SPLIT = "passed, turned = torch.split(q, [self.first, self.second], dim=-1)\n"
TURN = "turned = turned * x\n"
JOINED = "q = torch.cat((passed, turned), dim=-1)\n"
COPIED = """
k = q.new_empty(*q.shape[:-1], self.first + self.second)
k[..., : self.first].copy_(passed)
k[..., self.first :].copy_(x.expand(*passed.shape[:-1], -1))
"""
NAMED = COPIED.replace("x.expand(*passed.shape[:-1], -1)", "shared")
SHARED = "shared = x.expand(*passed.shape[:-1], -1)"
END = "return q.sin()\n"
# Body of forward(self, q, x), and what is in the patched text.
ROUTED = {
    "a tuple": (SPLIT + TURN + JOINED + END, ["split.call(self, torch.split, q, [self.first, self.second], -1)", "joined.call(self, torch.cat, (passed, turned), -1)"]),
    "a list, the other order": (SPLIT + TURN + "q = torch.cat([turned, passed], dim=-1)\n" + END, ["joined.call(self, torch.cat, [turned, passed], -1)"]),
    "copies, returned": (SPLIT + SHARED + NAMED + "return k, turned * 2\n", ["return kernel((passed, shared), -1, torch.cat), turned * 2"]),
    "copies in the middle": (SPLIT + SHARED + NAMED + "k = k * 2\nif True:\n    k = k + 1\nreturn k.sin() * turned.sum()\n", ["k = kernel((passed, shared), -1, torch.cat)", "fuses(self)"]),
    "both": (SPLIT + SHARED + NAMED + TURN + JOINED + "return q.sin() + k\n", ["joined.call(self, torch.cat", "kernel((passed, shared)"]),
}  # fmt: skip
NEAR_MISSES = {
    "three parts": "a, b, c = torch.split(q, [1, 2, 3], dim=-1)\nreturn torch.cat((a, b), dim=-1)\n",
    "another dimension": SPLIT.replace("dim=-1", "dim=1") + TURN + JOINED + END,
    "not joined": SPLIT + TURN + "return passed.sum() + turned\n",
    "joined along another dimension": SPLIT + "return torch.cat((passed, passed), dim=1)\n",
    "other tensors are joined": SPLIT + TURN + "return torch.cat((q, x), dim=-1) * passed.sum()\n",
    "an expression is joined": SPLIT + "return torch.cat((passed * 2, x), dim=-1)\n",
    "copies from an expression": SPLIT + COPIED + "return k\n",
    "copies of another width": SPLIT + SHARED + NAMED.replace("self.first + self.second", "9") + "return k\n",
    "a copy into other columns": SPLIT + SHARED + NAMED.replace("self.first :]", "-1 :]") + "return k\n",
}
kernels = pytest.importorskip("veomni_hook.kernels.head_parts.triton")
INPUTS = [(2, 3, 5, 6), (2, 1, 5, 2)]


def module(body):
    setup = "self.first, self.second = 4, 2"
    return (
        f"{IMPORTS}class Attention(nn.Module):\n    def __init__(self):\n        super().__init__()\n        {setup}\n\n"
        f"    def forward(self, q, x):\n{textwrap.indent(body.strip() + chr(10), ' ' * 8)}"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROUTED)
def test_the_routed_path_is_the_upstream_one(name, dtype):
    body, said = ROUTED[name]
    text = module(body)
    site = site_of(head_parts, text)
    assert site.status is Status.ROUTED and site.target == "Attention.forward"
    patched = " ".join(edit.text for edit in site.edits)
    assert all(one in patched or "fuses" in one for one in said), patched
    set_choice("head_parts=reference")
    outcomes = compared(text, [site], "Attention", INPUTS, dtype=dtype)
    assert {variant: outcome.backend for variant, outcome in outcomes.items()} == dict.fromkeys(
        ("split", "joined"), "reference"
    )


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    assert not [site for site in sites_of(head_parts, module(NEAR_MISSES[name])) if site.edits]


def test_parts_that_torch_would_broadcast_or_cast_are_copied():
    text = module(SPLIT + SHARED + NAMED + "return k\n")
    scope = executed(text, sites_of(head_parts, text))
    set_choice("head_parts=reference")
    attention, q = scope["Attention"](), torch.randn(INPUTS[0])
    slot = scope["veomni_head_parts_joined"]
    for shared, backend in ((torch.randn(INPUTS[1]), "reference"), (torch.randn(2, 1, 5, 1), None)):
        k = attention(q, shared)
        assert torch.equal(k, torch.cat((q[..., :4], shared.expand(2, 3, 5, -1).expand(2, 3, 5, 2)), -1))
        outcome = slot.outcome(attention)
        assert backend is None or outcome.backend == backend
    before = slot.record(attention)
    attention(q, torch.randn(2, 1, 5, 1))
    assert slot.record(attention) is before  # one column for two was not offered to a kernel


def test_few_numbers_are_left_to_torch(monkeypatch):
    x = torch.randn(INPUTS[0], requires_grad=True)
    assert "fewer than 1,048,576" in kernels.loses_split(None, x)
    assert "fewer than 1,048,576" in kernels.loses_joined(None, (x, x))
    assert "no gradient" in kernels.loses_split(None, x.detach())
    monkeypatch.setattr(kernels, "_FEWEST", 0)
    assert kernels.loses_split(None, x) is kernels.loses_joined(None, (x, x)) is None


def test_the_join_has_the_order_of_the_projection_and_spares_its_gradient_a_copy():
    projected = torch.randn(2, 5, 3 * 6, requires_grad=True)
    x = projected.view(2, 5, 3, 6).transpose(1, 2)
    passed, turned = kernels.split(x, [4, 2], -1, torch.split)
    shared = torch.randn(2, 1, 5, 2).expand(2, 3, 5, 2)
    for parts in ((passed, turned * 2), (passed, shared), (shared, passed)):
        assert kernels.joined(parts, -1, torch.cat).transpose(1, 2).is_contiguous()
    joined = kernels.joined((passed, turned), -1, torch.cat)
    for incoming in (
        torch.randn(2, 3, 5, 6),
        torch.randn(2, 5, 3, 6).transpose(1, 2),
        torch.ones(()).expand(2, 3, 5, 6),
    ):
        (gradient,) = torch.autograd.grad(joined, x, incoming, retain_graph=True)
        assert torch.equal(gradient, incoming) and gradient.transpose(1, 2).is_contiguous()
