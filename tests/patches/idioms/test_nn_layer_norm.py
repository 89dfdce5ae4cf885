"""Calls of torch's own LayerNorm, alone and after an addition: what is routed, and what it computes."""

import textwrap

import pytest
import torch
from torch import nn

from tests.patches.idioms.applied import assert_routed, compared, in_lines, part_changes, sites_of, spliced
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.patches.idioms import add_layer_norm, nn_layer_norm
from veomni_hook.patches.site import Status

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import LayerNorm
"""
LAYER = """

class Layer(nn.Module):
    def __init__(self, size=6, flag=True):
        super().__init__()
        self.norm = {norm}
        self.other = nn.LayerNorm(size)
        self.mlp = nn.Linear(size, size)
        self.flag = flag

    def forward(self, x, h):
"""
CALL = "veomni_nn_layer_norm_rounded_once.call"


@pytest.fixture(autouse=True)
def _by_name():
    set_choice("nn_layer_norm=reference,add_layer_norm=reference")


def module(body, norm="nn.LayerNorm(size)"):
    return HEAD + LAYER.format(norm=norm) + textwrap.indent(body, "        ") + "\n"


def of_forward(text):
    """The sites of calls, without that of ``__init__`` for a norm that nothing calls."""
    return [site for site in sites_of(nn_layer_norm, text) if not site.target.endswith("__init__")]


def every(text):
    return [*sites_of(add_layer_norm, text), *sites_of(nn_layer_norm, text)]


def outcomes_of(text, change=lambda layer: None, dtype=torch.float32):
    def prepared(layer):
        for name, parameter in layer.named_parameters():
            if "norm" in name or "other" in name:
                nn.init.normal_(parameter)
        change(layer)

    return compared(text, every(text), "Layer", [(2, 3, 6)] * 2, change=prepared, dtype=dtype)


#: The body of forward(self, x, h), and what takes the place of the call.
CALLS = {
    "a statement": ("h = self.norm(h)\nreturn h * x", "h = {call}(self, self.norm, h)"),
    "an operand that is computed": ("return self.norm(x * h[:, :1] + 1)", "return {call}(self, self.norm, x * h[:, :1] + 1)"),
    "inside an expression": ("return x + self.mlp(self.norm(h)) * 2", "return x + self.mlp({call}(self, self.norm, h)) * 2"),
    "one in another": ("return self.other(self.norm(h)) * x", "return {call}(self, self.other, {call}(self, self.norm, h)) * x"),
    "in brackets": ("return self.norm((x - h))", "return {call}(self, self.norm, x - h)"),
    "on several lines": ("return self.norm(\n    x  # first\n    * h\n)", "return {call}(self, self.norm, x * h)"),
    "in a branch": ("if self.flag:\n    x = self.norm(x)\nreturn x * h", "x = {call}(self, self.norm, x)"),
    "in a lambda": ("return (lambda y: self.norm(y))(x * h)", "{call}(self, self.norm, y)"),
    "in a comprehension": ("return sum(self.norm(each) for each in (x, h))", "{call}(self, self.norm, each)"),
    "a line that becomes too long": (
        "a_name_of_some_length = self.mlp(x) * self.norm(self.mlp(self.mlp(self.mlp(x) + h)))\n"
        "return a_name_of_some_length",
        "{call}(self, self.norm, self.mlp(self.mlp(self.mlp(x) + h)))",
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_routed_and_computes_the_same(name, dtype):
    body, said = CALLS[name]
    text = module(body)
    (site,) = of_forward(text)
    assert (site.op, site.status, site.variant, site.target) == (
        "nn_layer_norm",
        Status.ROUTED,
        "rounded_once",
        "Layer.forward",
    ), site.reason
    patched = spliced(text, [site])
    assert said.format(call=CALL) in in_lines(patched)
    assert max(map(len, patched.splitlines())) <= 120
    assert outcomes_of(text, dtype=dtype) == {"nn_layer_norm": ("reference", "chosen")}


@pytest.mark.parametrize(
    ("norm", "outcome"),
    [
        ("LayerNorm(size, 1e-3)", "reference"),
        ("torch.nn.LayerNorm((size,), eps=1e-3, bias=False)", "reference"),
        ("nn.LayerNorm(size, elementwise_affine=False)", "reference"),
        ("nn.LayerNorm(size) if flag else nn.Identity()", "reference"),
        ("nn.Identity() if flag else nn.LayerNorm(size)", "eager"),
        ("nn.Identity() if size else nn.LayerNorm(size) if flag else None", "eager"),
    ],
)
def test_every_construction(norm, outcome):
    text = module("return self.norm(h) * x", norm)
    (site,) = of_forward(text)
    assert site.status is Status.ROUTED, site.reason
    assert outcomes_of(text)["nn_layer_norm"][0] == outcome


def test_without_a_choice_torchs_operator_runs():
    set_choice("auto")
    assert outcomes_of(module("return self.norm(h) * x"))["nn_layer_norm"][0] == "eager"


def test_what_inherits_its_init_and_what_is_assigned_twice():
    text = module("return self.norm(h) * x")
    derived = text + "\n\nclass Derived(Layer):\n    def forward(self, x):\n        return self.norm(x)\n"
    assert [site.target for site in of_forward(derived)] == ["Layer.forward", "Derived.forward"]
    twice = text.replace("self.flag = flag", "self.norm = nn.Linear(size, size)\n        self.flag = flag")
    assert outcomes_of(twice)["nn_layer_norm"][1].startswith("the norm is a torch.nn.modules.linear.Linear")


MISSED = {
    "two operands": ("return self.norm(x, h)", "more than one operand"),
    "a keyword": ("return self.norm(input=x) * h", "more than one operand"),
    "an operand and a keyword": ("return self.norm(x, factor=h)", "more than one operand"),
    "a star": ("return self.norm(*[x]) * h", "more than one operand"),
    "another self": ("self = self.mlp\nreturn self.norm(x) * h", "self is not the method's module"),
    "the norm in brackets": ("return (self.norm)(x) * h", "the norm is in brackets"),
}


@pytest.mark.parametrize("name", MISSED)
def test_calls_that_are_missed(name):
    body, reason = MISSED[name]
    (site,) = of_forward(module(body))
    assert site.status is Status.MISSED and reason in site.reason and not site.edits


def test_a_call_that_is_missed_beside_one_that_is_routed():
    text = module("return self.other(x) * self.norm(input=h)")
    (site,) = of_forward(text)
    assert site.status is Status.ROUTED and "more than one operand (line 17)" in site.reason
    assert outcomes_of(text)["nn_layer_norm"] == ("reference", "chosen")


OTHERWISE = {
    "self.norm = nn.Sequential(nn.LayerNorm(size), nn.Identity())": "part of another expression",
    "self.norm = nn.ModuleList([nn.LayerNorm(size)])": "part of another expression",
    "self.norms = NORMS['layer'](size)": "NORMS chooses the norm's class",
    "self.apart = nn.LayerNorm(size)": "Layer does not call self.apart itself",
    "kind = nn.LayerNorm": "part of another expression",
}


@pytest.mark.parametrize("line", OTHERWISE)
def test_uses_that_no_call_shows_are_missed(line):
    text = module("return self.mlp(x)").replace("self.norm = nn.LayerNorm(size)", line)
    text = text.replace("        self.other = nn.LayerNorm(size)\n", "")
    text = text.replace("class Layer", 'NORMS = {"layer": nn.LayerNorm, "none": nn.Identity}\n\nclass Layer')
    (site,) = sites_of(nn_layer_norm, text)
    assert (site.target, site.status) == ("Layer.__init__", Status.MISSED)
    assert OTHERWISE[line] in site.reason and f"line {site.lineno}" in site.reason


@pytest.mark.parametrize(
    "line",
    [
        "self.norm = nn.RMSNorm(size)",
        "self.norm = Own(size)",
        "self.norm: nn.LayerNorm = Own(size)",
        "self.norm = Own(size) if isinstance(flag, nn.LayerNorm) else Own(size)",
    ],
)
def test_no_candidates(line):
    text = module("return self.norm(x)").replace("self.norm = nn.LayerNorm(size)", line)
    text = text.replace("        self.other = nn.LayerNorm(size)\n", "")
    assert every(text.replace("class Layer", "class Own(nn.LayerNorm):\n    pass\n\nclass Layer")) == []


def test_a_name_that_the_file_defines_is_not_torchs():
    text = module("return self.norm(x) * h", "LayerNorm(size)").replace(
        "from torch.nn import LayerNorm", "class LayerNorm(nn.Module):\n    pass"
    )
    assert [site.target for site in sites_of(nn_layer_norm, text)] == [
        "Layer.__init__"
    ]  # for `other`, which nothing calls


#: The body of forward(self, x, h), and the text of the guard.
ADDITIONS = {
    "copied": ("h = x + h\n# Fully connected\nx = h\nh = self.norm(h)\nreturn x + self.mlp(h)", "x, h = kernel(x, h, norm)"),
    "not copied": ("h = x + h\ny = self.norm(h)\nreturn h + self.mlp(y)", "h, y = kernel(x, h, norm)"),
    "the sum is used up": ("h = x + h\nh = self.norm(h)\nreturn self.mlp(h)", "h = kernel(x, h, norm)[1]"),
    "scaled": ("h = x + self.mlp(h) * 0.5\nx = h\nh = self.norm(h)\nreturn x * h", "x, h = kernel(x, self.mlp(h) * 0.5, norm)"),
    "names that are taken": (
        "kernel, norm = 2, 3\nh = x + h\nx = h\nh = self.norm(h)\nreturn x * h * kernel * norm",
        "x, h = veomni_kernel(x, h, veomni_norm)",
    ),
    "a norm before": (
        "r = x\nx = self.other(x)\nx = r + x\nr = x\nx = self.norm(x)\nreturn r + self.mlp(x) * h",
        "r, x = kernel(r, x, norm)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ADDITIONS)
def test_every_addition_is_routed_and_computes_the_same(name, dtype):
    body, said = ADDITIONS[name]
    assert_routed(add_layer_norm, module(body), "rounded_once", "Layer.forward", said)
    outcomes = outcomes_of(module(body), dtype=dtype)
    assert outcomes["add_layer_norm"] == ("reference", "chosen")
    # Only a norm that is not part of the sum asks for itself.
    assert ("nn_layer_norm" in outcomes) == (name == "a norm before")


def test_in_the_else_of_an_addition_the_norm_asks_for_itself():
    set_choice("nn_layer_norm=reference,add_layer_norm=eager")
    text = module(ADDITIONS["copied"][0])
    assert f"    else:\n        h = x + h\n        # Fully connected\n        x = h\n" \
        f"        h = {CALL}(self, self.norm, h)\n    return" in spliced(text, every(text))  # fmt: skip
    assert outcomes_of(text)["nn_layer_norm"] == ("reference", "chosen")


MISSED_ADDITIONS = {
    "in place": ("h += x\nx = h\nh = self.norm(h)\nreturn x * h", "in place"),
    "inside an expression": ("h = x + h\nx = h\nh = self.mlp(self.norm(h))\nreturn x * h", "an expression"),
    "more operands": ("h = x + h\nx = h\nh = self.norm(h, 1)\nreturn x * h", "more than the sum"),
    "numbers": ("h = 1 + 2\nx = h\nh = self.norm(h)\nreturn x * h", "known before the sum"),
    "a norm in the sum": ("h = x + self.other(h)\nx = h\nh = self.norm(h)\nreturn x * h", "calls a norm"),
}


@pytest.mark.parametrize("name", MISSED_ADDITIONS)
def test_additions_that_are_missed(name):
    body, reason = MISSED_ADDITIONS[name]
    (site,) = sites_of(add_layer_norm, module(body))
    assert site.status is Status.MISSED and reason in site.reason, site.reason


@part_changes
@pytest.mark.parametrize("body", [CALLS["a statement"][0], ADDITIONS["copied"][0]], ids=["norm", "addition"])
def test_a_norm_whose_call_matters_is_called(change, reason, body):
    outcomes = outcomes_of(module(body), lambda layer: change(layer, "norm"))
    assert all(backend == "eager" and reason in why for backend, why in outcomes.values()) and outcomes
