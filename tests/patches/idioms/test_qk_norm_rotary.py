"""Attention whose norms and rotation go to one kernel: what is routed, what is not, how the guard behaves."""

import importlib.util
import textwrap
from pathlib import Path

import pytest
import torch

from tests.patches.idioms.applied import compared, executed, in_lines, sites_of, spliced
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.engine import Origin, patch_source
from veomni_hook.patches.idioms import qk_norm_rotary
from veomni_hook.patches.idioms.recognise import idioms, recognise
from veomni_hook.patches.site import Status

SLOT = "veomni_qk_norm_rotary_weight_before_cast_half_split"
HEAD = """
import torch
from torch import nn


class Scale(nn.Module):
    def __init__(self, size, small):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(size) + 0.5)
        self.small = small

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.small)
        return (self.gain * wide).to(x.dtype)

class Other(nn.Module):
    def __init__(self, size, small):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(size) + 0.5)
        self.small = small

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.small)
        return self.gain * wide.to(x.dtype)


def turned(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)

def apply_rope(a, b, c, s, unsqueeze_dim=1):
    c, s = c.unsqueeze(unsqueeze_dim), s.unsqueeze(unsqueeze_dim)
    return a * c + turned(a) * s, b * c + turned(b) * s

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 16), nn.Linear(6, 8)
        self.first = Scale(8, 0.3)
        self.second = Scale(8, 0.2)
        self.other = Other(8, 0.2)
        self.flag = True

    def forward(self, x, tables, extra=None):
        shape = (*x.shape[:-1], -1, 8)
"""
Q = "a = self.first(self.left(x).view(shape)).transpose(1, 2)\n"
K = "b = self.second(self.right(x).view(shape)).transpose(1, 2)\n"
TURN = "a, b = apply_rope(a, b, c, s)\n"
END = "return a.sum(1) + b.sum(1)"
# The body of forward after `shape`, and the first line and the call of the guard.
ASKS = f"{SLOT}.kernel(self, x, self.first, self.second, Scale, apply_rope, tables)) is not None:"
CALL = "kernel(a, b, self.first.gain, self.second.gain, self.first.small, self.second.small, c, s)\n"
FORMS = {
    "norm, then transposed": (f"{Q}{K}c, s = tables\n{TURN}{END}", f"a, b = {CALL}"),
    "transposed, then norm": (
        "a = self.left(x).view(shape).transpose(1, 2)\nb = self.right(x).view(shape).transpose(1, 2)\n"
        f"a = self.first(a)\nb = self.second(b)\nc, s = tables\n{TURN}{END}",
        f"c, s = tables\n        a, b = {CALL}",
    ),
    "transposed in between": (
        "a, b = self.left(x).view(shape), self.right(x).view(shape)\nb = self.second(b)\na = self.first(a)\n"
        f"c, s = tables\nb = b.transpose(1, 2)\na = a.transpose(1, 2)\n{TURN}{END}",
        f"a, b = {CALL}",
    ),
    "keywords and new names": (
        f"{Q}{K}value = self.right(x)\nc, s = tables\nl, r = apply_rope(s=s, c=c, b=b, a=a, unsqueeze_dim=1)\n"
        "return l.sum(1) + r.sum(1) + value",
        f"l, r = {CALL}",
    ),
    "under a flag": (
        "a, b = self.left(x).view(shape).transpose(1, 2), self.right(x).view(shape).transpose(1, 2)\n"
        f"if self.flag:\n    a = self.first(a)  # why\n    b = self.second(b)\nc, s = tables\n{TURN}{END}",
        "if self.flag and (kernel := ",
    ),
    "turned under a test": (
        f"{Q}{K}c, s = tables\nif extra is None or self.flag:\n    {TURN}{END}",
        "(extra is None or self.flag) and (kernel := ",
    ),
    "one norm": (f"{Q}{K.replace('second', 'first')}c, s = tables\n{TURN}{END}", "self.first, self.first, Scale"),
    "tables made in the run": (f"{Q}{K}c, s = torch.stack(tuple(tables))\n{TURN}{END}", "apply_rope, None)"),
    "in a block": (f"with torch.no_grad():\n    {Q}    {K}    c, s = tables\n    {TURN}{END}", CALL),
}  # fmt: skip
MISSES = {
    "heads elsewhere": (f"{Q}{K}c, s = tables\na, b = apply_rope(a, b, c, s, 2)\n{END}", "heads before positions"),
    "used in between": (f"{Q}{K}c, s = tables\nextra = a + 1\n{TURN}{END}", "joined or changed"),
    "scaled in between": (f"{Q}a = a * 2\n{K}c, s = tables\n{TURN}{END}", "joined or changed"),
    "scaled norm": (f"{Q.strip()} * 2\n{K}c, s = tables\n{TURN}{END}", "joined or changed"),
    "other dimensions": (f"{Q.replace('(1, 2)', '(1, 3)')}{K}c, s = tables\n{TURN}{END}", "joined or changed"),
    "norm of all heads": (
        f"a = self.first(self.left(x).view(shape)).view(shape).transpose(1, 2)\n{K}c, s = tables\n{TURN}{END}",
        "joined or changed",
    ),
    "used afterwards": (f"{Q}{K}c, s = tables\nl, r = apply_rope(a, b, c, s)\nreturn l.sum(1) + r.sum(1) + a.sum(1)", "used again"),
    "changed in place": (f"{Q}{K}c, s = tables\nextra = x.mul_(2)\n{TURN}{END}", "does more than assign"),
    "stored into": (f"{Q}{K}c, s = tables\nx[0] = 1\n{TURN}{END}", "does more than assign"),
    "a loop": (f"{Q}{K}for c, s in [tables]:\n    pass\n{TURN}{END}", "does more than assign"),
    "a test that is made later": (f"{Q}{K}c, s = tables\nextra = x.sum() > 0\nif extra:\n    {TURN}{END}", "evaluated before"),
    "a test that computes": (f"{Q}{K}c, s = tables\nif x.sum() > 0:\n    {TURN}{END}", "evaluated before"),
    "an alternative": (
        f"if self.flag:\n    {Q}else:\n    a = self.left(x).view(shape).transpose(1, 2)\n{K}c, s = tables\n"
        f"{TURN}{END}",
        "joined or changed",
    ),
    "two statements in a line": (f"{Q.strip()}; {K}c, s = tables\n{TURN}{END}", "its own line"),
    "two classes": (f"{Q}{K.replace('second', 'other')}c, s = tables\n{TURN}{END}", "not share one class"),
    "tables that are computed": (f"{Q}{K}c, s = tables\na, b = apply_rope(a, b, torch.cos(c), s)\n{END}", "more than plain names"),
    "another rotation": (f"{Q}{K}c, s = tables\na, b = apply_rope_of_another_kind(a, b, c, s)\n{END}", "is not one of"),
}  # fmt: skip
NO_CANDIDATES = {
    "one of the two": Q
    + K.replace("second", "right").replace(".view(shape)", "")
    + f"c, s = tables\n{TURN}{END}",
    "turned first": (
        "a, b = self.left(x).view(shape).transpose(1, 2), self.right(x).view(shape).transpose(1, 2)\n"
        f"c, s = tables\nl, r = apply_rope(a, b, c, s)\na = self.first(l)\nb = self.second(r)\n{END}"
    ),
    "no rotation": f"{Q}{K}{END}",
}


