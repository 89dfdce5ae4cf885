from functools import partial

import pytest
import torch

from tests.kernels.matching import TOLERANCE
from tests.patches.idioms.applied import (
    assert_missed,
    assert_routed,
    class_of,
    compared,
    executed,
    in_lines,
    site_of,
    sites_of,
    spliced,
)  # fmt: skip
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.patches.idioms import moe_router
from veomni_hook.patches.site import Status

SETUP = """
self.weight = nn.Parameter(torch.randn(8, 6))
self.bias = nn.Parameter(torch.randn(8) * 0.1)
self.top_k, self.num_experts, self.groups, self.kept_groups, self.scale = 3, 8, 4, 2, 2.5
self.renormalise, self.epsilon = True, 1e-3
self.score_fn = nn.Sigmoid()
"""
LOGITS = "logits = F.linear(x.reshape(-1, 6), self.weight)\n"
TOP = "weights, indices = torch.topk(probs, self.top_k, dim=-1)\n"
SOFTMAX = LOGITS + "probs = F.softmax(logits, dim=-1, dtype=torch.float)\n" + TOP
FLOAT32 = (
    "logits = F.linear(x.reshape(-1, 6).float(), self.weight.float())\nprobs = F.softmax(logits, dim=-1)\n"
    + TOP
)
BIASED = (
    LOGITS
    + "scores = logits.float().sigmoid()\n_, indices = torch.topk(scores + self.bias, self.top_k, sorted=False)\n"
    "weights = scores.gather(1, indices)\n"
)
GROUPED = LOGITS.replace("F.linear", "F.linear") + (
    "scores = logits.sigmoid()\nchoice = scores + self.bias\n"
    "best = choice.view(-1, self.groups, self.num_experts // self.groups).topk(2, dim=-1)[0].sum(-1)\n"
    "group = torch.topk(best, k=self.kept_groups, dim=-1, sorted=False).indices\n"
    "mask = torch.zeros_like(best)\nmask.scatter_(1, group, 1)\n"
    "mask = mask.unsqueeze(-1).expand(-1, self.groups, self.num_experts // self.groups)\n"
    "choice = choice.masked_fill(~mask.reshape(-1, self.num_experts).bool(), FILL)\n"
    "indices = torch.topk(choice, k=self.top_k, dim=-1, sorted=False)[1]\nweights = scores.gather(1, indices)\n"
)


@pytest.fixture(autouse=True)
def _restored():
    with registry.restored():  # combinations become variants
        yield


