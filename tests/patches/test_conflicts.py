import re

import pytest

from tests.patches import doubling
from tests.patches.conftest import ORIGIN
from veomni_hook.errors import PatchConflictError, PatchTargetError
from veomni_hook.patches.code.comparison import fingerprint
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.engine import applicable, patch_source
from veomni_hook.patches.spec import PatchConfig
from veomni_hook.patches.steps import is_builtin, same_config

UPSTREAM = """\
def helper(x):
    return x

class A:
    def __init__(self):
        self.x = 1

    def m(self, x):
        return helper(x)

    @property
    def p(self): return 1

    @p.setter
    def p(self, v): pass

class B(A):
    def m(self, x):
        return 2
"""
DIGEST = fingerprint(Document(UPSTREAM).find("A.m")[0].node)
HELPER = fingerprint(Document(UPSTREAM).find("helper")[0].node)


def override(value, target="A.m"):
    return f"@config.override_method('{target}')\ndef m(self, x):\n    return {value!r}\n"


def guard(value="'guard'", options=""):
    return (
        f"@config.insert_guard('A.m', fingerprints=['{DIGEST}']{options})\n"
        f"def g(x):\n    if x == 7:\n        return {value}\n"
    )


def builtin(config):
    config.label = "veomni_hook.patches.models.tiny:config"
    return config


@pytest.mark.parametrize(
    "code",
    [
        override("a") + override("b"),
        override("a") + "@config.replace_class('A')\nclass A: pass\n",
        override("a") + "config.exclude_from_output('A')\n",
        override("a") + guard(),
        "config.exclude_from_output('helper')\n@config.replace_function('helper')\ndef h(x): return x\n",
        "@config.modify_init('A')\ndef i(o, self): o(self)\n" * 2,
        "@config.modify_init('A')\ndef i(o, self): o(self)\n@config.replace_class('A')\nclass A: pass\n",
        guard(options=f", relies_on={{'helper': ['{HELPER}']}}")
        + "@config.replace_function('helper')\ndef h(x): return x\n",
        "config.add_slot('s', op='a', variant='b')\nconfig.add_slot('s', op='a', variant='c')\n",
    ],
)
def test_conflicts_within_one_config(patched, code):
    with pytest.raises(PatchConflictError) as caught:
        patched(UPSTREAM, code)
    assert caught.value.target and caught.value.fix and "pkg.upstream" in caught.value.where


def test_conflict_between_configs_names_both_and_the_way_out(load):
    one, other = load(override("a")).config, load(override("b")).config
    with pytest.raises(PatchConflictError, match="base=") as caught:
        patch_source(UPSTREAM, [one, other], ORIGIN)
    assert one.name in caught.value.where and other.name in caught.value.where


def test_different_targets_are_no_conflict(patched, run):
    code = """
        @config.modify_init('A')
        def i(o, self):
            o(self)
            self.y = 1
        @config.override_method('A.__init__')
        def j(self): self.x = 2
        @config.override_method('A.p')
        def p(self): return 2
        @config.override_method('A.p.setter')
        def q(self, v): self.v = v
    """
    a = run(patched(UPSTREAM, code, override("b", "B.m")))["A"]()
    a.p = 3
    assert (a.x, a.y, a.p, a.v) == (2, 1, 2, 3)


def test_config_wins_against_its_base(load, run):
    base = load(override("base") + override("base B", "B.m")).config
    child = load(override("child")).config
    child.base = base
    grandchild = load("").config
    grandchild.base = child
    for configs in ([base, child], [child, base], [child], [grandchild]):
        chosen = applicable(configs, "pkg.upstream", "gpu")
        result = patch_source(UPSTREAM, chosen, ORIGIN)
        module = run(result)
        assert (module["A"]().m(1), module["B"]().m(1)) == ("child", "base B")
        assert [(one.target, one.config) for one in result.report.yielded] == [("A.m", base.name)]
        assert child.name in result.report.yielded[0].reason


def test_base_for_another_device_stays_out(load):
    base = load(override("base")).config
    base.device = "gpu"
    child = load("").config
    child.base, child.device = base, "npu"
    assert applicable([child], "pkg.upstream", "npu") == [child]


def test_builtin_gives_way_to_users(load, run):
    spec = builtin(load(guard() + "@config.add_helper\ndef unused(): pass\n").config)
    assert is_builtin(spec)
    user = load(override("user")).config
    result = patch_source(UPSTREAM, [spec, user], ORIGIN)
    assert run(result)["A"]().m(7) == "user"
    assert "unused" not in result.text  # nothing of the spec remains, so neither do its helpers
    assert [(one.kind, one.target) for one in result.report.yielded] == [("guard", "A.m")]
    assert user.name in result.report.yielded[0].reason


