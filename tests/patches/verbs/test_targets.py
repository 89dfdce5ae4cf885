import ast

import pytest

from tests.patches.tasks import task_for
from veomni_hook.errors import PatchTargetError
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.verbs.targets import class_named, resolve

SOURCE = """\
from typing import overload
@overload
def f(x: int): ...
@overload
def f(x: str): ...
def f(x): return x
class A:
    x: int = 1
    def m(self): pass
    if x:
        def n(self): pass
    class B: pass
A = A
if A:
    def g(): pass
else:
    def g(): pass
"""


def test_overloads_do_not_count():
    document = Document(SOURCE)
    assert document.lineno(document.start(resolve(task_for(SOURCE, "f"), ("function",)).node)) == 6


def test_a_name_may_be_assigned_besides():
    assert isinstance(class_named(task_for(SOURCE, "A"))[1], ast.ClassDef)


def test_branches_are_refused_with_their_lines():
    with pytest.raises(PatchTargetError, match="lines 15, 17"):
        resolve(task_for(SOURCE, "g"), ("function",))


def test_error_says_what_the_name_is_instead():
    with pytest.raises(PatchTargetError, match=r"A\.x is an assignment, not a method") as caught:
        resolve(task := task_for(SOURCE, "whole"), ("method",), target="A.x")
    assert (caught.value.where, caught.value.target) == (task.where, "whole")
