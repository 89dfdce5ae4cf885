"""Code of a patch that uses an undefined name: an error at patch time, with a suggestion."""

import pytest

from veomni_hook.errors import UnresolvedNameError

UPSTREAM = """
import torch
from torch import nn
def rotate_half(x): return x
class A:
    def __init__(self): pass
    def forward(self, x, y=1):
        return rotate_half(x)
def odd(): return upstreams_own_oddity
"""


def refused(patched, config):
    with pytest.raises(UnresolvedNameError) as caught:
        patched(UPSTREAM, config)
    return caught.value


OVERRIDE = "@config.override_method('A.forward')\ndef forward(self, x, y=1):\n    return "


@pytest.mark.parametrize(
    ("before", "body", "fix"),
    [
        ("def scale(x): return x\n", "scale(x)", "scale: config.add_helper(scale)"),
        ("class Scale: pass\n", "Scale()", "Scale: config.add_helper(Scale)"),
        ("import math\n", "math.sqrt(x)", "math: config.add_import('math', is_from_import=False)"),
        ("from textwrap import dedent as flat\n", "flat(x)", "flat: config.add_import('textwrap', names=['dedent as flat'])"),
        ("LIMIT = 3\n", "x * LIMIT", "LIMIT: config.add_post_import_block(...) with the assignment of LIMIT"),
        ("", "rotate_hlaf(x)", "rotate_hlaf: write rotate_half, or provide it by add_helper, add_import"),
        ("", "x + yy", "yy: write y"),
        ("", "zzzzzz", "zzzzzz: provide it by add_helper, add_import or add_post_import_block"),
    ],
)  # fmt: skip
def test_the_error_names_what_to_write(patched, before, body, fix):
    error = refused(patched, f"{before}{OVERRIDE}{body}\n")
    assert error.fix.startswith(fix)
    assert error.names == (fix.partition(":")[0],)
    assert error.target == "A.forward"
    assert "the code for A.forward (config_of_test_" in error.where


@pytest.mark.parametrize(
    "config",
    [
        "@config.replace_class('A')\nclass A:\n    def forward(self, x, y=1): return nothing\n",
        "@config.add_method('A.extra')\ndef extra(self): return nothing\n",
        "@config.modify_init('A')\ndef init(original_init, self):\n    original_init(self)\n    nothing\n",
        "config.rewrite('A.forward', pattern='rotate_half({x})', replacement='nothing({x})')\n",
        "config.add_post_import_block('def f(): return nothing')\n",
        "@config.add_helper\ndef f(): return nothing\n",
        "@config.add_helper_after('A')\ndef f(): return nothing\n",
    ],
)
def test_every_verb(patched, config):
    error = refused(patched, "nothing = None\n" + config)
    assert error.names == ("nothing",)
    assert "nothing in the code for " in error.where


def test_two_names_of_two_patches(patched):
    error = refused(
        patched,
        "def one(): pass\n@config.add_helper\ndef f(): return one()\n"
        + OVERRIDE
        + "two(x)\n",
    )  # fmt: skip
    assert error.names == ("one", "two")
    assert "one: config.add_helper(one); two: " in error.fix


@pytest.mark.parametrize(
    "config",
    [
        OVERRIDE + "torch.relu(nn.functional.gelu(rotate_half(x))), len(A.__name__), __name__\n",
        "config.add_import('math', is_from_import=False)\n" + OVERRIDE + "math.sqrt(x)\n",
        "@config.add_helper\ndef scale(x): return x\n" + OVERRIDE + "scale(x)\n",
        "config.add_post_import_block('LIMIT = 3')\n" + OVERRIDE + "x * LIMIT\n",
        "config.add_slot('fast', op='rms_norm', variant='cast_before_weight')\n" + OVERRIDE + "fast(x)\n",
        "config.exclude_from_output('odd')\n" + OVERRIDE + "x\n",
        OVERRIDE + "upstreams_own_oddity\n",
    ],
)
def test_what_is_provided_is_no_error(patched, config):
    assert "forward" in patched(UPSTREAM, config).text