def test_builtin_gives_way_where_it_relies_on_what_a_user_replaces(load, run):
    spec = builtin(load(guard(options=f", relies_on={{'helper': ['{HELPER}']}}")).config)
    assert run(patch_source(UPSTREAM, [spec], ORIGIN))["A"]().m(7) == "guard"
    user = load("@config.replace_function('helper')\ndef h(x):\n    return 'user'\n").config
    result = patch_source(UPSTREAM, [spec, user], ORIGIN)
    assert run(result)["A"]().m(7) == "user"
    assert "relies on upstream's helper" in result.report.yielded[0].reason


def test_builtins_do_not_give_way_to_each_other(load):
    specs = [builtin(load(guard()).config), builtin(load(guard()).config)]
    with pytest.raises(PatchConflictError):
        patch_source(UPSTREAM, specs, ORIGIN)


def test_guards_at_two_places_of_one_method(patched, run):
    code = guard() + guard("'second'", ", before='return helper({y})'").replace("x == 7", "x == 8")
    a = run(patched(UPSTREAM, code))["A"]()
    assert [a.m(n) for n in (6, 7, 8)] == [6, "guard", "second"]


def test_rewrites_of_the_same_code_are_a_conflict(patched):
    code = "config.rewrite('A.m', pattern='helper({a})', replacement='{a}')\n"
    with pytest.raises(PatchConflictError, match="same code"):
        patched(UPSTREAM, code + code.replace("'{a}'", "'helper(helper({a}))'"))


IDIOM = "veomni_hook.patches.idioms"


def routes_left(result):
    return {one.op for one in result.report.applied if one.kind == "route"}


@pytest.mark.parametrize("tier", ["user", "built-in"])
@pytest.mark.parametrize(
    ("code", "left", "reason"),
    [
        ("@config.override_method('Double.forward')\ndef f(self, x): return 0\n", {"turn"}, "same target"),
        ("@config.replace_class('Double')\nclass C(object):\n    def forward(self, x): pass\n", {"turn"}, "as a whole"),
        ("@config.replace_function('turn')\ndef t(x, angle=1): return 0\n", {"double"}, "relies on upstream's turn"),
        ("@config.override_method('Attention.forward')\ndef f(self, x): return 0\n", {"double"}, "same target"),
        ("@config.override_method('Double.other')\ndef f(self, x): return 0\n", {"double", "turn"}, ""),
        ("@config.add_method('Double.more')\ndef f(self, x): return 0\n", {"double", "turn"}, ""),
        ("config.rewrite('Attention.forward', pattern='{y} + 10', replacement='{y} + 20')\n", {"double", "turn"}, ""),
        ("config.rewrite('Attention.forward', pattern='turn({x})', replacement='{x}')\n", {"double"}, "same target"),
        ("config.rewrite('Double.forward', pattern='x * 2', replacement='x * 4')\n", {"turn"}, "same target"),
        ("@config.insert_guard('Double.forward', fingerprints=[], before='return {a} * 2')\ndef g(x):\n    if x: return 0\n", {"turn"}, "same target"),
        ("@config.insert_guard('Attention.forward', fingerprints=[], before='return {a} + 10')\ndef g(x):\n    if x: return 0\n", {"double", "turn"}, ""),
    ],
)  # fmt: skip
def test_routes_give_way_to_what_is_named(patched, load, idioms, tier, code, left, reason):
    idioms(doubling.double, doubling.turn)
    config = load(code).config
    if tier == "built-in":
        builtin(config)
    result = patched(doubling.UPSTREAM, config, idioms=True)
    assert routes_left(result) == left
    assert {slot.op for slot in result.report.slots} == left
    yielded = result.report.yielded
    assert {one.op for one in yielded} == {"double", "turn"} - left
    for one in yielded:
        assert (
            (one.kind, one.config) == ("route", IDIOM) and reason in one.reason and config.name in one.reason
        )


def test_a_failing_patch_beside_a_route_is_told_as_ever(patched, idioms):
    idioms(doubling.double)
    code = "config.rewrite('Double.forward', pattern='absent({x})', replacement='{x}')\n"
    with pytest.raises(PatchTargetError, match="has to match once") as caught:
        patched(doubling.UPSTREAM, code, idioms=True)
    assert re.search(r"; declared in \S+:\d+ \(config_of_test", caught.value.where)


def test_same_config():
    one, made = PatchConfig("a"), object()
    adopted, again = PatchConfig("a", adopted_from=made), PatchConfig("a", adopted_from=made)
    assert same_config(one, one) and same_config(adopted, again) and same_config(adopted, made)
    assert (
        not same_config(one, PatchConfig("a"))
        and not same_config(one, adopted)
        and not same_config(None, None)
    )