# Body of forward(self, x), variant, and the kernel's arguments in the guard.
FORMULAS = {
    "softmax": (
        SOFTMAX + "if self.renormalise:\n    weights /= weights.sum(dim=-1, keepdim=True)\n"
        "return logits, weights.to(logits.dtype), indices",
        "softmax_topk",
        "*(operands := (logits, self.top_k, self.renormalise))",
    ),
    "softmax, always divided": (
        SOFTMAX
        + "weights = weights / weights.sum(-1, keepdim=True)\nresult = weights\nreturn result, indices",
        "softmax_topk",
        "*(operands := (logits, self.top_k, True))",
    ),
    "softmax, never divided": (
        SOFTMAX + "return indices, weights * self.scale",
        "softmax_topk",
        "*(operands := (logits, self.top_k, False))",
    ),
    "softmax of a cast, by dimension 1": (
        LOGITS + "probs = torch.softmax(logits.float(), 1)\n" + TOP + "return weights, indices",
        "softmax_topk",
        "*(operands := (logits, self.top_k, False))",
    ),
    "probabilities are returned": (
        LOGITS
        + "logits = F.softmax(logits, dim=-1, dtype=torch.float)\n"
        + TOP.replace("probs", "logits")
        + "weights /= weights.sum(dim=-1, keepdim=True)\nreturn logits, weights, indices",
        "softmax_topk",
        "return F.softmax(logits, dim=-1, dtype=torch.float), weights, indices",
    ),
    # Later code reads the value from after the formula.
    "logits changed in place afterwards": (
        SOFTMAX + "logits[..., 0] = 0\nreturn logits, weights, indices",
        "softmax_topk",
        "*(operands := (logits, self.top_k, False))",
    ),
    "logits changed in place by a method": (
        SOFTMAX + "logits.clamp_(max=0.1)\nreturn logits, weights, indices",
        "softmax_topk",
        "*(operands := (logits, self.top_k, False))",
    ),
    "a hook on the logits": (
        SOFTMAX + "logits.register_hook(lambda gradient: gradient * 2)\nreturn logits, weights, indices",
        "softmax_topk",
        "*(operands := (logits, self.top_k, False))",
    ),
    "logits computed in float32": (
        FLOAT32 + "if self.renormalise:\n    weights = weights / weights.sum(dim=-1, keepdim=True)\n"
        "return logits, weights.to(x.dtype), indices",
        "softmax_topk",
        "if logits.dtype.itemsize == 4 and (kernel := ",
    ),
    # Later operations on the weights stay upstream's code, and so do the values that they need.
    "softmax, divided by another sum": (
        SOFTMAX + "weights = weights / probs.sum(-1, keepdim=True)\nreturn weights, indices",
        "softmax_topk",
        "*(operands := (logits, self.top_k, False))",
    ),
    "something before": (
        SOFTMAX.replace("probs = F.softmax(logits", "extra = self.score_fn(logits)\nprobs = F.softmax(extra")
        + "return weights + extra.sum(), indices",
        "softmax_topk",
        "*(operands := (extra, self.top_k, False))",
    ),
    "softmax of the largest": (
        LOGITS + "values, indices = logits.topk(self.top_k, dim=-1)\n"
        "weights = torch.softmax(values, dim=1, dtype=values.dtype)\nreturn logits, weights, indices",
        "topk_softmax",
        "*(operands := (logits, self.top_k))",
    ),
    "softmax of the largest, cast": (
        LOGITS + "values, indices = logits.topk(self.top_k, dim=-1)\n"
        "weights = torch.softmax(values, dim=-1).type_as(x)\nprint(end='')\nreturn logits, weights, indices",
        "topk_softmax",
        "weights = weights.type_as(x)\n    else:",
    ),
    "bias": (
        BIASED
        + "weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)\nreturn indices, weights * self.scale",
        "biased_topk",
        "kernel(logits.float(), self.bias, self.top_k, torch.sigmoid, 1e-20, False)",
    ),
    "bias, no epsilon": (
        BIASED + "weights /= weights.sum(dim=-1, keepdim=True)\nreturn weights, indices",
        "biased_topk",
        "kernel(logits.float(), self.bias, self.top_k, torch.sigmoid, 0.0, False)",
    ),
    "bias, another score": (
        BIASED.replace("logits.float().sigmoid()", "self.score_fn(logits)").replace(", sorted=False", "")
        + "weights = weights / (weights.sum(dim=-1, keepdim=True) + self.epsilon)\nreturn weights, indices",
        "biased_topk",
        "*(operands := (logits, self.bias, self.top_k, self.score_fn, self.epsilon, True))",
    ),
    "groups": (
        GROUPED.replace("FILL", "float('-inf')")
        + "if self.renormalise:\n    total = weights.sum(dim=-1, keepdim=True) + 1e-20\n    weights /= total\n"
        "weights = weights * self.scale\nreturn logits, weights, indices",
        "grouped_topk",
        "self.num_experts, self.groups, self.kept_groups, self.renormalise, float('-inf'), False)",
    ),
    "groups, zero elsewhere": (
        GROUPED.replace("FILL", "0.0") + "return weights, indices",
        "grouped_topk",
        "self.kept_groups, False, 0.0, False)",
    ),
    "bias, not divided": (
        BIASED + "return weights, indices",
        "biased_topk_of_any_score",
        "kernel(logits.float(), self.bias, self.top_k, torch.sigmoid, False, 0.0, False)",
    ),
    "bias, divided by a flag": (
        BIASED + "if self.renormalise:\n    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-9)\n"
        "return weights, indices",
        "biased_topk_of_any_score",
        "kernel(logits.float(), self.bias, self.top_k, torch.sigmoid, self.renormalise, 1e-09, False)",
    ),
    "groups, another score and no epsilon": (
        GROUPED.replace("logits.sigmoid()", "self.score_fn(logits)").replace("FILL", "0.0")
        + "weights = weights / weights.sum(dim=-1, keepdim=True)\nreturn weights, indices",
        "grouped_topk_of_any_score",
        "self.kept_groups, self.score_fn, True, 0.0, 0.0, False)",
    ),
}
NEAR_MISSES = {
    "a hook on the probabilities": (SOFTMAX + "probs.register_hook(lambda gradient: gradient * 2)\nreturn logits, weights, indices"),
    "groups along another dimension": (
        GROUPED.replace("FILL", "0.0").replace("topk(2, dim=-1)", "topk(2, dim=1)")
        + "return weights, indices"
    ),
    "a module that would be called twice": (
        BIASED.replace("logits.float().sigmoid()", "self.score_fn(logits)")
        + "weights = weights / weights.sum(dim=-1, keepdim=True)\nreturn scores, weights, indices"
    ),
    "a call whose result nobody reads": (SOFTMAX.replace(TOP, "unused = self.score_fn(probs)\n" + TOP) + "return weights, indices"),
    "a call that is a statement": (SOFTMAX.replace(TOP, "self.score_fn(probs)\n" + TOP) + "return weights, indices"),
    "divided along the tokens": (
        LOGITS + "values, indices = logits.topk(self.top_k, dim=-1)\nweights = torch.softmax(values, dim=0)\n"
        "return weights, indices"
    ),
    "the smallest": (SOFTMAX.replace("dim=-1)\n", "dim=-1, largest=False)\n") + "return weights, indices"),
    "softmax in the logits' dtype": SOFTMAX.replace(", dtype=torch.float", "") + "return weights, indices",
    "softmax in the weight's dtype": (FLOAT32.replace("self.weight.float()", "self.weight") + "return weights, indices"),
    "the bias weighs": (
        BIASED.replace("scores.gather", "(scores + self.bias).gather")
        + "weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)\nreturn weights, indices"
    ),
    "other indices": (
        BIASED.replace("scores.gather(1, indices)", "scores.gather(1, indices + 0)")
        + "weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)\nreturn weights, indices"
    ),
    "three of a group": (GROUPED.replace("FILL", "0.0").replace("topk(2,", "topk(1,") + "return weights, indices"),
    "another mask": GROUPED.replace("FILL", "0.0").replace("~mask", "mask") + "return weights, indices",
}  # fmt: skip


