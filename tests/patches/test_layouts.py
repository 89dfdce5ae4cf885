"""Layouts that no release of transformers has: tabs, form feeds, other line endings, unusual encodings."""

import ast
from collections.abc import Callable
from functools import cache
from importlib.util import decode_source
from types import SimpleNamespace

import pytest

from tests.patches.upstream import source_of
from veomni_hook.errors import IdiomError, PatchTargetError
from veomni_hook.patches.code.edit import string_lines
from veomni_hook.patches.engine import Origin, patch_source
from veomni_hook.patches.idioms import recognise
from veomni_hook.patches.spec import PatchConfig

FAMILIES = ("qwen3", "gemma3", "mixtral", "deepseek_v3", "doge")
UPSTREAM = "def f(x):\n    return x\n\n\ndef g(x):\n    return x + 1\n"


def _lines(source, change):
    """The text with every line of code changed, except lines inside a string."""
    inside = string_lines(source)
    lines = enumerate(source.split("\n"), start=1)
    return "\n".join(
        line if number in inside or not line.strip() else change(number, line) for number, line in lines
    )


def _tabs(_, line):
    blanks = len(line) - len(line.lstrip(" "))
    return "\t" * (blanks // 4) + " " * (blanks % 4) + line[blanks:]


def _mixed(source):
    """One top-level block with tabs, the next with blanks."""
    blocks = 0

    def change(number: int, line: str) -> str:
        nonlocal blocks
        blocks += line[0] not in " #)]}"
        return _tabs(number, line) if blocks % 2 else line

    return _lines(source, change)


LAYOUTS: dict[str, Callable[[str], str]] = {
    "tabs": lambda source: _lines(source, _tabs),
    "tabs and CRLF": lambda source: _lines(source, _tabs).replace("\n", "\r\n"),
    "tabs here, blanks there": _mixed,
    "form feeds": lambda source: _lines(source, lambda number, line: "\f" * (number % 2) + line),
    "blanks before form feeds": lambda source: _lines(
        source, lambda number, line: " \f" * (number % 2 and line[0] == " ") + line
    ),
    "CRLF": lambda source: source.replace("\n", "\r\n"),
    "CR": lambda source: source.replace("\n", "\r"),
    "no final newline": lambda source: source.rstrip("\n"),
}


def _patched(source, family):
    module = f"transformers.models.{family}.modeling_{family}"
    return patch_source(source, [], Origin(module, "m.py", "transformers", "0"), idioms=True)


@cache
def _expected(family):
    return _patched(source_of(family), family)


@pytest.mark.parametrize(
    ("family", "layout"),
    [*((family, "tabs") for family in FAMILIES), *(("mixtral", layout) for layout in [*LAYOUTS][1:])],
)
def test_any_layout_is_routed_as_upstreams_own(family, layout):
    source = LAYOUTS[layout](source_of(family))
    assert source != source_of(family)
    expected, found = _expected(family), _patched(source, family)
    sites = [(one.kind, one.target, one.op, one.variant) for one in found.report.applied]
    assert sites == [(one.kind, one.target, one.op, one.variant) for one in expected.report.applied]
    assert len(sites) >= 8
    for text, wanted in ((found.text, expected.text), (found.plain, expected.plain)):
        compile(text, family, "exec", dont_inherit=True)
        assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(wanted))


@pytest.mark.parametrize(
    ("encoding", "head"),
    [("utf-8-sig", ""), ("latin-1", "# -*- coding: latin-1 -*-\n"), ("utf-8", "# coding: utf-8\n")],
)
def test_marks_and_declarations_of_an_encoding(encoding, head):
    source = f"{head}{source_of('qwen3')}\nNAME = 'größer'\n"
    result = _patched(decode_source(source.encode(encoding, "replace")), "qwen3")
    assert len(result.report.applied) == len(_expected("qwen3").report.applied)
    assert ast.parse(result.text).body[-1].value.value == "größer"


class TestWhatAnIdiomsEditRaises:
    """Any error becomes an `IdiomError`, unless the configs alone raise it, too."""

    origin = Origin("pkg.upstream", "upstream.py", "pkg", "1")

    @pytest.fixture
    def writing(self, monkeypatch):
        """Let one idiom write a text at a place of `UPSTREAM`."""
        from veomni_hook.patches.code.edit import Edit
        from veomni_hook.patches.site import Site, Status

        def put(start: int, end: int, text: str) -> None:
            site = Site("op", "f", Status.ROUTED, "v", edits=(Edit(start, end, text),))
            idiom = SimpleNamespace(__name__="idiom", find=lambda view: [site])
            monkeypatch.setattr(recognise, "idioms", lambda *_: (idiom,))

        return put

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("\treturn x\n  return y\n", "the idioms of op write fails: the patched source is not valid"),
            ("    return x\n)\n", "not valid Python"),
            ("", "not valid Python"),
        ],
    )
    def test_code_that_does_not_parse(self, writing, text, said):
        begin = UPSTREAM.index("    return x\n")
        writing(begin, begin + len("    return x\n"), text)
        with pytest.raises(IdiomError, match=said) as caught:
            patch_source(UPSTREAM, [], self.origin, idioms=True)
        assert "defect of veomni-hook" in caught.value.fix

    @pytest.mark.parametrize("error", [ValueError("odd"), KeyError("lost"), RecursionError()])
    def test_errors_of_any_kind(self, writing, monkeypatch, error):
        from veomni_hook.patches import engine

        def fail(plan: object) -> None:
            if list(plan.of_kind("route")):
                raise error

        monkeypatch.setattr(engine, "_PLANNERS", ((frozenset({"route"}), fail),))
        writing(10, 10, "    y = x\n")
        with pytest.raises(IdiomError, match=type(error).__name__) as caught:
            patch_source(UPSTREAM, [], self.origin, idioms=True)
        assert caught.value.__cause__ is error

    def test_what_configs_raise_stays_theirs(self, writing):
        begin = UPSTREAM.index("    return x\n")
        writing(begin, begin + 4, "\t")
        config = PatchConfig("pkg.upstream")
        config.rewrite("h", pattern="{x} + 1", replacement="{x} + 2")
        with pytest.raises(PatchTargetError, match="h"):
            patch_source(UPSTREAM, [config], self.origin, idioms=True)
