import pytest

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.routes.config import covered, relied_on
from veomni_hook.patches.site import Site, Status

SOURCE = """\
LIMIT = 1


def deep(x):
    return x


def rotate(x):
    return deep(x)


def apply(x):
    return rotate(x) + LIMIT


def unused(x):
    return x


class Helper:
    pass


class A:
    def _own(self, x):
        return unused(x)

    def forward(self, x):
        first = rotate(x)
        y = apply(first)
        return Helper(y)
"""
DOCUMENT = Document(SOURCE)


def edit(start, end="", text="", **fields):
    at = SOURCE.index(start, SOURCE.index("def forward"))
    return Edit(at, at + len(end), text, **fields)


def site(*edits, target="A.forward", **fields):
    return Site("o", target, Status.ROUTED, edits=edits, **fields)


def texts(found):
    return [SOURCE[start:end] for start, end in covered(DOCUMENT, found)]


def test_code_in_place_answers_for_what_it_replaces():
    assert texts(site(edit("apply", "apply", "slot.at(self, apply)"))) == ["apply"]


def test_an_inserted_statement_answers_for_all_that_follows():
    (text,) = texts(site(edit("        return Helper", text="        go()\n")))
    assert text == "        return Helper(y)"
    (text,) = texts(site(edit("    first", "    ", "\n    go()\n    ")))
    assert text.lstrip().startswith("first =") and text.endswith("Helper(y)")


def test_a_marker_answers_for_nothing():
    assert texts(site(edit("first", text="# why\n", marker=True))) == []


def test_what_stands_above_a_function_answers_for_the_function():
    above = Edit(SOURCE.index("class A"), SOURCE.index("class A"), "@slot.reached\n")
    (text,) = texts(site(above))
    assert text.startswith("def forward") and text.endswith("Helper(y)")


@pytest.mark.parametrize(
    ("edits", "names"),
    [
        ((edit("apply", "apply", "slot.at(self, apply)"),), ("apply", "deep", "rotate")),
        ((edit("        first", text="        go()\n"),), ("Helper", "apply", "deep", "rotate")),
        ((edit("        return Helper", text="        go()\n"),), ("Helper",)),
        ((edit("        return Helper", text="        self._own(x)\n"),), ("A._own", "Helper", "unused")),
        ((edit("first", text="# deep\n", marker=True),), ()),
        ((edit("x)", "x", "x"),), ()),
    ],
)
def test_what_a_route_relies_on(edits, names):
    assert relied_on(DOCUMENT, site(*edits)) == names
