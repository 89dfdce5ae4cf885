import pytest

from tests.patches.conftest import ORIGIN
from veomni_hook.errors import PatchConflictError, PatchError
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import Edit, place_edits
from veomni_hook.patches.plan import Plan, Step
from veomni_hook.patches.spec import PatchConfig
from veomni_hook.patches.verify import check_overlaps, check_text, untouched

SOURCE = "def f():\n    return 1\n\n\nclass A:\n    x = 1\n"


def plan(source=SOURCE):
    config = PatchConfig("pkg.upstream")
    return Plan(
        Document(source), ORIGIN, [Step("helper", "one", "", config), Step("helper", "two", "", config)]
    )


def verified(edits, source=SOURCE):
    made = plan(source)
    text, placed = place_edits(source, edits)
    return untouched(made, placed, check_text(made, text, placed))


def test_untouched_definitions():
    assert verified([]) == ("f", "A")
    assert verified([Edit(0, 0, "# m\n", 0)]) == ("f", "A")
    assert verified([Edit(13, 19, "yield", 0)]) == ("A",)
    assert verified([Edit(len(SOURCE) - 1, len(SOURCE) - 1, "\n    y = 1", 0)]) == ("f",)


def test_definition_that_is_swallowed():
    with pytest.raises(PatchError, match="f changed"):
        verified(
            [
                Edit(0, 0, "if 0:\n  ''\n  '''", 0),
                Edit(SOURCE.index("class"), SOURCE.index("class"), "'''\n", 0),
            ]
        )


@pytest.mark.parametrize("text", ["def (", "x = 'a", "from __future__ import annotations", "\0"])
def test_invalid_code_names_the_patch(text):
    made = plan()
    result, placed = place_edits(SOURCE, [Edit(22, 22, f"\n{text}\n", 1)])
    with pytest.raises(PatchError, match="not valid Python") as caught:
        check_text(made, result, placed)
    assert "two" in caught.value.where or "\0" in text


def test_overlaps_name_both_patches():
    made = plan()
    check_overlaps(made, [Edit(0, 2, "", 0), Edit(2, 3, "", 1), Edit(2, 2, "", 1)])
    with pytest.raises(PatchConflictError, match=r"one .* two"):
        check_overlaps(made, [Edit(0, 3, "", 0), Edit(2, 4, "", 1)])
