"""Index scores of sparse attention: the forms of upstream's modules, and what is near them."""

import pytest
import torch

from tests.patches.idioms.applied import (
    assert_missed,
    assert_routed,
    class_of,
    compared,
    executed,
    site_of,
    sites_of,
)
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.patches.idioms import index_scores
from veomni_hook.patches.site import Status

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
    "no scale": (f"{PRODUCT}\nscores = F.relu(scores)\n{WEIGHTS}{BY_MATMUL}{MASK}", "relu_matmul", f"s = kernel(q, k, {MADE}, 1.0)"),
    "a returned sum": (
        f"{PRODUCT}\nscores = F.relu(scores) * self.scale\n{WEIGHTS}"
        "return (scores * weights.unsqueeze(-1)).sum(dim=2)\n",
        "relu_sum",
        f"return kernel(q, k, {MADE}, self.scale)",
    ),
    "einsum and relu": (EINSUM + "scores = F.relu(scores)\n" + EINSUM_SUM + MASK, "relu_einsum", "s = kernel(q, k, weights, self.scale)"),
    "einsum": (EINSUM + EINSUM_SUM + MASK, "einsum", "s = kernel(q, k, weights, self.scale)"),
}  # fmt: skip
NEAR_MISSES = {
    "products not in float32": USUAL.replace("q.float()", "q"),
    "another activation": USUAL.replace("F.relu", "F.silu"),
    "scores are read again": USUAL.replace("s + mask", "s + mask + scores.amax(2)"),
    "a sum over other numbers": USUAL.replace(BY_MATMUL, "s = (scores * weights.unsqueeze(-1)).sum(dim=1)\n"),
    "no weights": USUAL.replace(BY_MATMUL, "s = scores.sum(dim=2)\n"),
    "something in between": USUAL.replace(WEIGHTS, WEIGHTS + "print(scores.shape)\n"),
    "queries are changed": USUAL.replace(WEIGHTS, WEIGHTS + "scores = scores.clamp(max=1.0)\n"),
    "a scale that is computed": USUAL.replace("* self.scale", "* self.proj(x).mean()"),
}


INPUTS = [(2, 4, 3, 6), (2, 7, 6), (2, 4, 5)]
MASK_OF_TWO = torch.zeros(7).index_fill(0, torch.tensor([2, 5]), float("-inf"))


def module(body, name="SomeIndexer"):
    setup = "self.proj, self.heads, self.scale = nn.Linear(5, 3), 3, 0.4"
    return class_of(name, setup, "forward(self, q, k, x, mask)", body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("name", ROUTED)
def test_the_guarded_path_is_the_upstream_one(name, backend, dtype):
    set_choice(f"index_scores={backend}")
    body, variant, call = ROUTED[name]
    text = module(body)
    assert_routed(index_scores, text, variant, "SomeIndexer.forward", call)
    outcomes = compared(
        text, sites_of(index_scores, text), "SomeIndexer", [*INPUTS, MASK_OF_TWO], dtype=dtype
    )
    assert outcomes["index_scores"].backend == backend


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    assert_missed(index_scores, module(NEAR_MISSES[name]))


def test_classes_of_other_names_are_candidates_if_they_have_the_formula():
    assert site_of(index_scores, module(USUAL, "Selection")).status is Status.ROUTED
    assert not sites_of(index_scores, module(NEAR_MISSES["another activation"], "Selection"))
    assert not sites_of(index_scores, module(EINSUM + EINSUM_SUM + MASK, "Selection"))


def test_a_call_that_no_kernel_takes_runs_upstreams_code():
    set_choice("auto")
    scope = executed(module(USUAL), sites_of(index_scores, module(USUAL)))
    routed = scope["SomeIndexer"]()
    routed.scale = torch.tensor(0.4)
    routed(*map(torch.randn, INPUTS), 0.0)
    outcome = scope["veomni_index_scores_relu_matmul"].outcome(routed)
    assert outcome.backend == "eager" and "the scale is a Tensor" in outcome.reason
