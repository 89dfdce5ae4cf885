"""Definitions that the file itself replaces later are missed sites, with the line as reason."""

import pytest

from tests.patches.idioms.replaced_module import SOURCE, module
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.engine import Origin, patch_source
from veomni_hook.patches.idioms.recognise import recognise
from veomni_hook.patches.site import Status

LINE = module("").count("\n")  # of the first line below the definitions


def found(text):
    return {f"{site.op} {site.target}": site for site in recognise(Document(text))}


ALL = found(SOURCE)
NORMS = [
    "rms_norm SomeRMSNorm.forward",
    "add_rms_norm SomeLayer.forward",
    "qk_norm_rotary SomeAttention.forward",
]
ROTARY = ["rotary apply_rotary_pos_emb", "rotary SomeAttention.forward", NORMS[2]]
EXPERTS = ["moe_experts SomeExperts.forward"]
BALANCE = [
    "load_balancing_loss load_balancing_loss_func",
    "load_balancing_loss SomeForCausalLM.forward",
    "linear_cross_entropy SomeForCausalLM.forward",
]


def test_all_of_it_is_routed_where_nothing_is_replaced():
    assert len(ALL) == 12 and {site.op for site in ALL.values()} == {
        *("rms_norm", "add_rms_norm", "rotary", "qk_norm_rotary", "gated_mlp", "moe_experts", "moe_router"),
        *("load_balancing_loss", "linear_cross_entropy"),
    }
    assert {site.status for site in ALL.values()} == {Status.ROUTED}


METHOD = [
    "{0}.{1} = other",
    "{0}.{1} = functools.wraps({0}.{1})(other)",
    "{0}.other, {0}.{1} = {0}.{1}, None",
    "setattr({0}, '{1}', other)",
    "setattr({0}, NAME, other)",
    "type.__setattr__({0}, '{1}', other)",
    "delattr({0}, '{1}')",
    "try:\n    import kernels\nexcept ImportError:\n    pass\nelse:\n    {0}.{1} = kernels.it",
    "for each in ({0},):\n    each.{1} = other",
    "for each in ({0},):\n    setattr(each, '{1}', other)",
    "Alias = {0}\nAlias.{1} = other",
    "def change():\n    {0}.{1} = other\n\n\nchange()",
    "def change(owner):\n    owner.{1} = other\n\n\nchange({0})",
    "{0}.{1}.__code__ = other.__code__",
    "exec('{0}.{1} = other')",
]
METHODS = {
    ("SomeRMSNorm", "_norm"): NORMS,
    ("SomeRMSNorm", "forward"): NORMS,
    ("SomeMLP", "forward"): ["gated_mlp SomeMLP.forward"],
    ("SomeExperts", "_apply_gate"): EXPERTS,
    ("SomeExperts", "forward"): EXPERTS,
    ("SomeRouter", "forward"): ["moe_router SomeRouter.forward"],
    ("SomeAttention", "forward"): ROTARY[1:],
    ("SomeForCausalLM", "forward"): BALANCE[1:],
    ("SomeForSequenceClassification", "forward"): [
        "linear_cross_entropy SomeForSequenceClassification.forward"
    ],
}
NAME = [
    "{0} = other",
    "{0} = functools.wraps({0})(other)",
    "globals()['{0}'] = other",
    "globals().update({0}=other)",
    "globals().update(others)",
    "sys.modules[__name__].__dict__['{0}'] = other",
    "setattr(sys.modules[__name__], '{0}', other)",
    "sys.modules[__name__].{0} = other",
    "del {0}",
    "for {0} in others:\n    pass",
    "try:\n    pass\nexcept ValueError as {0}:\n    pass",
    "from kernels import *",
    "def change():\n    global {0}\n    {0} = other",
    "def change():\n    if FLAG:\n        global {0}\n        {0} = other",
    "def change():\n    vars(sys.modules[__name__])['{0}'] = other",
    "def change():\n    __import__(__name__).{0} = other",
    "{0}.__code__ = other.__code__",
    "exec(code)",
]
NAMES = {
    "rotate_half": ROTARY,
    "apply_rotary_pos_emb": ROTARY,
    "load_balancing_loss_func": BALANCE,
    "SomeRMSNorm": NORMS,
}


