"""Edits of several routes in one text: each is written independently, and all work together."""

import ast
from dataclasses import replace

import pytest

from veomni_hook.patches.code.document import Document, FunctionNode
from veomni_hook.patches.code.edit import FUSED, Edit, apply_edits
from veomni_hook.patches.routes.compose import composed, with_copies
from veomni_hook.patches.routes.guards import before_statement, in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.verbs.inplace import mark_statement

SOURCE = """\
def f(x):
    a = x
    # why
    b = turn(a)

    c = '''
    text
'''
    if c:
        d = turn(b)
    return d
"""


#: Lines that belong to a string.
IN_STRING = ("    text\n", "'''\n", "one\n", "''')\n")


class Text:
    """One method, and the code that routes insert into it."""

    def __init__(self, source: str = SOURCE) -> None:
        self.view = ModuleView(Document(f"class C:\n{_lines(source, indent)}"))
        ((_, _, node),) = self.view.every_method()
        self.function: FunctionNode = node
        self.edits: list[Edit] = []
        self.marks: list[Edit] = []

    def take_over(self, step: int, first: int, last: int) -> None:
        """Add a guard around statements of the body, given by their numbers."""
        body = self.function.body
        code = f"if (k{step} := ask({step})) is not None:\n    pass\nelse:"
        made = before_statement(self.view, self.function, body[first], code, f"guard {step}")
        end = self.view.document.end(body[last])
        fusing = Edit(made[0].start, end, "    ", fuses=f"may({step})")
        self.edits += [*(replace(edit, patch=step, form=FUSED) for edit in made), replace(fusing, patch=step)]

    def bind(self, step: int, call: int, text: str = "slot.at(self, turn)") -> None:
        """Replace the callee of one of the calls of `turn`, with a marker."""
        calls = [n for n in ast.walk(self.function) if isinstance(n, ast.Name) and n.id == "turn"]
        edit = in_place(self.view, calls[call], text)
        self.edits.append(replace(edit, patch=step))
        mark = mark_statement(self.view.document, self.function, edit.start, f"# call {step}")
        self.marks.append(replace(mark, patch=step))

    def written(self, *, markers: bool = True, others: tuple[Edit, ...] = ()) -> str:
        """The copy of the method, or the method if it has none, without the indentation of the class."""
        document = self.view.document
        edits = composed(document, self.edits, self.marks, others)
        made = with_copies(document, [*edits, *others], markers=markers)
        text = apply_edits(document.source, made, markers=markers)
        lines, last = text.splitlines(keepends=True), ast.parse(text).body[-1]
        if isinstance(last, ast.ClassDef):
            return _lines("".join(lines[last.lineno :]), unindent)
        return "".join(lines[last.lineno - 1 :]).replace("veomni_C_f", "f")


def indent(line):
    return f"    {line}"


def unindent(line):
    return line.removeprefix("    ")


def _lines(text, change):
    """Change the lines of a method that are not in its string."""
    lines = text.splitlines(keepends=True)
    return "".join(change(line) if line.strip() and line not in IN_STRING else line for line in lines)


ONE_ELSE = """\
def f(x):
    a = x
    # guard 1
    if (k1 := ask(1)) is not None:
        pass
    else:
        # why
        # call 0
        b = slot.at(self, turn)(a)

        c = '''
    text
'''
        if c:
            # call 2
            d = slot.at(self, turn)(b)
    return d
"""


@pytest.mark.parametrize("order", ["call first", "guard first"])
def test_a_marker_in_an_else_stands_at_its_statement(order):
    text = Text()
    steps = [lambda: text.bind(0, 0), lambda: text.take_over(1, 1, 3), lambda: text.bind(2, 1)]
    for step in steps if order == "call first" else (steps[1], steps[0], steps[2]):
        step()
    assert text.written().replace("[ROUTED] ", "") == ONE_ELSE
    assert text.written(markers=False) == "".join(
        line for line in ONE_ELSE.splitlines(keepends=True) if "# call" not in line and "# guard" not in line
    )


