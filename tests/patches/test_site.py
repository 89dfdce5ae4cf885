import ast

from veomni_hook.patches.site import Missed


def test_a_reason_names_the_line_if_there_is_one():
    (node,) = ast.parse("\n\nx").body
    assert str(Missed("it is odd", node)) == "it is odd (line 3)"
    assert str(Missed("made here", ast.Constant(1))) == "made here"
    assert str(Missed("it is odd")) == "it is odd"