TWO_SOFTMAXES = ("probabilities are returned", "softmax, divided by another sum")


def module(body, name="SomeRouter", method="forward"):
    return class_of(name, SETUP, f"{method}(self, x)", body)


sites = partial(sites_of, moe_router)
only = partial(site_of, moe_router)


@pytest.mark.parametrize("name", FORMULAS)
def test_every_formula_is_routed(name):
    body, variant, guard = FORMULAS[name]
    assert_routed(moe_router, module(body), variant, "SomeRouter.forward", guard)


@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_the_guarded_path_is_the_upstream_one(name, dtype, backend):
    set_choice(f"moe_router={backend}")
    text = module(FORMULAS[name][0])
    outcomes = compared(
        text, sites(text), "SomeRouter", [(2, 7, 6)], dtype=dtype, call=lambda router, x: tuple(router(x)),
        # Upstream sums two gradients of one softmax, the guarded path gradients of two softmaxes.
        tolerance=TOLERANCE[dtype] if name in TWO_SOFTMAXES else 0.0,
    )  # fmt: skip
    assert outcomes["moe_router"].backend == backend


def test_logits_that_autocast_makes_narrow_are_left_to_upstream():
    set_choice("moe_router=reference")
    text = module(FORMULAS["logits computed in float32"][0])
    upstream, routed = (executed(text, found)["SomeRouter"]() for found in ([], sites(text)))
    routed.load_state_dict(upstream.state_dict())
    x = torch.randn(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        expected, results = upstream(x), routed(x)
    assert [each.dtype for each in results] == [torch.bfloat16, torch.float32, torch.int64]
    for one, other in zip(expected, results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_counted_and_not_routed(name):
    assert_missed(moe_router, module(NEAR_MISSES[name]))


@pytest.mark.parametrize("name", ["softmax of the largest", "softmax of a cast, by dimension 1"])
def test_where_the_second_dimension_may_not_be_the_last(name):
    set_choice("moe_router=reference")
    text = module(FORMULAS[name][0].replace("x.reshape(-1, 6)", "x"))
    found = only(text)
    assert "if logits.ndim == 2 and (kernel := " in in_lines(spliced(text, [found]))
    assert "ndim" not in spliced(module(FORMULAS[name][0]), [only(module(FORMULAS[name][0]))])
    for shape in ((5, 6), (2, 5, 6)):
        compared(text, [found], "SomeRouter", [shape])


def test_routing_methods_of_other_classes_count():
    text = module(FORMULAS["softmax"][0], "SomeBlock", "route_tokens_to_experts")
    assert (only(text).target, only(text).status) == ("SomeBlock.route_tokens_to_experts", Status.ROUTED)
    assert sites(module(FORMULAS["softmax"][0], "SomeBlock")) == []


@pytest.mark.parametrize("check", ["assert x is not None", "if x is None:\n    raise ValueError"])
def test_a_check_before_the_formula_does_not_break_the_idiom(check):
    site = only(module(f"{check}\n{SOFTMAX}return weights, indices"))
    assert site.status in (Status.ROUTED, Status.MISSED)


def test_a_helpers_own_names_are_none_of_the_method():
    helper = "def score(given):\n    return given.float().sigmoid()\n\n\n"
    body = (
        BIASED.replace("logits.float().sigmoid()", "score(logits)")
        + "weights /= weights.sum(-1, keepdim=True)\n"
    )
    text = module(body + "return weights, indices").replace("class ", helper + "class ", 1)
    found = sites(text)
    model = executed(text, found)["SomeRouter"]()
    model(torch.randn(4, 6))
    assert "given" not in spliced(text, found).replace(helper, "")


def test_a_router_whose_method_finds_the_top_k_counts():
    method = "\n    def choose(self, scores):\n        return torch.topk(scores, 2)\n"
    site = only(module("return self.choose(x)") + method)
    assert (site.target, site.status) == ("SomeRouter.forward", Status.MISSED) and site.reason
    assert not sites(module("return self.other(x)") + method)


def test_a_router_without_top_k_is_no_candidate():
    assert sites(module(LOGITS + "return logits")) == []


def test_digests_do_not_depend_on_names():
    body = FORMULAS["softmax"][0]
    one, other = (
        only(module(body)),
        only(module(body.replace("weights", "w").replace("self.top_k", "self.k"))),
    )
    assert one.form == other.form != only(module(FORMULAS["bias"][0])).form
