"""Index scores of sparse attention: the forms of upstream's modules, and what is near them."""

from __future__ import annotations

import textwrap

import pytest
import torch

from tests.kernels.matching import gradients
from tests.patches.idioms.applied import executed, in_lines, spliced
from veomni_hook.kernels.selection.process_choice import get_choice, set_choice
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms import index_scores
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Status

HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
PRODUCT = "scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))"
WEIGHTS = "weights = self.proj(x).float() * (self.heads**-0.5)\n"
BY_MATMUL = "s = torch.matmul(weights.unsqueeze(-2), scores).squeeze(-2)\n"
MASK = "s = s + mask\nreturn s.topk(2, dim=-1).values\n"
EINSUM = WEIGHTS + 'scores = torch.einsum("bshd,btd->bsht", q.float(), k.float()) * self.scale\n'
EINSUM_SUM = 's = torch.einsum("bsht,bsh->bst", scores, weights)\n'
USUAL = f"{PRODUCT} * self.scale\nscores = F.relu(scores)\n{WEIGHTS}{BY_MATMUL}{MASK}"
MADE = "self.proj(x).float() * self.heads ** (-0.5)"
# Body of forward(self, q, k, x, mask), the variant, and what the kernel's call is part of.
ROUTED = {
    "scaled, relu": (USUAL, "relu_matmul", f"s = kernel(q, k, {MADE}, self.scale)"),
    "relu of the scaled": (
        f"{PRODUCT}\nscores = torch.relu(scores * self.scale)\n{WEIGHTS}{BY_MATMUL}{MASK}",
        "relu_matmul",
        f"s = kernel(q, k, {MADE}, self.scale)",
    ),
    "no scale": (
        f"{PRODUCT}\nscores = F.relu(scores)\n{WEIGHTS}{BY_MATMUL}{MASK}",
        "relu_matmul",
        f"s = kernel(q, k, {MADE}, 1.0)",
    ),
    "weights first": (
        f"{WEIGHTS}{PRODUCT} * 0.5\ns = torch.matmul(weights.unsqueeze(-2), scores.relu()).squeeze(-2)\n{MASK}",
        "relu_matmul",
        "s = kernel(q, k, weights, 0.5)",
    ),
    "a returned sum": (
        f"{PRODUCT}\nscores = F.relu(scores) * self.scale\n{WEIGHTS}"
        "return (scores * weights.unsqueeze(-1)).sum(dim=2)\n",
        "relu_sum",
        f"return kernel(q, k, {MADE}, self.scale)",
    ),
    "einsum and relu": (
        EINSUM + "scores = F.relu(scores)\n" + EINSUM_SUM + MASK,
        "relu_einsum",
        "s = kernel(q, k, weights, self.scale)",
    ),
    "einsum": (EINSUM + EINSUM_SUM + MASK, "einsum", "s = kernel(q, k, weights, self.scale)"),
}
NEAR_MISSES = {
    "products not in float32": USUAL.replace("q.float()", "q"),
    "another activation": USUAL.replace("F.relu", "F.silu"),
    "scores are read again": USUAL.replace("s + mask", "s + mask + scores.amax(2)"),
    "weights are read again": USUAL.replace("s + mask", "s + mask + weights.sum(-1, keepdim=True)"),
    "a sum over other numbers": USUAL.replace(BY_MATMUL, "s = (scores * weights.unsqueeze(-1)).sum(dim=1)\n"),
    "no weights": USUAL.replace(BY_MATMUL, "s = scores.sum(dim=2)\n"),
    "something in between": USUAL.replace(WEIGHTS, WEIGHTS + "print(scores.shape)\n"),
    "queries are changed": USUAL.replace(WEIGHTS, WEIGHTS + "scores = scores.clamp(max=1.0)\n"),
    "a scale that is computed": USUAL.replace("* self.scale", "* self.proj(x).mean()"),
    "a key that is computed": USUAL.replace("k.transpose", "k.cos().transpose"),
}


def module(body, name="SomeIndexer"):
    setup = "self.proj, self.heads, self.scale = nn.Linear(5, 3), 3, 0.4"
    body = textwrap.indent(body.strip("\n"), "        ")
    return (
        f"{HEAD}class {name}(nn.Module):\n    def __init__(self):\n        super().__init__()\n        {setup}\n\n"
        f"    def forward(self, q, k, x, mask):\n{body}\n"
    )


def sites(text):
    return list(index_scores.find(ModuleView(Document(text))))


@pytest.fixture
def choose():
    before = get_choice()
    yield set_choice
    set_choice(before)


@pytest.mark.parametrize("name", ROUTED)
def test_forms(name):
    body, variant, call = ROUTED[name]
    (site,) = sites(module(body))
    assert (site.status, site.variant) == (Status.ROUTED, variant), site.reason
    assert call in in_lines(spliced(module(body), [site]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("name", ROUTED)
def test_the_guarded_path_is_the_upstream_one(name, backend, dtype, choose):
    choose(f"index_scores={backend}")
    text = module(ROUTED[name][0])
    torch.manual_seed(0)
    upstream = executed(text)["SomeIndexer"]().to(dtype)
    scope = executed(text, sites(text))
    routed = scope["SomeIndexer"]().to(dtype)
    routed.load_state_dict(upstream.state_dict())
    inputs = [torch.randn(shape).to(dtype) for shape in ((2, 4, 3, 6), (2, 7, 6), (2, 4, 5))]
    mask = torch.zeros(7).index_fill(0, torch.tensor([2, 5]), float("-inf"))
    found = []
    for each in (upstream, routed):
        outputs, grads = gradients(each, [*inputs, mask], [True] * 3 + [False])
        found.append([*outputs, *grads[:3], *(p.grad for p in each.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    (slot,) = [value for name, value in scope.items() if name.startswith("veomni_index_scores")]
    assert slot.outcome(routed).backend == backend


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    (site,) = sites(module(NEAR_MISSES[name]))
    assert site.status is Status.MISSED and site.reason


def test_classes_of_other_names_are_candidates_if_they_have_the_formula():
    (site,) = sites(module(USUAL, "Selection"))
    assert site.status is Status.ROUTED
    assert not sites(module(NEAR_MISSES["another activation"], "Selection"))
    assert not sites(module(EINSUM + EINSUM_SUM + MASK, "Selection"))


def test_a_call_that_no_kernel_takes_runs_upstreams_code(choose):
    choose("auto")
    scope = executed(module(USUAL), sites(module(USUAL)))
    routed = scope["SomeIndexer"]()
    routed.scale = torch.tensor(0.4)
    routed(torch.randn(2, 4, 3, 6), torch.randn(2, 7, 6), torch.randn(2, 4, 5), 0.0)
    (slot,) = [value for name, value in scope.items() if name.startswith("veomni_index_scores")]
    outcome = slot.outcome(routed)
    assert outcome.backend == "eager" and "the scale is a Tensor" in outcome.reason