def check(below, lost, *, only):
    sites = found(module(below))
    for name in lost:
        # Without a site for the function there is none for its calls.
        if name in sites:
            assert sites[name].status is not Status.ROUTED, (name, below)
            assert not sites[name].edits and not sites[name].slots
        else:
            assert not ALL[name].counted, name
    told = "; ".join(sites[name].reason for name in lost if name in sites)
    lines = range(LINE, LINE + below.count("\n") + 1)
    assert any(f"line {line}" in told for line in lines), (told, LINE)
    if only:
        kept = {name for name, site in sites.items() if site.status is Status.ROUTED}
        assert kept == ALL.keys() - {*lost}, below


# Every form of replacement for one method, and some forms for every method.
@pytest.mark.parametrize(
    ("place", "form"),
    [(("SomeRMSNorm", "_norm"), form) for form in METHOD]
    + [(place, METHOD[number]) for place in METHODS for number in (1, 3, 4, 11, 12)],
)
def test_a_method_that_is_replaced(place, form):
    several = ("exec", "each.", "(each", "Alias.", "owner.", "NAME")
    check(form.format(*place), METHODS[place], only=not any(word in form for word in several))


@pytest.mark.parametrize(
    ("name", "form"),
    [("rotate_half", form) for form in NAME]
    + [(name, NAME[number]) for name in NAMES for number in (1, 2, 12)],
)
def test_a_name_that_is_bound_again(name, form):
    check(form.format(name), NAMES[name], only=not any(word in form for word in ("others)", "*", "exec")))


OVERRIDES = {
    "a mixin in front": "class Mixin:\n    def _norm(self, x):\n        return x / 2\n\n\nclass Sub(Mixin, SomeRMSNorm):\n    pass",
    "a mixin of another file in front": "class Sub(other.Mixin, SomeRMSNorm):\n    pass",
    "a mixin of a subclass's": (
        "class Near(SomeRMSNorm):\n    pass\n\n\nclass Mixin:\n    def _norm(self, x):\n        return x\n\n\n"
        "class Sub(Mixin, Near):\n    pass"
    ),
    "a subclass under a condition": "if FLAG:\n    class Sub(SomeRMSNorm):\n        def _norm(self, x):\n            return x",
    "a subclass that assigns it": "class Sub(SomeRMSNorm):\n    def __init__(self):\n        self._norm = other",
    "a subclass made by type": "Sub = type('Sub', (SomeRMSNorm,), {'_norm': other})",
}  # fmt: skip


@pytest.mark.parametrize("name", OVERRIDES)
def test_a_helper_that_a_class_of_the_file_overrides(name):
    check(OVERRIDES[name], NORMS, only=True)


@pytest.mark.parametrize(
    "below",
    [
        "class Sub(SomeRMSNorm, nn.Module):\n    pass",
        "class Mixin:\n    def other(self):\n        pass\n\n\nclass Sub(Mixin, SomeRMSNorm):\n    pass",
        "class Sub(SomeRMSNorm):\n    def extra_repr(self):\n        return ''",
        "SomeRMSNorm.supports = True",
        "SomeRMSNorm.__doc__ = 'norm'\nrotate_half.note = 1",
        "other.rotate_half = None\nF.silu = None",
        "for name in ('a', 'b'):\n    print(name)",
        "LAYERS = {'norm': SomeRMSNorm}\nLAYERS['rotate_half'] = rotate_half",
        "REGISTRY.append(SomeRMSNorm)",
        "def use(model):\n    model.forward = other\n    setattr(model, 'forward', other)\n    locals_ = vars(model)",
    ],
)
def test_what_replaces_nothing_costs_nothing(below):
    assert {name for name, site in found(module(below)).items() if site.status is Status.ROUTED} >= ALL.keys()


