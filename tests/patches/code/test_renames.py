import pytest

from veomni_hook.patches.code.document import Document, FunctionNode
from veomni_hook.patches.code.renames import Rename, renamed_parameters, renames


def of(decorator, parameters):
    document = Document(f"@{decorator}\ndef f({parameters}): ...\n")
    (definition,) = document.find("f")
    assert isinstance(definition.node, FunctionNode)
    found = renames(definition.node)
    assert renamed_parameters(document) == found
    return found


@pytest.mark.parametrize(
    "decorator",
    [
        'deprecate_kwarg("past", "5.40.0", new_name="cache")',
        'deprecate_kwarg(new_name="cache", version="5.40.0", old_name="past")',
        'other("past", "5.40.0", "cache", hint="use it", notify=True)',
    ],
)
def test_the_function_has_the_new_name(decorator):
    assert of(decorator, "self, cache=None") == {"past": Rename("cache", "5.40.0")}


def test_a_new_name_in_keywords_comes_second():
    decorator = 'deprecate_kwarg("past", "6.0.0", new_name="cache")'
    both = of(decorator, "past=None, cache=None")
    assert of(decorator, "**kwargs") == both == {"past": Rename("cache", "6.0.0")}


@pytest.mark.parametrize(
    "decorator",
    [
        'deprecate_kwarg("past", "5.40.0")',  # it goes, and has no other name
        "deprecate_kwarg",
        'auto_docstring("cache", custom_intro="past", checkpoint="a/b-1.2")',
    ],
)
def test_other_decorators_rename_nothing(decorator):
    assert of(decorator, "cache=None") == {}