def test_an_else_in_an_else():
    text = Text()
    text.take_over(1, 1, 3)
    text.take_over(2, 3, 3)
    text.bind(3, 1)
    wanted = """\
        # guard 2
        if (k2 := ask(2)) is not None:
            pass
        else:
            if c:
                # call 3
                d = slot.at(self, turn)(b)
    return d
"""
    assert text.written().replace("[ROUTED] ", "").endswith(wanted)


def test_two_guards_at_one_statement_go_in_as_they_come():
    text = Text()
    text.take_over(1, 1, 3)
    text.take_over(2, 1, 1)
    body = ast.parse(text.written()).body[0].body
    outer = body[1]
    inner, *rest = outer.orelse
    assert (ast.unparse(outer.test)[:5], ast.unparse(inner.test)[:5]) == ("(k1 :", "(k2 :")
    assert [ast.unparse(each) for each in inner.orelse] == ["b = turn(a)"]
    assert len(rest) == 2 and ast.unparse(body[2]) == "return d"


@pytest.mark.parametrize("ranges", [((1, 2), (2, 3)), ((1, 1), (1, 3))])
def test_guards_that_cross_are_refused(ranges):
    text = Text()
    for step, (first, last) in enumerate(ranges):
        text.take_over(step, first, last)
    with pytest.raises(ValueError, match="two guards cross at line"):
        text.written()


def test_a_guard_that_moves_code_is_in_a_method():
    text = Text()
    text.view.document = Document(SOURCE)
    text.edits = [Edit(12, 20, "    ", fuses="may(1)")]
    with pytest.raises(ValueError, match="line 2 is not in a method"):
        text.written()


def test_strings_of_inserted_code_stay():
    text = Text()
    code = "note('''\none\n''')"
    text.take_over(0, 1, 3)
    made = before_statement(text.view, text.function, text.function.body[2], code, "no")
    text.edits += [replace(edit, patch=1) for edit in made]
    assert "        note('''\none\n''')\n" in text.written()


LONG = "a_slot_with_a_long_name_of_its_own.at(self, turn)"
CALL = """\
def f(x):
    first_result, second_result = turn(
        x, turn(first_operand, second_operand, third_operand, fourth_operand, number))  # why
    return first_result
"""


def test_a_bracket_that_closes_at_the_end_of_a_long_line_is_wrapped_with_it():
    source = "def f(x):\n    return turn(first_operand, second_operand, third_operand, fourth_operand, fifth_operand)\n"
    document = Document(source)
    value = source.index("turn(")
    ends = [Edit(value, value, "a_slot_with_a_long_name.output(x, ", 0)]
    ends.append(Edit(document.line_end(value), document.line_end(value), ")", 0))
    edits = composed(document, ends)
    written = apply_edits(source, edits)
    assert ast.dump(ast.parse(written)) == ast.dump(ast.parse(apply_edits(source, ends)))
    assert len(edits) == 1 and max(map(len, written.split("\n"))) <= 120


def test_calls_that_share_a_line_share_its_edit():
    text = Text(CALL)
    text.bind(0, 0, LONG)
    text.bind(1, 1, LONG)
    (edit,) = composed(text.view.document, text.edits)
    assert edit.patches == {0, 1}
    source = text.view.document.source
    written = apply_edits(source, [edit])
    assert ast.dump(ast.parse(written)) == ast.dump(ast.parse(source.replace("turn(", f"{LONG}(")))
    assert max(map(len, written.split("\n"))) <= 120 and "# why" in written


def test_lines_that_others_edit_are_not_wrapped():
    text = Text(CALL)
    text.bind(0, 1, LONG)
    at = text.view.document.source.index("number")
    other = Edit(at, at + len("number"), "value", 7)
    assert f"{LONG}(first_operand, second_operand, third_operand, fourth_operand, value)" in text.written(
        others=(other,)
    )


def test_a_line_of_several_in_an_else_is_wrapped():
    text = Text(CALL)
    text.bind(0, 1, LONG)
    text.take_over(1, 0, 0)
    written = text.written()
    assert max(map(len, written.split("\n"))) <= 120
    (guard, _) = ast.parse(written).body[0].body
    assert ast.unparse(guard.orelse[0]).endswith(
        f"turn(x, {LONG}(first_operand, second_operand, third_operand, fourth_operand, number))"
    )