HELPER = (
    "    def _norm(self, x):\n        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)\n"
)
FORWARD = "    def forward(self, x):\n        output = self._norm(x.float())\n"
INSIDE = {
    "defined again under a condition": (HELPER, f"{HELPER}\n    if FLAG:\n        def _norm(self, x):\n            return x\n"),
    "assigned to the instance": ("        self.eps = eps\n", "        self.eps = eps\n        self._norm = other\n"),
    "an unknown decorator": ("class SomeRMSNorm(", "@other\nclass SomeRMSNorm("),
    "a metaclass": ("class SomeRMSNorm(nn.Module)", "class SomeRMSNorm(nn.Module, metaclass=Other)"),
    "attributes by code": (HELPER, f"{HELPER}\n    def __getattribute__(self, name):\n        return other(name)\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
def test_a_helper_that_its_own_class_may_replace(name):
    text = module(**dict([INSIDE[name]]))
    sites = found(text)
    for lost in NORMS:
        assert sites[lost].status is Status.MISSED, lost
    assert "line " in sites[NORMS[0]].reason
    assert {site.status for key, site in sites.items() if key not in NORMS} == {Status.ROUTED}


@pytest.mark.parametrize(
    "before",
    [
        f"{HELPER}\n    if FLAG:\n        def _norm(self, x):\n            return x\n\n{HELPER}",
        f"    _norm = None\n\n{HELPER}",
    ],
)
def test_the_last_definition_is_the_one_that_stays(before):
    assert {site.status for site in found(module(**{HELPER: before})).values()} == {Status.ROUTED}


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (FORWARD, f"    @halved\n{FORWARD}", "SomeRMSNorm.forward is decorated with halved"),
        (HELPER, f"{HELPER}\n    def __call__(self, x):\n        return super().__call__(x) / 2\n", "SomeRMSNorm defines __call__ (line "),
    ],
)  # fmt: skip
def test_a_norm_whose_call_is_more_than_its_forward_is_not_fused(old, new, reason):
    sites = found(module(**{old: new}))
    assert sites[NORMS[0]].status is Status.ROUTED
    for lost in NORMS[1:]:
        assert sites[lost].status is Status.MISSED and reason in sites[lost].reason


HEAD = "class SomeForCausalLM(nn.Module):\n"


@pytest.mark.parametrize(
    ("head", "below", "reason"),
    [
        ("    def forward(self, x):\n        return x", "", "forward"),
        ("    def __call__(self, x):\n        return super().__call__(x) / 2", "", "__call__"),
        ("    pass", "SomeHead.forward = other", "forward (set at line "),
        ("    pass", "SomeHead.__call__ = other", "__call__ (set at line "),
    ],
)
@pytest.mark.parametrize("derived", [False, True])
def test_a_head_with_a_call_of_its_own_is_left_alone(head, below, reason, derived):
    name = "Near" if derived else "SomeHead"
    classes = f"class SomeHead(nn.Linear):\n{head}\n\n\n" + (
        "class Near(SomeHead):\n    pass\n\n\n" if derived else ""
    )
    init = f"    def __init__(self, config):\n        self.lm_head = {name}(1, 2)\n\n"
    site = found(module(below, **{HEAD: classes + HEAD + init}))[BALANCE[2]]
    assert site.status is Status.MISSED and f"a Linear with a {reason}" in site.reason


def test_a_missed_site_leaves_the_text_alone():
    text = module("SomeRMSNorm._norm = other\nSomeExperts._apply_gate = other\nrotate_half = other")
    origin = Origin("pkg.modeling", "x.py", "pkg", "1")
    patched = patch_source(text, [], origin, idioms=True)
    assert "SomeRMSNorm" in patched.report.untouched and "SomeExperts" in patched.report.untouched
    assert "rotate_half may be replaced at line" in " ".join(site.reason for site in patched.report.missed)
