"""Wrapping changes the layout of long lines and nothing else."""

import ast
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veomni_hook.patches.code.wrap import WIDTH, wrapped

NAMES = ", ".join(f"operand_number_{number}" for number in range(9))

CASES = [
    (  # the contents of the last brackets get their own line
        f"first, second = slot.at(self, function)({NAMES[:100]})",
        f"first, second = slot.at(self, function)(\n    {NAMES[:100]}\n)",
    ),
    (  # or each item gets its own line
        f"first, second = kernel({NAMES})",
        "first, second = kernel(\n" + "".join(f"    {name},\n" for name in NAMES.split(", ")) + ")",
    ),
    (
        f"if (kernel := slot.kernel(self, *(operands := ({NAMES[:70]})))) is not None:\n    return 1",
        f"if (\n    kernel := slot.kernel(self, *(operands := ({NAMES[:70]})))\n) is not None:\n    return 1",
    ),
    (  # the parameters of a lambda are not items
        f"@slot.reached(lambda self, states, index: ({NAMES[:80]}))\nclass A:\n    pass",
        f"@slot.reached(\n    lambda self, states, index: ({NAMES[:80]})\n)\nclass A:\n    pass",
    ),
    (  # nor are the targets of a comprehension
        f"value = function(one + two + {NAMES[:88].replace(', ', ' + ')} + the_last for one, two in pairs)",
        f"value = function(\n    one + two + {NAMES[:88].replace(', ', ' + ')} + the_last\n    for one, two in pairs\n)",
    ),
    (  # short brackets stay together
        f"query = self.projection_of_queries({NAMES[:80]}).transpose(1, 2)",
        f"query = self.projection_of_queries(\n    {NAMES[:80]}\n).transpose(1, 2)",
    ),
    (
        f"value = one[{NAMES}]",
        "value = one[\n" + "".join(f"    {name},\n" for name in NAMES.split(", ")) + "]",
    ),
    (  # a comment after code moves above it
        f"value = function({NAMES[:80]})  # {'why ' * 12}",
        f"# {'why ' * 12}".rstrip() + f"\nvalue = function({NAMES[:80]})",
    ),
    (f"# {'word ' * 30}", f"# {'word ' * 23}".rstrip() + f"\n#     {'word ' * 7}".rstrip()),
]


def tree(text):
    return ast.dump(ast.parse(f"if 1:\n{text}" if text[0].isspace() else text))


@pytest.mark.parametrize(("text", "wanted"), CASES)
def test_long_lines_are_broken_in_their_brackets(text, wanted):
    assert wrapped(text) == wanted
    assert wrapped(wanted) == wanted and max(map(len, wanted.split("\n"))) <= WIDTH < len(text.split("\n")[0])
    assert tree(wanted) == tree(text)


@pytest.mark.parametrize("indent", ["        ", "\t\t"])
@pytest.mark.parametrize(("text", "wanted"), CASES[:-1])
def test_indentation_goes_on(text, wanted, indent):
    if indent[0] == "\t":
        text, wanted = text.replace("    ", "\t"), wanted.replace("    ", "\t")
    made = wrapped(textwrap.indent(text, indent), WIDTH + len(indent))
    assert made == textwrap.indent(wanted, indent) and tree(made) == tree(textwrap.indent(text, indent))


@pytest.mark.parametrize(
    "text",
    [
        f"short = kernel(a, b)\nlong = '{'x' * 130}'",
        f"value = '''{'x' * 130}\n{'y' * 130}'''",
        f"a_name_{'x' * 130} = 1",
        f"value = one + \\\n    {NAMES.replace(', ', ' + ')} \\\n    + two",
        f"value = function('''{'x' * 130}\n''', one, two)",
    ],
)
def test_what_cannot_be_broken_stays(text):
    assert wrapped(text) == text


def test_strings_keep_their_blanks_and_brackets():
    text = f'value = function(f\'{{one  }} ) {{two}}\', \'( , \', """a,  b""", {NAMES})'
    made = wrapped(text)
    assert '    f\'{one  } ) {two}\',\n    \'( , \',\n    """a,  b""",\n' in made
    assert ast.dump(ast.parse(made)) == ast.dump(ast.parse(text))


def test_a_header_may_be_without_its_block():
    text = f"    if kernel({NAMES}):\n        answer()\n    else:"
    assert wrapped(text) == text.replace(
        f"kernel({NAMES})", "kernel(\n" + "".join(f"        {n},\n" for n in NAMES.split(", ")) + "    )"
    )


_ATOMS = ["a", "self.weight", "'text, (with'", "f'{a}, '", "1.5", "x[0]", "(lambda u, v: (u, v))"]
_FORMS = [
    "function({0}, {1}, {2})", "function({0})({1}, *{2})", "function(lambda u, v: {0}, key={1}, **{2})",
    "({0},)", "[{0}, {1}]", "x[{0}, {1}:{2}]", "(name := {0})", "({0} if {1} else {2})",
    "({0} and not {1} or {2})", "[({0}, {1}) for one, two in {2} if one]",
    "function({0} for one, two in {1})", "{{'key': {0}, **{1}}}",
]  # fmt: skip


@st.composite
def expressions(draw, depth=4):
    if not depth or draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from(_ATOMS))
    parts = [draw(expressions(depth - 1)) for _ in range(3)]
    return draw(st.sampled_from(_FORMS)).format(*parts)


@pytest.mark.slow
@given(expressions(), st.integers(20, 100), st.sampled_from(["", "    ", "\t"]))
def test_the_tree_stays(expression, width, indent):
    text = f"{indent}first, second = {expression}\n{indent}return_ = 1"
    made = wrapped(text, width)
    assert tree(made) == tree(text) and wrapped(made, width) == made
