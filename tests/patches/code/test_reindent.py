import ast
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veomni_hook.patches.code.edit import reindent, string_lines

CODE = '''\
def f(
a,  # less than its bracket
    b,
):
    """Doc
 one
    """

    # comment
# comment at the margin
    x = "joined \\
  here"
    y = f"""{
        a}
   b"""
\treturn_ = 0 if x else 1
'''.replace("\treturn_", "    z")


def test_strings_do_not_change():
    moved = reindent(CODE.rstrip("\n"), "", "        ")
    before, after = ast.parse(CODE), ast.parse("if 1:\n" + moved)
    assert ast.dump(before.body[0]) == ast.dump(after.body[0].body[0])
    assert reindent(moved, "        ", "") == textwrap.dedent(reindent(CODE.rstrip("\n"), "", ""))


def test_comments_and_blank_lines_move_along():
    assert reindent("if x:\n# low\n\n    y", "", "  ") == "  if x:\n  # low\n\n      y"


def test_first_line_may_hang():
    assert reindent("def f():\n        pass", "    ", "") == "def f():\n    pass"


def test_tabs():
    assert reindent("\tdef f():\n\t\tpass", "\t", "    ") == "    def f():\n    \tpass"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('x = """a\nb\nc"""', {2, 3}),
        ('x = ("a"\n"b")', set()),
        ("x = f'''{f\"{1}\"}\n'''", {2}),
    ],
)
def test_lines_inside_strings(text, expected):
    assert string_lines(text) == expected


@given(st.text(alphabet="ab \t#'é\\", max_size=30), st.sampled_from(["", "    ", "\t"]))
def test_literal_keeps_its_value(content, indent):
    literal = '"""' + content.replace("\\", "\\\\") + "\n " + '"""'
    moved = reindent(f"x = {literal}", "", indent)
    assert ast.literal_eval(moved.strip().removeprefix("x = ")) == ast.literal_eval(literal)
