"""What a lock records about the upstream code that a project's own patches change."""

from __future__ import annotations

import pytest

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.spec import PatchConfig
from veomni_hook.tools.lock import overrides_of
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


SAID = "from ..utils.deprecation import old\n\n\n"
MASK = '    @old("mask", "6.1.0", new_name="attention")\n    def forward(self, x, attention=None):'


def renamed(*, declared: bool) -> str:
    head = MASK if declared else MASK[MASK.index("    def") :]
    text = edited("    def forward(self, x, mask=None):", head)
    return SAID * declared + text.replace("self.inner(x, mask)", "self.inner(x, attention)")


RETURN = "        return self.inner(x, mask)\n"
GATED = BODY.replace("self.inner(x, mask)", "self.up(x) * self.gate(x)")
#: Nothing says what this computes, so its fingerprint decides.
LOOP = BODY.replace("        return", "        while unknown(self):\n            pass\n        return")
ANOTHER = "upstream's code is another"
KEPT = "mask is attention now; the old keyword still works until 6.1"
LIKELY = "mask is likely attention now; upstream does not take the old keyword"


# What `Layer.forward` is afterwards, and before; the result, whether it matters, and its sentence.
@pytest.mark.parametrize(
    ("text", "before", "result", "matters", "detail"),
    [
        (edited("x, mask=None", "x: int, mask: int = None"), BODY, "", False, ""),
        (edited(RETURN, "        return self.inner(x, mask)  # as ever\n"), BODY, "", False, ""),
        (edited(RETURN, "        out = self.inner(x, mask)\n        return out\n"), BODY, TEXT, False, "upstream computes the same"),
        (edited("self.inner(x, mask)", "self.inner(x + 1, mask)"), BODY, FORMULA, True, ANOTHER),
        # The same formula on other attributes.
        (GATED.replace("self.gate", "self.door"), GATED, FORMULA, True, ANOTHER),
        (LOOP.replace("self.inner(x,", "self.inner(x + 1,"), LOOP, FORMULA, True, ANOTHER),
        (edited("x, mask=None", "x, mask=0"), BODY, SIGNATURE, True, "mask=None is now mask=0"),
        (edited("x, mask=None", "x, mask=None, *, extra"), BODY, SIGNATURE, True, "new: extra (keyword only)"),
        (edited("x, mask=None", "x, mask"), BODY, SIGNATURE, True, "mask=None is now mask"),
        (edited("x, mask=None", "hidden, mask=None"), BODY, SIGNATURE, True, "no x any more; new: hidden"),
        (edited("x, mask=None", "x, mask=None, **kwargs"), BODY, SIGNATURE, True, "new: **kwargs"),
        # Code that replaces a function may keep the old name as long as upstream takes it.
        (renamed(declared=True), BODY, RENAMED, False, KEPT),
        (renamed(declared=False), BODY, RENAMED, True, LIKELY),
        (renamed(declared=True).replace("self.inner(x,", "self.inner(x + 1,"), BODY, FORMULA, True,
         f"mask is attention now; {ANOTHER}"),
        ("", BODY, GONE, True, "there is no Layer.forward"),
        (edited("class Layer", "class MyLayer"), BODY, GONE, True, "the same code is now MyLayer.forward"),
    ],
)  # fmt: skip
def test_a_method_that_a_config_replaces(
    after: Compare, text: str, before: str, result: str, matters: bool, detail: str
) -> None:
    found = after(text, config("Layer.forward"), before=before)
    rows = [(one.result, one.matters, one.detail) for one in found if one.kind != PARAMETER]
    ends = {GONE: "; mine:config patches it", RENAMED: "; mine:config has to follow"}
    end = ends.get(result, ends[RENAMED]) if matters else ""
    assert rows == ([(result, matters, f"{detail}{end}")] if result else [])
    assert all(one.kind == "method_override" for one in found if one.kind != PARAMETER)
    for one in found:
        if result in (TEXT, FORMULA, SIGNATURE) and one.kind != PARAMETER:
            assert "\n-    " in one.diff or "\n-def" in one.diff
        if one.kind == PARAMETER:
            assert (one.target, one.result, one.matters) == ("mask", RENAMED, False)
    assert any(one.kind == PARAMETER for one in found) is ("attention" in text)


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


def test_a_class_has_the_signatures_of_its_methods(after: Compare) -> None:
    made = PatchConfig("m", label="mine:config")
    made.replace_class("Layer", int)
    (change,) = after(edited("(self, size)", "(self, size, bias)"), made, before=BODY)
    assert change.result == SIGNATURE


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
