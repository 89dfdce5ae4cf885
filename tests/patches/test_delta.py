"""What patches change in each class, applied to classes that already exist."""

import ast

import pytest

from veomni_hook.patches.delta import delta

UPSTREAM = '''
from __future__ import annotations
from torch import nn
from elsewhere import one, two

LIMIT = 3

def helper(x):
    return x

class Norm(nn.Module):
    """Doc."""
    eps = 1

    def __init__(self):
        super().__init__()

    @property
    def scale(self):
        return 1

    @scale.setter
    def scale(self, value):
        pass

    def forward(self, x):
        return helper(x)

@auto_docstring
@counted
class Layer(nn.Module):
    def forward(self, x):
        return self.norm(x)

class Untouched(nn.Module):
    def forward(self, x):
        return x
'''
SLOT = "from veomni_hook.kernels.slot import Slot\nslot = Slot('op')\n\ndef helper("


def changed(*replacements):
    text = UPSTREAM
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    return delta(UPSTREAM, text)


def test_only_changed_members_are_made_again():
    found = changed(
        ("def helper(", SLOT),
        ("return helper(x)", "return slot.kernel(self, x, Layer)"),
        ("return self.norm(x)", "return slot.kernel(self, x, Norm, Untouched)"),
    )
    assert [ast.unparse(each) for each in found.added] == [
        "from veomni_hook.kernels.slot import Slot",
        "slot = Slot('op')",
    ]
    assert {name: each.members for name, each in found.classes.items()} == {
        "Norm": ("forward",),
        "Layer": ("forward",),
    }
    assert not any(each.refused for each in found.classes.values())
    layer = found.classes["Layer"].node
    # Guards compare types, so they get the current classes of modules.
    assert "slot.kernel(self, x, veomni_adopted_Norm, Untouched)" in ast.unparse(layer)
    assert [ast.unparse(each) for each in layer.decorator_list] == ["counted"]
    assert len(found.future) == 1


def test_a_property_is_changed_with_its_setter():
    found = changed(("        pass", "        self.held = value"))
    assert found.classes["Norm"].members == ("scale",)
    assert len(found.classes["Norm"].node.body) == 2


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("super().__init__()", "super().__init__(); self.more = 1", "changes its __init__"),
        ("class Norm(nn.Module)", "class Norm(Other)", "changes its bases"),
        ("    eps = 1\n", "", "removes its eps"),
    ],
)
def test_what_cannot_be_done_to_objects_is_refused(old, new, reason):
    assert reason in changed((old, new)).classes["Norm"].refused


def test_what_all_models_share_stays():
    found = changed(
        ("def helper(x):\n    return x", "def helper(x):\n    return -x"),
        ("import one, two", "import one, three"),
        ("LIMIT = 3", "LIMIT = 3\ntwo = three"),
        ("return helper(x)", "return helper(three(x))"),
        ("return self.norm(x)", "return self.norm(three(x))"),
    )
    assert found.shared == {"helper", "two"}
    assert "helper" in found.classes["Norm"].refused
    assert not found.classes["Layer"].refused