def module(body):
    return HEAD + textwrap.indent(body, " " * 8) + "\n"


@pytest.mark.parametrize("form", FORMS)
def test_forms_are_routed(form):
    body, said = FORMS[form]
    (site,) = sites_of(qk_norm_rotary, module(body))
    assert (site.status, site.target, site.reason) == (Status.ROUTED, "Attention.forward", "")
    assert site.variant == "weight_before_cast_half_split"
    assert {"Scale.forward", "apply_rope"} <= {*site.relies_on}
    text = spliced(module(body), [site])
    assert said in text or said.strip() in in_lines(text)
    assert "[ROUTED] qk_norm_rotary/weight_before_cast_half_split" in text
    if form == "norm, then transposed":
        assert ASKS in in_lines(text)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flag", [True, False])
def test_the_guard_computes_what_upstream_does(form, flag):
    """Alone, and with the routes of norms and rotary functions in the same text."""
    source = module(FORMS[form][0])
    alone = sites_of(qk_norm_rotary, source)
    set_choice("reference")
    tables = tuple(torch.randn(2, 1, 3, 8))
    for sites, others in ((alone, 0), (recognise(Document(source, "lookalike")), 2)):
        assert len({site.op for site in sites}) == 1 + others
        outcomes = compared(
            source, sites, "Attention", [(2, 3, 6)],
            change=lambda attention: setattr(attention, "flag", flag),
            call=lambda attention, x: attention(x, tables),
        )  # fmt: skip
        outcome = outcomes.get("qk_norm_rotary") or outcomes.get("weight_before_cast_half_split")
        taken = flag or form != "under a flag"
        assert (outcome.backend if outcome else None) == ("reference" if taken else None)


