"""Parts of heads: the forms of upstream's attention, and what is near them."""

import pytest
import torch

from tests.patches.idioms.applied import class_of, compared, executed, in_lines, site_of, sites_of, spliced
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
    "copies, returned": (SPLIT + SHARED + NAMED + "return k, turned * 2\n", ["return (kernel((passed, shared), -1, torch.cat), turned * 2)"]),
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
INPUTS = [(2, 3, 5, 6), (2, 1, 5, 2)]


def module(body):
    return class_of("Attention", "self.first, self.second = 4, 2", "forward(self, q, x)", body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROUTED)
def test_the_routed_path_is_the_upstream_one(name, dtype):
    body, said = ROUTED[name]
    text = module(body)
    site = site_of(head_parts, text)
    assert site.status is Status.ROUTED and site.target == "Attention.forward"
    patched = in_lines(spliced(text, [site]))
    assert all(one in patched for one in said), patched
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
    for shared, asked in ((torch.randn(2, 1, 5, 1), False), (torch.randn(INPUTS[1]), True)):
        k = attention(q, shared)
        assert torch.equal(k, torch.cat((q[..., :4], shared.expand(2, 3, 5, -1).expand(2, 3, 5, 2)), -1))
        assert (slot.outcome(attention) is not None) is asked
