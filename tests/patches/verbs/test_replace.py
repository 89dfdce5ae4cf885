import pytest

from veomni_hook.errors import PatchTargetError, ReplacementError, SignatureError

UPSTREAM = '''\
"""Doc."""
def deco(f):
    def call(*a): return "deco", f(*a)
    return call

# keep above
@deco
def f(q, k):
    # gone
    return q


def g(x): return f(x, x)  # gone

@deco
class A:
    """Gone."""

    def forward(self, x, y=1):
        return x


def outer():
    def inner():
        return 1
    return inner()


if A:
    def maybe():
        return 1
else:
    maybe = None
x: int = 1
'''


def test_function(patched, run):
    result = patched(
        UPSTREAM,
        """
        # new
        @config.replace_function("f")
        def better(q, k):
            if q:
                return better(0, k)[1]
            return k
        """,
    )
    assert result.plain == UPSTREAM.replace(
        "@deco\ndef f(q, k):\n    # gone\n    return q\n",
        "# new\n@deco\ndef f(q, k):\n    if q:\n        return f(0, k)[1]\n    return k\n",
    )
    assert run(result)["g"](5) == ("deco", 5)


def test_inline_and_nested_and_conditional_functions(patched, run):
    result = patched(
        UPSTREAM,
        """
        @config.replace_function("g")
        def g(x):
            return "g"
        @config.replace_function("outer.<locals>.inner")
        def h(): return 2
        @config.replace_function("maybe")
        def m(): return 3
        """,
    )
    module = run(result)
    assert (module["g"](1), module["outer"](), module["maybe"]()) == ("g", 2, 3)
    assert "\n    def maybe(): return 3\nelse:\n    maybe = None\n" in result.plain


def test_class_brings_its_own_decorators_only(patched, run):
    result = patched(
        UPSTREAM,
        """
        import functools
        config.add_import("functools", is_from_import=False)
        # about
        @config.replace_class("A")
        @functools.total_ordering
        class Fast:
            # inside
            def forward(self, x, y=2):
                return Fast, x, y
            def __lt__(self, other): return True
        """,
    )
    assert "# about\n@functools.total_ordering\nclass A:\n    # inside\n" in result.plain
    assert '"""Gone."""' not in result.plain
    module = run(result)
    assert module["A"]().forward(1) == (module["A"], 1, 2)


def test_external_class_and_function(patched, run):
    code = """
        config.add_patch(create_patch_from_external("A", "collections", "OrderedDict"))
        config.add_patch(
            create_patch_from_external("f", "operator", "add", PatchType.FUNCTION_REPLACEMENT)
        )
    """
    result = patched(UPSTREAM, code)
    assert "\nfrom collections import OrderedDict as A\n" in result.plain
    assert "\nfrom operator import add as f\nf = deco(f)\n" in result.plain
    module = run(result)
    assert module["A"] is __import__("collections").OrderedDict
    assert module["g"](2) == ("deco", 4)


@pytest.mark.parametrize(
    ("verb", "kind", "target", "nearest"),
    [
        ("replace_class", "class", "Aa", "A"),
        ("replace_class", "class", "f", None),
        ("replace_function", "def", "A", None),
        ("replace_function", "def", "A.forward", None),
        ("replace_function", "def", "inner", "outer.<locals>.inner"),
    ],
)
def test_wrong_targets(patched, verb, kind, target, nearest):
    rest = "class C: pass" if kind == "class" else "def c(): pass"
    with pytest.raises(PatchTargetError) as caught:
        patched(UPSTREAM, f"@config.{verb}('{target}')\n{rest}\n")
    assert caught.value.target == target
    if nearest:
        assert nearest in caught.value.nearest


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (ReplacementError, "is a function", "@config.replace_class('A')\ndef c(): pass\n"),
        (ReplacementError, "is a class", "@config.replace_function('f')\nclass C: pass\n"),
        (SignatureError, "f drops k", "@config.replace_function('f')\ndef c(q): pass\n"),
        (SignatureError, "A.forward drops y", "@config.replace_class('A')\nclass C:\n    def forward(self, x): pass\n"),
    ],
)  # fmt: skip
def test_kinds_and_signatures_must_agree(patched, error, said, code):
    with pytest.raises(error, match=said):
        patched(UPSTREAM, code)
    if said == "A.forward drops y":
        patched(UPSTREAM, code.replace("'A'", "'A', allow_signature_change=True"))


@pytest.mark.parametrize(
    ("module", "name", "nearest"),
    [
        ("collections", "OrderedDcit", "OrderedDict"),
        ("no_such_package.sub", "X", None),
    ],
)
def test_external_replacement_that_does_not_exist(patched, module, name, nearest):
    with pytest.raises(ReplacementError, match="does not exist") as caught:
        patched(UPSTREAM, f"config.add_patch(create_patch_from_external('A', '{module}', '{name}'))")
    assert nearest is None or nearest in caught.value.fix


def test_accessors_of_a_property_are_compared_with_their_like(patched):
    upstream = "class A:\n    @property\n    def p(self): pass\n    @p.setter\n    def p(self, v): pass\n"
    code = upstream.replace("class A", "@config.replace_class('A')\nclass New")
    assert patched(upstream, code).plain == upstream
    with pytest.raises(SignatureError, match=r"A\.p\.setter drops v"):
        patched(upstream, code.replace("self, v", "self"))
