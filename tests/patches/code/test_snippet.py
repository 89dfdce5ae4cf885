import functools
import textwrap
from pathlib import Path
from typing import Any

import pytest

from veomni_hook.errors import ReplacementError
from veomni_hook.patches.code.snippet import function_body, read_snippet


def read(replacement, **options):
    snippet = read_snippet(replacement, where="here", target="T", **options)
    return f"{snippet.comments}\n{snippet.document.source}"


def test_comments_decorators_and_strings_are_kept(load):
    module = load(
        '''
        import functools

        # not this one

        # Patch.1: this
        #   and this
        @config.override_method(
            "A.m",  # )
            description="a ) b",
        )
        # between
        @functools.lru_cache(
            maxsize=1
        )
        def f(x):
            """Doc
          not moved"""
            # first
            return x  # last
            # after
        '''
    )
    assert read(module.f) == textwrap.dedent(
        '''\
        # Patch.1: this
        #   and this
        # between
        @functools.lru_cache(
            maxsize=1
        )
        def f(x):
            """Doc
          not moved"""
            # first
            return x  # last
            # after'''
    )


def test_every_verb_is_stripped(load):
    module = load(
        """
        gpu = config
        @gpu.add_helper
        @gpu.add_helper()
        @gpu.add_helper_after("A")
        @gpu.replace_function("f")
        @gpu.add_method("A.f")
        @gpu.modify_init("A")
        @gpu.insert_guard("A.m", fingerprints=[])
        @gpu.override_method("A.f")
        def f(): pass
        """
    )
    assert read(module.f) == "\ndef f(): pass"


def test_wrappers_are_seen_through(load):
    module = load(
        """
        import functools
        class A:
            @staticmethod
            def s(): pass
            @property
            def p(self): return 1
            @p.setter
            def p(self, v): pass
            @functools.cached_property
            def c(self): pass
        @functools.lru_cache
        def cached(): pass
        """
    )
    assert read(module.A.__dict__["s"]) == "\n@staticmethod\ndef s(): pass"
    assert read(module.A.p) == "\n@property\ndef p(self): return 1"
    assert read(module.A.p, accessor="setter") == "\n@p.setter\ndef p(self, v): pass"
    assert read(module.A.__dict__["c"]) == "\n@functools.cached_property\ndef c(self): pass"
    assert read(module.cached) == "\n@functools.lru_cache\ndef cached(): pass"


def test_name_map_reaches_code_strings_and_comments(load):
    module = load(
        '''
        # Qwen3MLP
        @config.replace_class("Qwen3MoeMLP")
        class Qwen3MLP:
            """Qwen3MLP, not Qwen3MoeMLP."""
        '''
    )
    expected = '# Qwen3MoeMLP\nclass Qwen3MoeMLP:\n    """Qwen3MoeMLP, not Qwen3MoeMLP."""'
    assert read(module.Qwen3MLP, name_map={"Qwen3": "Qwen3Moe"}) == expected


def test_renaming(load):
    module = load(
        """
        import functools
        @functools.lru_cache
        def deff(x, default=lambda: deff):
            return deff(x), "deff"
        """
    )
    snippet = read_snippet(module.deff, where="")
    assert snippet.named("g").splitlines()[1:] == [
        "def g(x, default=lambda: deff):",
        '    return deff(x), "deff"',
    ]
    assert snippet.named("g", references=True).splitlines()[1:] == [
        "def g(x, default=lambda: g):",
        '    return g(x), "deff"',
    ]


@pytest.mark.parametrize("given", [len, functools.partial(print), 3, lambda: 1, None])
def test_what_has_no_definition_is_refused(given):
    with pytest.raises(ReplacementError) as caught:
        read(given)
    assert (caught.value.where, caught.value.target) == ("here", "T")
    assert caught.value.fix


def test_code_from_no_file_is_refused():
    namespace: dict[str, Any] = {}
    exec("def f(): pass\nclass C: pass", namespace)
    for name in "fC":
        with pytest.raises(ReplacementError):
            read(namespace[name])


def test_file_changed_under_a_running_process_is_refused(load):
    module = load("def f():\n    return 1\n")
    Path(module.__file__).write_text("\n\n\n# moved away\ndef f():\n    return 2\n")
    with pytest.raises(ReplacementError, match="does not define it where Python says"):
        read(module.f)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(a, /, b, *c, d, **e):\n    return a", (("a", "b", "c", "d", "e"), "return a")),
        (
            'def f(x):\n    """Doc."""\n    # why\n    if x:\n        y\n    # end',
            (("x",), "# why\nif x:\n    y\n# end"),
        ),
        ("def f(\n    x,\n):\n\n    # first\n\n    return x", (("x",), "# first\n\nreturn x")),
        ('def f():\n    "Doc."', ((), "")),
        ('def f():\n    return """\n  a"""', ((), 'return """\n  a"""')),
    ],
)
def test_bodies(load, code, expected):
    assert function_body(load(code).f) == expected


def test_a_class_has_no_body_to_insert(load):
    with pytest.raises(ReplacementError, match="class"):
        function_body(load("class C: pass").C, where="here")
