"""Layers with low-rank adapters: PEFT's own text, look-alikes with other names, and near misses."""

import importlib.util
from pathlib import Path

import pytest

from tests.patches.idioms.applied import changed, sites_of, spliced
from veomni_hook.patches.idioms import low_rank_linear as idiom
from veomni_hook.patches.site import Status

LAYER = '''
class Adapted:
    def forward(self, x, *args, **kwargs):
        """Docstring."""
        names = kwargs.pop("names", None)
        if self.off:
            result = self.inner(x, *args, **kwargs)
        elif names is not None:
            result = self.mixed(x, names)
        else:
            # The layer itself.
            result = self.inner(x, *args, **kwargs)
            kind = result.dtype
            known = self.first.keys()
            for name in self.active:
                if name not in known:
                    continue
                A = self.first[name]
                B = self.second[name]
                drop = self.drops[name]
                factor = self.factors[name]
                x = self._cast_input_dtype(x, A.weight.dtype)
                if name not in self.kinds:
                    result = result + B(A(drop(x))) * factor
                else:
                    result = self.kinds[name].forward(self, name, x=x, result=result)
            result = result.to(kind)
        return result
'''
#: As in layers of quantised weights: the result is copied, and conversions are left to autocast.
CONVERTING = """
if there_is_one:
    class Adapted:
        def forward(self, x, *args, **kwargs):
            if self.merged:
                result = self.inner(x, *args, **kwargs)
            else:
                result = self.inner(x, *args, **kwargs)
                result = result.clone()
                for name in self.active:
                    if name not in self.first.keys():
                        continue
                    A = self.first[name]
                    B = self.second[name]
                    drop = self.drops[name]
                    factor = self.factors[name]
                    requires_conversion = not torch.is_autocast_enabled()
                    if requires_conversion:
                        expected_dtype = result.dtype
                        x = self._cast_input_dtype(x, A.weight.dtype)
                    if name not in self.kinds:
                        output = B(A(drop(x))) * factor
                        if requires_conversion:
                            output = output.to(expected_dtype)
                        result = result + output
                    else:
                        result = self.kinds[name].forward(self, name, x=x, result=result)
            return result
"""
GUARD = """\
{at}if not (args or kwargs):
{at}    operands = (
{at}        x,
{at}        self.inner,
{at}        [
{at}            (
{at}                self.drops[name],
{at}                self.first[name],
{at}                self.second[name],
{at}                self.factors[name],
{at}                self.kinds.get(name),
{at}            )
{at}            for name in self.active
{at}            if name in self.first
{at}        ],
{at}    )
{at}    if (kernel := veomni_low_rank_linear_product_added.kernel(self, *operands)) is not None:
{at}        return kernel(*operands)
"""


@pytest.mark.parametrize(("text", "deep"), [(LAYER, 3), (CONVERTING, 4)])
def test_the_guard_is_in_front_of_the_layers_call(text, deep):
    (site,) = sites_of(idiom, text)
    assert (site.target, site.status, site.variant) == ("Adapted.forward", Status.ROUTED, "product_added")
    routed = spliced(text, [site])
    guard = GUARD.format(at=" " * 4 * deep)
    assert routed.count(guard) == 1
    rest = "".join(
        line for line in routed.replace(guard, "").splitlines(keepends=True) if "ROUTED" not in line
    )
    assert rest == text
    # The last call of the layer, not that of another branch.
    assert routed.rindex("self.inner(x, ") > routed.index(guard) > routed.index("self.inner(x, ")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("result = result + B", "result = result - B", "result = result - B(A(drop(x))) * factor in place of RESULT = "),
        ("result = result + B", "result = 2 * result + B", "result = 2 * result + B"),
        ("B(A(drop(x))) * factor\n", "B(A(drop(x))) * factor + A.bias\n", "* factor + A.bias in place of"),
        ("kind = result.dtype", "kind = note(result)", "kind = note(result) in place of for NAME in self.ACTIVE:"),
        ("kind = result.dtype", "x = x + 1", "x = x + 1 in place of"),
        ("known = self.first.keys()", "known = self.allowed", "known = self.allowed in place of"),
        ("            known = self.first.keys()\n", "", "if name not in known: in place of"),
        ("if name not in known:", "if name in known:", "if name in known: in place of if NAME not in KEYS:"),
        ("if name not in known:", "if name not in self.second:", "if name not in self.second: in place of"),
        ("x = self._cast_input_dtype(x, A.weight.dtype)", "x = x.half()", "x = x.half() in place of"),
        ("factor = self.factors[name]", "factor = self.factors[name]\n                note(x)", "note(x) in place of"),
        ("A = self.first[name]", "A = self.other[name]", "in place of"),
        ("if name not in self.kinds:", "if name in self.kinds:", "in place of if NAME not in self.VARIANTS:"),
        ("result = result.to(kind)", "result = result * 2", "result = result * 2 in place of"),
        ("        return result\n", "        return result * 2\n", "its result is not what it returns"),
        ("        return result\n", "        result += 1\n        return result\n", "its result is not what it returns"),
        ("for name in self.active:", "for name in names:", "for name in names: in place of for NAME in self.ACTIVE:"),
        ("drop = self.drops[name]", "drop = self.drops", "drop = self.drops in place of"),
        ("def forward(self, x,", "def forward(self, y, x,", "its arguments are not self and one input"),
        ("forward(self, x, *args, **kwargs):", "forward(self, x, **kwargs):", "the layer does not get the other arguments"),
        ("            result = self.inner(x, *args, **kwargs)\n            kind", "            kind", "in place of RESULT = self.BASE"),
    ],
)  # fmt: skip
def test_other_code_is_a_miss_with_a_reason(old, new, reason):
    (site,) = sites_of(idiom, changed(LAYER, (old, new)))
    assert site.status is Status.MISSED and reason in site.reason
    assert not site.edits


@pytest.mark.parametrize(
    ("old", "new"),
    [("B(A(drop(x))) * factor", "B(A(x)) * factor"), ("B(A(drop(x))) * factor", "factor * other(x)")],
)
def test_other_sums_are_no_candidates(old, new):
    assert sites_of(idiom, LAYER.replace(old, new)) == []


@pytest.mark.parametrize(
    ("module", "targets"),
    [
        ("peft.tuners.lora.layer", ["Linear.forward", "_ConvNd.forward"]),
        ("peft.tuners.lora.bnb", ["Linear8bitLt.forward", "Linear4bit.forward"]),
    ],
)
def test_the_installed_peft_is_routed(module, targets):
    pytest.importorskip("peft")
    text = (
        Path(importlib.util.find_spec("peft").submodule_search_locations[0])
        .parent.joinpath(*module.split("."))
        .with_suffix(".py")
        .read_text("utf-8")
    )
    found = sites_of(idiom, text)
    assert [site.target for site in found] == targets
    assert all(site.status is Status.ROUTED for site in found)
