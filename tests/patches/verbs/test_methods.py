import pytest

from veomni_hook.errors import PatchTargetError, ReplacementError, SignatureError

UPSTREAM = '''\
import functools

def deco(f):
    @functools.wraps(f)
    def call(*a, **k):
        return "deco", f(*a, **k)
    return call


class A:
    """A."""

    # above
    @deco
    def m(self, x, *, y=1):
        """Doc."""
        return x  # gone
        # gone too
    # stays

    @staticmethod
    def s(x): return x

    @classmethod
    @deco
    def c(cls, x):
        return x

    async def co(self):
        return 1

    @property
    def p(self):
        return "up"

    @p.setter
    def p(self, value):
        self.q = value

    class Inner:
        def m(self): return 1

    if functools:
        def maybe(self):
            return 1

    z = 1
'''

EMPTY = {
    "pass": "class E(dict):\n    pass\n",
    "pass with comment": "class E(dict):\n    pass  # why\n",
    "ellipsis": "class E(dict):\n    ...\n",
    "inline pass": "class E(dict): pass\n",
    "inline ellipsis": "class E(dict): ...\n",
    "inline with comment": "class E(dict): ...  # why\n",
    "inline statements": "class E(dict): x = 1; y = 2  # why\n",
    "docstring": 'class E(dict):\n    """Doc."""\n',
    "inline docstring": 'class E(dict): """Doc."""\n',
    "comment below": "class E(dict):\n    pass\n    # why\n",
    "no newline": "class E(dict): pass",
    "tabs": "class E(dict):\n\tpass\n",
    "in a branch": "if 1:\n    class E(dict): pass\nelse:\n    y = 1\n",
    "nested": "class O:\n    class E(dict): pass\n    y = 1\nE = O.E\n",
    "followed": "class E(dict): pass\nclass F: pass\n",
    "carriage returns": "class E(dict):\r\n    pass  # why\r\nx = 1\r\n",
}


def test_override_keeps_decorators_comments_and_neighbours(patched, run):
    result = patched(
        UPSTREAM,
        '''
        # Patch.1
        @config.override_method("A.m", description="because")
        def other(self, x, *, y=1):
            # Patch.1
            return x, y, """
          string"""
        ''',
    )
    expected = UPSTREAM.replace(
        '''    @deco
    def m(self, x, *, y=1):
        """Doc."""
        return x  # gone
        # gone too
''',
        '''    # Patch.1
    @deco
    def m(self, x, *, y=1):
        # Patch.1
        return x, y, """
  string"""
''',
    )
    assert result.plain == expected
    assert run(result)["A"]().m(2, y=3) == ("deco", (2, 3, "\n  string"))


@pytest.mark.parametrize(
    ("target", "signature", "call", "expected"),
    [
        ("A.s", "x", "A.s(1)", ("new", 1)),
        ("A.c", "cls, x", "A.c(1)", ("deco", ("new", 1))),
        ("A.p", "self, x=0", "A().p", ("new", 0)),
        ("A.Inner.m", "self, x=0", "A.Inner().m()", ("new", 0)),
    ],
)
def test_every_kind_of_method(patched, run, target, signature, call, expected):
    code = f"@config.override_method('{target}')\ndef f({signature}):\n    return 'new', x\n"
    assert eval(call, run(patched(UPSTREAM, code))) == expected


def test_getter_and_setter_are_two_targets(patched, run):
    setter = "@config.override_method('A.p.setter')\ndef f(self, value):\n    self.q = [value]\n"
    both = setter + "@config.override_method('A.p')\ndef g(self):\n    return self.q\n"
    a = run(patched(UPSTREAM, setter))["A"]()
    a.p = 1
    assert (a.p, a.q) == ("up", [1])
    a = run(patched(UPSTREAM, both))["A"]()
    a.p = 1
    assert a.p == [1]


def test_clashing_bindings_are_refused(patched):
    with pytest.raises(ReplacementError, match="staticmethod"):
        patched(UPSTREAM, "@config.override_method('A.s')\n@classmethod\ndef s(cls, x): pass\n")


