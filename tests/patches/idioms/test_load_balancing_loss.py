import ast
import inspect
import textwrap
from functools import partial

import pytest
import torch

from tests.patches.idioms.applied import changed, compared, executed, sites_of, spliced
from veomni_hook.kernels.load_balancing_loss import reference, spellings
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.patches.idioms import load_balancing_loss
from veomni_hook.patches.idioms.load_balancing_loss import Case
from veomni_hook.patches.site import Status

HEAD = "import torch\nfrom torch.nn import functional\nLogits = object\n"
MODEL = """
class SomeForCausalLM(torch.nn.Module):
    def forward(self, logits, mask=None):
        loss = load_balancing_loss_func(logits, 5, 2, mask)
        return loss
"""
NAME = "def load_balancing_loss_func("


VARIANTS = {
    "softmax_topk_in_dtype": "softmax_topk_in_dtype",
    "by_bincount": "softmax_topk",
    "by_histc": "softmax_topk",
}


def loss(name):
    function = getattr(spellings, name, None) or getattr(reference, name)
    return inspect.getsource(function).replace(f"def {name}(", NAME)


def module(name, model=MODEL):
    return HEAD + loss(name) + model


sites = partial(sites_of, load_balancing_loss)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_function_counts_and_its_call_is_routed(name):
    function, call = sites(module(name))
    assert (function.target, function.status, function.counted) == (
        "load_balancing_loss_func",
        Status.ROUTED,
        True,
    ), function.reason
    assert (call.target, call.status, call.counted, call.variant) == (
        "SomeForCausalLM.forward",
        Status.ROUTED,
        False,
        VARIANTS[name],
    )
    text = spliced(module(name), [function, call])
    assert (
        f"loss = veomni_load_balancing_loss_{VARIANTS[name]}.at(self, load_balancing_loss_func)(logits, 5, 2, mask)"
        in text
    )
    assert loss(name) in text


PADDED = torch.ones(2, 9, dtype=torch.int64)
PADDED[0, 6:] = 0


@pytest.mark.parametrize("mask", [None, PADDED], ids=["none", "padding"])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_routed_call_is_the_upstream_one(name, mask):
    set_choice("load_balancing_loss=reference")
    text = module(name)
    outcomes = compared(
        text, sites(text), "SomeForCausalLM", [(18, 5)] * 3, call=lambda model, *given: model(given, mask), every=1e-6
    )  # fmt: skip
    assert outcomes["load_balancing_loss"].backend == "reference"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("def load_balancing_loss_func(", "@torch.no_grad()\ndef load_balancing_loss_func(", "it is decorated with torch.no_grad()"),
        (
            "class SomeForCausalLM",
            "load_balancing_loss_func = torch.no_grad()(load_balancing_loss_func)\nclass SomeForCausalLM",
            "not the only definition",
        ),
        ("class SomeForCausalLM", "def load_balancing_loss_func(*_): return 0\nclass SomeForCausalLM", "not the only definition"),
    ],
    ids=["decorated", "bound again", "defined again"],
)  # fmt: skip
def test_what_is_called_is_not_the_function_that_was_read(old, new, reason):
    text = module(next(iter(VARIANTS)))
    assert text.count(old) == 1
    (missed,) = (site for site in sites(text.replace(old, new)) if site.counted)
    assert (missed.status, missed.edits) == (Status.MISSED, ())
    assert reason in missed.reason


@pytest.mark.parametrize("nothing", [None, [torch.randn(18, 5)]], ids=["none", "a list"])
def test_zero_without_a_tuple(nothing):
    set_choice("load_balancing_loss=reference")
    text = module("by_histc")
    assert executed(text, sites(text))["SomeForCausalLM"]()(nothing) == 0


