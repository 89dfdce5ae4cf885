import pytest

from veomni_hook.errors import PatchConflictError, PatchTargetError, ReplacementError

UPSTREAM = '''\
# Licence.
"""Doc."""
from __future__ import annotations

import os
if os:
    import sys

logger = os


class A:
    pass
'''

EVERYTHING = """
    config.add_import("math", names=["pi as PI", "e"])
    config.add_import("json", alias="j", is_from_import=False)
    config.add_import("string")
    config.add_slot("s_slot", op="rms_norm", variant="weight")
    config.add_post_import_block('''
        # block
        try:
            block = 1
        except Exception:
            block = 2
    ''')

    # helper's
    @config.add_helper
    def helper():
        return PI

    @config.add_helper_after("A")
    class B(A): pass
"""


def test_order_and_markers(patched):
    result = patched(UPSTREAM, EVERYTHING.replace("A): pass", "object): pass"))
    assert (
        result.plain
        == UPSTREAM.replace(
            "    import sys\n",
            """    import sys

from math import pi as PI, e
import json as j
from string import *

from veomni_hook.kernels.slot import Slot as VeomniSlot

s_slot = VeomniSlot("rms_norm", "weight", __name__)

# block
try:
    block = 1
except Exception:
    block = 2


# helper's
def helper():
    return PI
""",
        )
        + "\n\nclass B(object): pass\n"
    )
    markers = [line for line in result.text.splitlines() if line.startswith("# [")]
    labels = ["ADDED IMPORTS", "KERNEL SLOTS", "ADDED BLOCK", "HELPER", "HELPER"]
    assert [line[3 : line.index("]")] for line in markers] == labels


@pytest.mark.parametrize(
    ("upstream", "expected"),
    [
        ("", "import a\n"),
        ("x = 1\n", "import a\nx = 1\n"),
        ('"""Doc."""', '"""Doc."""\nimport a'),
        ("import b; import c; x = 1\ny = 2\n", "import b; import c; x = 1\nimport a\ny = 2\n"),
        ("class A: pass\nimport b\n", "import a\nclass A: pass\nimport b\n"),
        ("import b  # noqa\n@d\ndef f(): pass\n", "import b  # noqa\nimport a\n@d\ndef f(): pass\n"),
    ],
)
def test_where_imports_go(patched, upstream, expected):
    plain = patched(upstream, "config.add_import('a', is_from_import=False)").plain
    assert plain.replace("\r\n\r\n", "\r\n").replace("\n\n", "\n") == expected


def test_future_import_goes_first(patched, run):
    upstream = '"""Doc."""\nimport os\ndef f(x: nowhere): pass\n'
    result = patched(upstream, "config.add_import('__future__', names=['annotations'])")
    assert result.plain.startswith('"""Doc."""\nfrom __future__ import annotations\nimport os\n')
    assert run(result)["f"].__annotations__ == {"x": "nowhere"}


def test_long_import_is_wrapped(patched):
    names = [f"a_rather_long_name_{n}" for n in range(9)]
    plain = patched("import os\n", f"config.add_import('pkg', names={names!r})").plain
    assert "from pkg import (\n    a_rather_long_name_0,\n" in plain


def test_helper_after_a_replaced_and_a_nested_definition(patched, run):
    upstream = "if 1:\n    class A: pass\nelse:\n    A = None\nclass B:\n    x = 1\n    # end\ny = 1\n"
    code = """
        class A: pass
        class B: x = 0
        config.replace_class("B", B)
        @config.add_helper_after("B")
        class C(B): pass
    """
    module = run(patched(upstream, code))
    assert issubclass(module["C"], module["B"])


def test_helper_is_inserted_once_however_often_it_comes(patched):
    code = """
        @config.add_helper
        def h(): pass
        config.helpers.extend(config.helpers)
        config.add_import("a")
        config.add_import("a")
        config.add_post_import_block("x = 1")
        config.add_post_import_block("x = 1")
    """
    plain = patched("import os\n", code).plain
    assert [plain.count(text) for text in ("def h", "from a", "x = 1")] == [1, 1, 1]


@pytest.mark.parametrize(
    "kind", ["@config.add_helper\ndef A(): pass", "config.add_slot('A', op='o', variant='v')"]
)
def test_name_that_upstream_defines(patched, kind):
    with pytest.raises(PatchConflictError, match=r"line 12"):
        patched(UPSTREAM, kind)


def test_helper_without_source(patched):
    with pytest.raises(ReplacementError):
        patched("x = 1\n", "config.add_helper(len)")


def test_helper_after_nothing(patched):
    with pytest.raises(PatchTargetError) as caught:
        patched("class Output: pass\n", "@config.add_helper_after('Outptu')\ndef h(): pass\n")
    assert caught.value.nearest == ("Output",)
    with pytest.raises(PatchTargetError, match="before"):
        patched(
            "class Output: pass\n",
            "def h(): pass\nconfig.positioned_helpers.append(PositionedHelper('Output', h, 'before'))\n",
        )
