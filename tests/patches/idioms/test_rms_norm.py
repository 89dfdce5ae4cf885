import textwrap
from functools import partial

import pytest
import torch

from tests.kernels.matching import TOLERANCE
from tests.patches.idioms.applied import changed, compared, site_of, sites_of, spliced
from tests.patches.idioms.norm_lookalikes import FORMULAS, HEAD, HELPER, NEAR, NORM_METHOD, near, norm
from veomni_hook.kernels.rms_norm.variants import OP
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.patches.idioms import rms_norm
from veomni_hook.patches.site import Status

CASES = [(variant, number) for variant, spellings in FORMULAS.items() for number in range(len(spellings))]
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]


only = partial(site_of, rms_norm)


def module(variant, number):
    return norm(FORMULAS[variant][number], HELPER)


def bits(text, dtypes, *options):
    """What is computed, and what slots said; inputs of the first dtype, parameters of the second."""
    gated = "gate" in text.split("def forward")[1][:40] and "no gate" not in options
    inputs = [(torch.randn(2, 3, 8) * 3).to(dtypes[0]) for _ in range(1 + gated)]
    arguments = (8, 1e-5, *(each for each in options if each != "no gate"))
    # Parts of gradients are summed in another order.
    tolerance = max(TOLERANCE[dtype] for dtype in dtypes)
    return compared(
        text, [only(text)], "SomeRMSNorm", inputs, arguments=arguments, dtype=dtypes[1], cast=False, tolerance=tolerance
    )  # fmt: skip


@pytest.mark.parametrize(("variant", "number"), CASES)
def test_every_formula_is_routed(variant, number):
    site = only(module(variant, number))
    assert (site.op, site.status, site.variant, site.target) == (
        "rms_norm", Status.ROUTED, variant, "SomeRMSNorm.forward"
    ), site.reason  # fmt: skip
    assert [slot.name for slot in site.slots] == [f"veomni_rms_norm_{name}" for name in variant.split("|")]
    assert site.captures["eps"] in ("self.eps", "self.variance_epsilon")


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize(("variant", "number"), CASES)
def test_the_reference_has_upstreams_bits(variant, number, dtypes):
    set_choice("rms_norm=reference")
    first, _, second = variant.partition("|")
    # The group's size and whether a weight is there decide which formula of a variant runs.
    ways = {"": [(4, True)], "unweighted": [(4, True), (4, False)]}.get(second, [(None, True), (4, True)])
    for taken, options in zip(filter(None, (first, second)), ways, strict=True):
        outcomes = bits(module(variant, number), dtypes, *options)
        assert {name: outcome.backend for name, outcome in outcomes.items()} == {
            taken if second else "rms_norm": "reference"
        }


@pytest.mark.parametrize("variant", ["gate_before_norm", "gate_before_norm_grouped"])
def test_without_a_gate(variant):
    set_choice("rms_norm=reference")
    bits(module(variant, 0), DTYPES[1], "no gate")


def test_every_variant_has_a_lookalike():
    assert {name for variant in FORMULAS for name in variant.split("|")} == set(OP.variants)


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_are_missed(name):
    ending, reason = NEAR[name]
    site = only(near(ending))
    assert site.status is Status.MISSED
    assert site.reason.startswith(reason), site.reason
    assert "expected" in site.reason and "(line " in site.reason
    assert not site.edits and not site.slots and site.form


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("h.pow(2).mean(-1, keepdim=True)", "(h - h.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True)"),
        ("h.pow(2)", "h.pow(3)"),
        ("mean(-1, keepdim=True)", "mean(-2, keepdim=True)"),
        ("mean(-1, keepdim=True)", "sum(-1, keepdim=True)"),
        ("h * torch.rsqrt", "h / torch.rsqrt"),
        ("h * torch.rsqrt", "kind * torch.rsqrt"),
        ("+ self.variance_epsilon", "- self.variance_epsilon"),
        ("+ self.variance_epsilon", "+ h"),
        ("+ self.variance_epsilon", ".clamp(min=self.variance_epsilon)"),
        ("self.weight * h.to(kind)", "self.weight[None] * h.to(kind)"),
        ("h = h.to(torch.float32)", "h = h.to(torch.float64)"),
        ("h = h.to(torch.float32)", "h *= 1"),
        ("h = h.to(torch.float32)", "self.seen = h = h.to(torch.float32)"),
    ],
)
def test_a_changed_formula_is_missed(old, new):
    text = norm(FORMULAS["cast_before_weight"][0])
    site = only(changed(text, (old, new)))
    assert site.status is Status.MISSED
    assert site.reason


def test_a_weight_is_not_one_plus_weight():
    plain, shifted = only(module("weight_before_cast", 1)), only(module("one_plus_weight", 0))
    assert (plain.variant, shifted.variant) == ("weight_before_cast", "one_plus_weight")
    assert plain.form != shifted.form


def test_where_one_way_is_unknown_nothing_is_routed():
    text = module("weight_before_cast|unweighted", 0).replace(
        "return out.type_as(v)", "else:\n            out = out + 1\n        return out.type_as(v)"
    )
    assert only(text).status is Status.MISSED


