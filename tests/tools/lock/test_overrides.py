"""What a lock records about the upstream code that a project's own patches change."""

from __future__ import annotations

import pytest

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.spec import PatchConfig
from veomni_hook.tools.lock import Change, overrides_of
from veomni_hook.tools.lock.changes import (
    FORMULA,
    GONE,
    NEW,
    NOT_OVERRIDDEN,
    PARAMETER,
    RENAMED,
    SIGNATURE,
    TEXT,
    compare,
)

from .conftest import Compare, lock_of

BODY = """
class Layer:
    def __init__(self, size):
        self.size = size

    def forward(self, x, mask=None):
        return self.inner(x, mask)


def helper(x):
    return x
"""


def config(*targets: str, module: str = "m") -> PatchConfig:
    made = PatchConfig(module, label="mine:config")
    for target in targets:
        made.override_method(target, lambda self, x: x)
    return made


def changes(after: Compare, text: str, *targets: str) -> list[Change]:
    return after(text, config(*(targets or ("Layer.forward",))), before=BODY)


def edited(old: str, new: str) -> str:
    assert old in BODY
    return BODY.replace(old, new)


def test_every_verb_names_what_it_stands_on() -> None:
    made = PatchConfig("m", label="mine:config")
    made.replace_class("Layer", int)
    made.modify_init("Layer", lambda init, self: None)
    made.add_method("Layer.extra", lambda self: None)
    made.rewrite("Layer.forward", pattern="self.inner", replacement="x", relies_on={"helper": ["0" * 16]})
    found = overrides_of([made, PatchConfig("another")], Document(BODY, "m"))
    assert [(one.target, one.kind, one.config) for one in found] == [
        ("Layer", "class_replacement", "mine:config"),
        ("Layer.__init__", "init_modification", "mine:config"),
        ("Layer.forward", "rewrite", "mine:config"),
        ("helper", "relies_on", "mine:config"),
    ]


def test_a_pattern_stands_on_every_definition_that_it_applies_to() -> None:
    made = PatchConfig("pkg.*", label="mine:config")
    made.override_method("*.forward", lambda self, x: x)
    found = overrides_of([made], Document(BODY, "pkg.m"))
    assert [one.target for one in found] == ["Layer.forward"]
    assert overrides_of([made], Document(BODY, "other.m")) == ()


def test_the_same_body_is_no_change(after: Compare) -> None:
    assert changes(after, edited("x, mask=None", "x: int, mask: int = None")) == []


def test_another_body_matters(after: Compare) -> None:
    (change,) = changes(after, edited("self.inner(x, mask)", "self.inner(x + 1, mask)"))
    assert (change.result, change.matters, change.kind) == (FORMULA, True, "method_override")
    assert "mine:config" in change.detail
    assert "+    return self.inner(x + 1, mask)\n" in change.diff


@pytest.mark.parametrize(
    "body",
    [
        "        out = self.inner(x, mask)\n        return out\n",
        "        return self.inner(x, mask)  # as ever\n",
    ],
)
def test_another_text_of_the_same_code_is_a_note(after: Compare, body: str) -> None:
    found = changes(after, edited("        return self.inner(x, mask)\n", body))
    assert all((change.result, change.matters) == (TEXT, False) for change in found)
    assert len(found) == ("out" in body)


def test_the_same_formula_on_other_attributes_matters(after: Compare) -> None:
    before = BODY.replace("self.inner(x, mask)", "self.up(x) * self.gate(x)")
    swapped = before.replace("self.up(x) * self.gate(x)", "self.up(x) * self.door(x)")
    (change,) = after(swapped, config("Layer.forward"), before=before)
    assert (change.result, change.matters) == (FORMULA, True)


@pytest.mark.parametrize(
    ("signature", "said"),
    [
        ("x, mask=0", "mask=None is now mask=0"),
        ("x, mask=None, *, extra", "new: extra (keyword only)"),
        ("x, mask", "mask=None is now mask"),
        ("hidden, mask=None", "no x any more; new: hidden"),
        ("x, mask=None, **kwargs", "new: **kwargs"),
    ],
)
def test_another_signature_matters(after: Compare, signature: str, said: str) -> None:
    (change,) = changes(after, edited("x, mask=None", signature))
    assert (change.result, change.matters) == (SIGNATURE, True)
    assert change.detail == f"{said}; mine:config has to follow"