# The replaced text, its replacement, and the spelling.
MUTANTS = [
    ("softmax_topk_in_dtype", "dim=-1)", "dim=0)"),
    ("softmax_topk_in_dtype", "chosen.float().mean(dim=0)", "chosen.float().mean(dim=1)"),
    ("softmax_topk_in_dtype", "mask.sum(dim=0)", "chosen.sum(dim=0)"),
    ("softmax_topk_in_dtype", "* num_experts\n", "* top_k\n"),
    ("softmax_topk_in_dtype", "return 0\n", "return 1\n"),
    ("softmax_topk_in_dtype", "if gate_logits is None or not", "if gate_logits is None:\n        return 1\n    if not"),
    ("softmax_topk_in_dtype", "shares * means", "shares + means"),
    ("softmax_topk_in_dtype", "not isinstance(gate_logits, tuple)", "isinstance(gate_logits, tuple)"),
    ("softmax_topk_in_dtype", "if attention_mask is None:", "if attention_mask is not None:"),
    ("softmax_topk_in_dtype", "for layer in gate_logits]", "for layer in gate_logits[1:]]"),
    ("by_bincount", "counts / rows", "counts / top_k"),
    ("by_bincount", "rows = rows + mask.sum()", "rows = mask.sum()"),
    ("by_bincount", "probabilities.float().sum(dim=0)", "probabilities.sum(dim=0)"),
    ("by_bincount", "mask.repeat_interleave(top_k)", "mask.repeat(top_k)"),
    ("by_histc", "max=num_experts)", "max=top_k)"),
    ("by_histc", '("cpu", "mps")', '("cpu",)'),
    ("by_histc", "rows = rows + probabilities.shape[0]", "rows = rows + probabilities.shape[1]"),
    ("by_histc", "counts = counts + torch.histc", "counts = counts - torch.histc"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new"), MUTANTS)
def test_another_formula_is_missed(name, old, new):
    text = HEAD + changed(loss(name), (old, new)) + MODEL
    (site,) = sites(text)
    assert (site.status, site.edits, site.counted) == (Status.MISSED, (), True)
    assert site.reason


def test_names_and_defaults_are_those_of_the_function():
    text = loss("by_histc")
    for old, new in (
        ("gate_logits", "router_logits"),
        ("num_experts", "count"),
        ("layer", "each"),
        ("top_k", "k"),
    ):
        text = text.replace(old, new)
    call = sites(HEAD + text + MODEL)[1]
    (slot,) = call.slots
    assert slot.parameters == (
        "router_logits->gate_logits, count->num_experts, k->top_k=2, attention_mask=None"
    )


def test_a_call_without_a_module_is_unbound():
    function, call = sites(
        module("by_histc", "\ndef helper(logits):\n    return load_balancing_loss_func(logits, 5)\n")
    )
    assert (function.status, call.status, call.counted) == (Status.UNBOUND, Status.UNBOUND, False)
    assert call.reason and not call.edits


def test_a_function_of_another_file_is_named():
    (found,) = sites(f"{HEAD}from .parts import load_balancing_loss_func\n{MODEL}")
    assert (found.status, found.counted) == (Status.UNBOUND, False)
    assert found.reason == "it is defined in .parts, and its calls here are not followed"


def test_a_function_that_nothing_calls():
    (site,) = sites(module("by_histc", ""))
    assert (site.status, site.reason) == (Status.ROUTED, "nothing calls it")


def test_digests_tell_formulas_not_names():
    one, other = sites(module("by_histc"))[0], sites(module("by_bincount"))[0]
    renamed = sites(HEAD + loss("by_histc").replace("counts", "numbers") + MODEL)[0]
    assert one.form == renamed.form != other.form


# What is left of a function where some tests are decided

FACTS = {"x is None": False, "isinstance(x, tuple)": True}


def left(text):
    made = Case(FACTS).block(ast.parse(textwrap.dedent(text)).body)
    return "\n".join(ast.unparse(ast.fix_missing_locations(each)) for each in made)


@pytest.mark.parametrize(
    ("test", "outcome"),
    [
        ("x is None", False),
        ("x is not None", True),
        ("not x is None", True),
        ("x is None or not isinstance(x, tuple)", False),
        ("x is not None and isinstance(x, tuple)", True),
        ("y and x is None", False),
        ("y or x is not None", True),
    ],
)
def test_decided_tests_are_gone(test, outcome):
    assert left(f"if {test}:\n    a = 1\nelse:\n    a = 2") == ("a = 1" if outcome else "a = 2")


@pytest.mark.parametrize(
    "test", ["y", "y is None", "y and x is not None", "y or x is None", "isinstance(y, tuple)"]
)
def test_other_tests_stay(test):
    assert left(f"if {test}:\n    a = 1") == f"if {test}:\n    a = 1"


def test_inside_of_blocks():
    assert (
        left("for i in y:\n    if x is None:\n        a = 1\n    else:\n        a = i")
        == "for i in y:\n    a = i"
    )


def test_lists_become_loops():
    code = left("a = f([g(i) for i in y], 2)")
    assert code == (
        "veomni_list_1 = ()\nfor i in y:\n    veomni_list_1 = veomni_list_1 + (g(i),)\na = f(veomni_list_1, 2)"
    )


@pytest.mark.parametrize("text", ["a = [i for i in y if i]", "a = [i for j in y for i in j]"])
def test_other_comprehensions_stay(text):
    assert left(text) == text


def test_additions_to_a_new_tensor():
    assert left("a = torch.zeros(3).scatter_add_(0, i, x)") == "a = torch.zeros(3).scatter_add(0, i, x)"
    assert left("a = b.scatter_add_(0, i, x)") == "a = b.scatter_add_(0, i, x)"