def test_a_hook_on_a_norm_brings_upstreams_code_back():
    made = executed(
        module(FORMS["norm, then transposed"][0]),
        sites_of(qk_norm_rotary, module(FORMS["norm, then transposed"][0])),
    )
    attention, calls = made["Attention"](), []
    set_choice("reference")
    given = torch.randn(2, 3, 6), tuple(torch.randn(2, 1, 3, 8))
    attention(*given)
    assert made[SLOT].outcome(attention).backend == "reference"
    attention.second.register_forward_hook(lambda *_: calls.append(1))
    attention(*given)
    assert calls == [1] and "hooks" in made[SLOT].outcome(attention).reason


@pytest.mark.parametrize("form", MISSES)
def test_near_misses_say_why(form):
    body, reason = MISSES[form]
    (site,) = sites_of(qk_norm_rotary, module(body))
    assert site.status is Status.MISSED and reason in site.reason and not site.edits


@pytest.mark.parametrize("form", NO_CANDIDATES)
def test_no_candidates(form):
    assert not sites_of(qk_norm_rotary, module(NO_CANDIDATES[form]))


def test_a_file_without_rotary_functions_costs_one_search():
    source = "class A:\n    def forward(self, x):\n        return self.norm(x)\n"
    assert qk_norm_rotary not in idioms(source)
    assert qk_norm_rotary in idioms(module(FORMS["norm, then transposed"][0]))


@pytest.mark.parametrize("weight", ["self.gain.to(x.device)", "self.parts[0]"])
def test_operands_that_are_no_attributes(weight):
    (site,) = sites_of(
        qk_norm_rotary,
        module(FORMS["norm, then transposed"][0]).replace("(self.gain * wide)", f"({weight} * wide)"),
    )
    assert site.status is Status.MISSED


def test_qwen3():
    upstream = importlib.util.find_spec("transformers.models.qwen3.modeling_qwen3")
    source = Path(upstream.origin).read_text(encoding="utf-8")
    (site,) = sites_of(qk_norm_rotary, source)
    assert (site.target, site.variant) == ("Qwen3Attention.forward", "cast_before_weight_half_split")
    assert site.captures == {
        "q_norm": "self.q_norm",
        "k_norm": "self.k_norm",
        "rotary": "apply_rotary_pos_emb",
    }
    origin = Origin(upstream.name, upstream.origin, "transformers", "0")
    patched = patch_source(source, [], origin, idioms=True)
    text = in_lines(patched.text)
    assert "kernel(query_states, key_states, self.q_norm.weight, self.k_norm.weight," in text
    # The rotation's own slot stays in the code that runs without the kernel.
    rest = text.partition("kernel(query_states, key_states, self.q_norm.weight")[2]
    assert rest.index("else:") < rest.index("veomni_rotary_half_split.at(self, apply_rotary_pos_emb)")
    assert {step.op for step in patched.report.applied if step.target == site.target} == {"rotary", site.op}