SAID = "from ..utils.deprecation import old\n\n\n"
MASK = '    @old("mask", "6.1.0", new_name="attention")\n    def forward(self, x, attention=None):'


def renamed(*, declared: bool) -> str:
    head = MASK if declared else MASK[MASK.index("    def") :]
    text = edited("    def forward(self, x, mask=None):", head)
    return SAID * declared + text.replace("self.inner(x, mask)", "self.inner(x, attention)")


def test_code_that_replaces_a_function_may_keep_the_old_name_that_upstream_takes(after: Compare) -> None:
    change, parameter = changes(after, renamed(declared=True))
    assert (parameter.kind, parameter.target, parameter.result) == (PARAMETER, "mask", RENAMED)
    assert (change.result, change.matters) == (RENAMED, False)
    assert change.detail == "mask is attention now; the old keyword still works until 6.1"


def test_a_name_that_upstream_does_not_take_matters(after: Compare) -> None:
    change, parameter = changes(after, renamed(declared=False))
    assert (change.result, change.matters) == (RENAMED, True)
    said = "mask is likely attention now; upstream does not take the old keyword; mine:config has to follow"
    assert change.detail == said and not parameter.matters


@pytest.mark.parametrize("verb", ["rewrite", "relies_on"])
def test_code_among_upstreams_own_follows_a_renamed_parameter(after: Compare, verb: str) -> None:
    made = PatchConfig("m", label="mine:config")
    if verb == "rewrite":
        made.rewrite("Layer.forward", pattern="self.inner", replacement="x")
    else:
        made.rewrite("helper", pattern="x", replacement="y", relies_on={"Layer.forward": ["0" * 16]})
    found = after(renamed(declared=True), made, before=BODY)
    assert (verb, RENAMED) in [(one.kind, one.result) for one in found]
    assert not [one for one in found if one.matters]


def test_a_renamed_parameter_of_code_that_changed_is_named_too(after: Compare) -> None:
    text = renamed(declared=True).replace("self.inner(x,", "self.inner(x + 1,")
    change = changes(after, text)[0]
    assert (change.result, change.matters) == (FORMULA, True)
    assert change.detail == "mask is attention now; upstream's code is another; mine:config has to follow"


def test_a_class_has_the_signatures_of_its_methods(after: Compare) -> None:
    made = PatchConfig("m", label="mine:config")
    made.replace_class("Layer", int)
    (change,) = after(edited("(self, size)", "(self, size, bias)"), made, before=BODY)
    assert change.result == SIGNATURE


def test_a_body_that_is_gone_matters(after: Compare) -> None:
    (change,) = changes(after, "")
    assert (change.result, change.matters) == (GONE, True)
    assert change.detail == "there is no Layer.forward; mine:config patches it"


def test_a_renamed_body_is_found(after: Compare) -> None:
    (change,) = changes(after, edited("class Layer", "class MyLayer"))
    assert (change.result, change.matters) == (GONE, True)
    assert "the same code is now MyLayer.forward" in change.detail


def test_patches_that_come_and_go_are_mentioned() -> None:
    old = lock_of({"m": BODY}, config("Layer.forward"))
    new = lock_of({"m": BODY}, config("Layer.__init__"), old=old)
    assert [(c.target, c.result, c.matters) for c in compare(old, new)] == [
        ("Layer.__init__", NEW, False),
        ("Layer.forward", NOT_OVERRIDDEN, False),
    ]


def test_a_site_under_a_projects_patch_is_the_projects() -> None:
    text = "class Norm:\n    def forward(self, x):\n        return self.scale * x\n"
    held = lock_of({"m": text}, config("Norm.forward")).modules["m"]
    assert held.sites == () and [one.target for one in held.overrides] == ["Norm.forward"]


def test_code_without_a_form_goes_by_its_fingerprint(after: Compare) -> None:
    before = BODY.replace("        return", "        while unknown(self):\n            pass\n        return")
    (change,) = after(
        before.replace("self.inner(x,", "self.inner(x + 1,"), config("Layer.forward"), before=before
    )
    assert (change.result, change.matters) == (FORMULA, True)
