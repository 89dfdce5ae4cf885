"""Replacements whose parameters upstream has renamed since, and still takes by their old names."""

import ast
from typing import Any

import pytest

from veomni_hook.errors import PatchTargetError, SignatureError
from veomni_hook.patches.code.comparison import fingerprint
from veomni_hook.patches.engine import PatchedSource

UPSTREAM = """\
import functools

def renamed(old, until, *, new_name):
    def wrap(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            if old in kwargs:
                kwargs[new_name] = kwargs.pop(old)
            return function(*args, **kwargs)
        return call
    return wrap

class Layer:
    @renamed("past", "9.9", new_name="cache")
    def forward(self, x, cache=None, **kwargs):
        return x, cache, kwargs

class Model:
    def __init__(self):
        self.layer = Layer()

    @renamed("past", "9.9", new_name="cache")
    def forward(self, x, cache=None):
        return self.layer.forward(x, cache=cache, use=1)

@renamed("past", "9.9", new_name="cache")
def mask(x, *, cache):
    return x, cache
"""
OVERRIDES = {
    "a body": "def forward(self, x, past=None, **kwargs):\n    '''Doc.'''\n    return x, past, kwargs\n",
    "one line": "def forward(self, x, past=None, **kwargs): return x, past, kwargs\n",
}


def scope(text):
    names: dict[str, Any] = {}
    exec(compile(text, "patched", "exec"), names)
    return names


@pytest.fixture
def applied(patched, load):
    def apply(code: str, verb: str = 'override_method("Layer.forward")') -> PatchedSource:
        return patched(UPSTREAM, f"{HEAD}@config.{verb}\n{code}")

    return apply


HEAD = "from veomni_hook import PatchConfig\nconfig = PatchConfig('pkg.upstream')\n"


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_replacement_takes_the_new_name_and_the_old(override, applied):
    result = applied(OVERRIDES[override])
    names = scope(result.text)
    assert names["Model"]().forward(1, cache=2) == (1, 2, {"use": 1})
    assert names["Layer"]().forward(1, past=2) == (1, 2, {})
    (remark,) = result.report.remarks
    assert remark.harmless and remark.target == "Layer.forward"
    assert remark.what.startswith("renamed: past is cache in this pkg, and takes the old name until 9.9")


def test_functions_and_classes_too(applied):
    names = scope(applied("def mask(x, *, past): return past, x\n", 'replace_function("mask")').text)
    assert names["mask"](1, cache=2) == names["mask"](1, past=2) == (2, 1)
    code = "class New:\n    def forward(self, x, past=None, **kwargs):\n        return past, kwargs\n"
    names = scope(applied(code, 'replace_class("Layer")').text)
    assert names["Model"]().forward(1, cache=2) == (2, {"use": 1})


def test_a_replacement_that_uses_the_new_name_for_something_else_is_an_error(applied):
    code = "def forward(self, x, past=None, **kwargs):\n    cache = {}\n    return x, past, cache, kwargs\n"
    with pytest.raises(SignatureError, match=r"nobody passes past .*: upstream has cache \(for past\)"):
        applied(code)


def test_new_names_stay(applied):
    code = "def forward(self, x, cache=None, past=None, **kwargs):\n    return x, cache, past, kwargs\n"
    result = applied(code)
    assert "past = cache" not in result.text and not result.report.remarks


GUARDED = """@config.insert_guard("Layer.forward", {options})
def taken(self, x, past):
    if past == 2:
        return "ours", x, past
"""
DIGEST = fingerprint(
    ast.parse("def forward(self, x, past=None, **kwargs):\n    return x, past, kwargs").body[0]
)
EARLIER = {
    "a fingerprint": f"fingerprints=[{DIGEST!r}]",
    "a statement": 'fingerprints=(), before="return x, past, kwargs"',
}


@pytest.mark.parametrize("options", EARLIER)
def test_a_guard_for_the_code_with_the_old_name(options, patched):
    result = patched(UPSTREAM, HEAD + GUARDED.format(options=EARLIER[options]))
    names = scope(result.text)
    assert names["Model"]().forward(1, cache=2) == names["Layer"]().forward(1, past=2) == ("ours", 1, 2)
    assert names["Layer"]().forward(1, cache=3) == (1, 3, {})
    (remark,) = result.report.remarks
    assert remark.harmless and remark.what.startswith("renamed: past is cache in this pkg")


def test_a_guard_for_other_code_is_an_error(patched):
    other = UPSTREAM.replace("return x, cache, kwargs", "return cache, x, kwargs")
    for options in EARLIER.values():
        with pytest.raises(PatchTargetError):
            patched(other, HEAD + GUARDED.format(options=options))


REWRITES = {
    "a statement": ("return x, past, kwargs", "return ours(past, past=x)"),
    "a call": ("{m}.forward(x, past=past, use=1)", "ours(past, past=x)"),
}


@pytest.mark.parametrize("name", REWRITES)
def test_a_rewrite_of_the_code_with_the_old_name(name, patched):
    pattern, replacement = REWRITES[name]
    target = "Model.forward" if name == "a call" else "Layer.forward"
    code = f"config.rewrite({target!r}, pattern={pattern!r}, replacement={replacement!r})\n"
    helper = "@config.add_helper\ndef ours(cache, past):\n    return 'ours', cache, past\n"
    result = patched(UPSTREAM, HEAD + code + helper)
    names = scope(result.text)
    owner = names[target.partition(".")[0]]()
    assert owner.forward(1, cache=2) == ("ours", 2, 1)
    assert [each.harmless for each in result.report.remarks] == [True]


def test_what_relies_on_code_with_old_names(patched):
    relies = f"relies_on={{'Layer.forward': {DIGEST!r}}}"
    code = f"config.rewrite('Model.forward', pattern='1', replacement='2', {relies})\n"
    names = scope(patched(UPSTREAM, HEAD + code).text)
    assert names["Model"]().forward(1, cache=3) == (1, 3, {"use": 2})
