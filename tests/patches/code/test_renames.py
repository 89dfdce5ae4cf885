from __future__ import annotations

import pytest

from veomni_hook.patches.code.document import Document, FunctionNode
from veomni_hook.patches.code.renames import Rename, renamed_parameters, renames, renaming_decorators

HOME = "from ...utils.deprecation import deprecate_kwarg"


def of(decorator: str, parameters: str, imported: str = HOME) -> dict[str, Rename]:
    document = Document(f"{imported}\n\n\n@{decorator}\ndef f({parameters}): ...\n")
    (definition,) = document.find("f")
    assert isinstance(definition.node, FunctionNode)
    found = renames(definition.node, renaming_decorators(document.tree))
    assert renamed_parameters(document) == found
    return found


@pytest.mark.parametrize(
    ("decorator", "imported"),
    [
        ('deprecate_kwarg("past", "5.40.0", new_name="cache")', HOME),
        ('deprecate_kwarg("past", version="v5.40.0", new_name="cache")', HOME),
        ('deprecate_kwarg(new_name="cache", version="5.40.0", old_name="past")', HOME),
        ('moved("past", "5.40.0", new_name="cache")', f"{HOME} as moved"),
        (
            'other("past", "5.40.0", "cache", hint="use it")',
            "from transformers.utils.deprecation import other",
        ),
    ],
)
def test_the_function_has_the_new_name(decorator: str, imported: str) -> None:
    assert of(decorator, "self, cache=None", imported) == {"past": Rename("cache", "5.40.0")}


def test_a_new_name_in_keywords_comes_second() -> None:
    decorator = 'deprecate_kwarg("past", "6.0.0", new_name="cache")'
    assert (
        of(decorator, "**kwargs")
        == of(decorator, "past=None, cache=None")
        == {"past": Rename("cache", "6.0.0")}
    )


@pytest.mark.parametrize(
    ("decorator", "imported"),
    [
        (
            'deprecate_kwarg("past", "5.40.0", new_name="cache")',
            "from ...utils.generic import deprecate_kwarg",
        ),
        (
            'deprecate_kwarg("past", "5.40.0", new_name="cache")',
            "from myutils.deprecation import deprecate_kwarg",
        ),
        ('deprecate_kwarg("past", "5.40.0")', HOME),  # it goes, and has no other name
        ("deprecate_kwarg", HOME),
        ('other("past", "cache")', HOME),
    ],
)
def test_other_decorators_rename_nothing(decorator: str, imported: str) -> None:
    assert of(decorator, "cache=None", imported) == {}