@pytest.mark.parametrize("form", EMPTY)
def test_adding_methods_to_every_form_of_class(patched, run, form):
    upstream = EMPTY[form].replace("@staticmethod", "@(lambda c: c)")
    target = "O.E" if "class O" in upstream else "E"
    code = f"""
        # why added
        @config.add_method("{target}.m")
        def first(self):
            return 1

        @config.add_method("{target}.n")
        def n(self):
            return self.m() + 1
    """
    result = patched(upstream, code)
    kind = run(result)["E"]
    assert (kind().m(), kind().n(), kind.__mro__[1]) == (1, 2, dict)
    assert result.text.count("# why") == upstream.count("# why") + 1
    assert kind.__doc__ == ("Doc." if "Doc." in upstream else None)
    assert "\r" not in result.text.replace("\r\n", "") and ("\r\n" in upstream) == ("\r\n" in result.text)
    assert [one.kind for one in result.report.applied] == ["method_addition"] * 2


@pytest.mark.parametrize("form", ["pass", "inline pass", "docstring", "inline with comment"])
def test_result_reads_well(patched, form):
    result = patched(EMPTY[form], "@config.add_method('E.m')\ndef m(self): pass\n")
    assert (
        result.plain
        == {
            "pass": "class E(dict):\n    def m(self): pass\n",
            "inline pass": "class E(dict):\n    def m(self): pass\n",
            "docstring": 'class E(dict):\n    """Doc."""\n\n    def m(self): pass\n',
            "inline with comment": "class E(dict):  # why\n    def m(self): pass\n",
        }[form]
    )


@pytest.mark.parametrize(
    ("verb", "target", "nearest"),
    [
        ("override_method", "A.mm", "A.m"), ("override_method", "B.m", None),
        ("override_method", "Aa.m", "A"), ("override_method", "A.z", None),
        ("override_method", "A.p.deleter", None), ("override_method", "m", None),
        ("add_method", "A.m", "A.m"), 
        ("add_method", "Bb.new", None),
    ],
)  # fmt: skip
def test_wrong_targets(patched, verb, target, nearest):
    with pytest.raises(PatchTargetError) as caught:
        patched(UPSTREAM, f"@config.{verb}('{target}')\ndef f(self): pass\n")
    error = caught.value
    assert error.target == target
    assert "pkg.upstream (pkg 1.0" in error.where and "config_of_test" in error.where
    if nearest:
        assert nearest in error.nearest
        assert nearest in str(error)


def test_one_name_in_two_branches_is_refused(patched):
    upstream = "class A:\n    if 1:\n        def m(self): pass\n    else:\n        def m(self): pass\n"
    with pytest.raises(PatchTargetError, match="lines 3, 5"):
        patched(upstream, "@config.override_method('A.m')\ndef f(self): pass\n")


def test_dropped_parameter(patched, run):
    code = "@config.override_method('A.m'{})\ndef f(self, x): return x\n"
    with pytest.raises(SignatureError, match="drops y"):
        patched(UPSTREAM, code.format(""))
    allowed = code.format(", allow_signature_change=True")
    assert run(patched(UPSTREAM, allowed))["A"]().m(1) == ("deco", 1)


def test_class_as_method_is_refused(patched):
    for verb, target in (("add_method", "A.n"), ("override_method", "A.m")):
        with pytest.raises(ReplacementError):
            patched(UPSTREAM, f"@config.{verb}('{target}')\nclass C: pass\n")


def test_external_methods(patched, run):
    code = """
        add = lambda kind, target: config.add_patch(create_patch_from_external(target, "operator", "index", kind))
        add(PatchType.METHOD_ADDITION, "A.n")
        add(PatchType.METHOD_OVERRIDE, "A.m")
    """
    a = run(patched(UPSTREAM, code))["A"]
    assert a.n(3) == 3
    assert a.m(3) == ("deco", 3)  # upstream's decorator is applied to the imported function