def test_what_else_the_body_does_would_be_left_out():
    for variant in ("cast_before_weight", "weight_before_cast|unweighted"):
        text = module(variant, 0)
        place = "out = self._norm" if "|" in variant else "kind = h.dtype"
        assert only(text.replace(place, f"self.count(1); {place}")).status is Status.MISSED


def test_a_test_that_is_computed_is_no_test_for_a_guard():
    text = module("weight_before_cast|unweighted", 0).replace("if self.scaled", "if v.sum() > 0")
    site = only(text)
    assert site.status is Status.MISSED
    assert "test" in site.reason


def test_one_attribute_is_no_two_operands():
    site = only(near("return self.eps * h.to(kind)"))
    assert (site.status, site.edits) == (Status.MISSED, ())
    assert site.reason == "nearest is cast_before_weight: one value is used for two operands"


def test_the_guard_as_text():
    text = module("cast_before_weight", 0)
    assert textwrap.dedent(
        """
        def forward(self, h):
            # [ROUTED] rms_norm/cast_before_weight
            operands = (h, self.weight, self.variance_epsilon)
            if (kernel := veomni_rms_norm_cast_before_weight.kernel(self, *operands)) is not None:
                return kernel(*operands)
            kind = h.dtype
        """
    ).strip() in textwrap.dedent(spliced(text, [only(text)]).split("self.activation = ")[1].split("\n", 1)[1])


def test_the_guard_stands_after_checks_and_takes_a_free_name():
    text = module("cast_before_weight", 2).replace("power", "kernel")
    body = spliced(text, [only(text)])
    assert (
        body.index("raise ValueError")
        < body.index("if (veomni_kernel :=")
        < body.index("kernel = torch.mean")
    )


def test_a_kernel_decides_by_all_that_it_computes_with_each_looked_up_once():
    text = module("cast_before_weight_gated", 1)
    body = spliced(text, [only(text)]).partition("[ROUTED]")[2]
    guard = body.partition("return ")[0]
    assert "gate, self.weight, self.eps, ACT2FN[self.activation])" in guard
    assert guard.count("ACT2FN") == 1


def test_operands_are_looked_up_only_where_the_tests_hold():
    text = module("weight_before_cast|unweighted", 0)
    lines = [line.strip() for line in spliced(text, [only(text)]).partition("[ROUTED]")[2].splitlines()]
    assert lines.index("if self.scaled:") < next(
        number for number, line in enumerate(lines) if line.startswith("operands = (")
    )
    assert "if not self.scaled:" in lines


def test_what_a_route_relies_on():
    assert only(module("one_plus_weight", 0)).relies_on == ("SomeRMSNorm._norm",)
    assert only(module("cast_before_weight", 3)).relies_on == ("_rms",)


def test_a_helper_that_a_class_of_the_file_overrides():
    text = (
        module("one_plus_weight", 0)
        + "class Other(SomeRMSNorm):\n    def _norm(self, v):\n        return v\n"
    )
    assert only(text).status is Status.MISSED


def test_an_inherited_forward_counts_with_its_parent():
    text = module("cast_before_weight", 0) + "class OtherRMSNorm(SomeRMSNorm):\n    pass\n"
    assert [site.target for site in sites_of(rms_norm, text)] == ["SomeRMSNorm.forward"]


@pytest.mark.parametrize(
    ("forward", "count"),
    [
        (FORMULAS["cast_before_weight"][0], 1),
        (FORMULAS["cast_to_weight"][0], 1),
        (NORM_METHOD + "\ndef forward(self, v):\n    return self._norm(v) * 2\n", 1),
        (
            "def forward(self, v):\n    m = v.mean(-1, keepdim=True)\n    p = (v - m).pow(2).mean(-1, keepdim=True)\n    return (v - m) * torch.rsqrt(p)\n",
            0,
        ),
        ("def forward(self, v):\n    return torch.rsqrt(v.pow(2).mean() - self.eps * v.mean())\n", 0),
        ("def forward(self, v):\n    return v.mean(-1)\n", 0),
        ("def forward(self, v):\n    return v.pow(2)\n", 0),
        ("def other(self, v):\n    return v * v.pow(2).mean()\n", 0),
    ],
)
def test_candidates_by_structure(forward, count):
    assert len(sites_of(rms_norm, norm(forward).replace("SomeRMSNorm", "Scale"))) == count


def test_candidates_by_name():
    assert (
        only(HEAD + "class GatedRMSNorm:\n    def forward(self, x):\n        return self.norm(x)\n").status
        is Status.MISSED
    )
    assert not sites_of(rms_norm, HEAD + "class RMSNorm(Base):\n    pass\n")
    assert not sites_of(rms_norm, HEAD + "class LayerNorm:\n    def forward(self, x):\n        return x\n")


def test_a_form_that_is_not_known_says_why():
    site = only(HEAD + "class RMSNorm:\n    def forward(self, x):\n        while x:\n            pass\n")
    assert site.status is Status.MISSED
    line = HEAD.count("\n") + 3
    assert site.reason == f"While is not followed (line {line})"
