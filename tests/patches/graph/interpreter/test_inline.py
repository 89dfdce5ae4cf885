"""Functions and methods of the file are followed, unless they may be replaced or overridden."""

import pytest

from tests.patches.graph.code import form, method_form, one
from veomni_hook.patches.graph import digest

HALF = "x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]"
ROTARY = "def f(q, cos, sin):\n    return q * cos + turn(q) * sin\n"


def rotary(helper):
    return digest(form(f"def turn(x):\n    {HALF}\n    {helper}\n{ROTARY}"))


def test_the_helper_is_part_of_the_form():
    plain = rotary("return torch.cat((-x2, x1), dim=-1)")
    assert plain == rotary("y = torch.concat([-x2, x1], -1)\n    return y")
    others = [
        rotary("return torch.cat((x2, -x1), dim=-1)"),
        rotary("return torch.cat((x1, -x2), dim=-1)"),
        rotary("return torch.stack((-x2, x1), dim=-1).flatten(-2)"),
        digest(
            form(
                f"def turn(x):\n    x1, x2 = x[..., ::2], x[..., 1::2]\n    return torch.cat((-x2, x1), -1)\n{ROTARY}"
            )
        ),
        digest(
            form(
                f"def turn(x):\n    x1, x2 = x[..., ::2], x[..., 1::2]\n    return torch.stack((-x2, x1), -1).flatten(-2)\n{ROTARY}"
            )
        ),
    ]
    assert len({plain, *others}) == 6


@pytest.mark.parametrize("call", ["h(x, y)", "h(x, b=y)", "h(*(x, y))", "h(x, y, c=None)", "h(x, y, *())"])
def test_arguments_find_their_parameters(call):
    helper = "def h(a, b, c=None):\n    if c is not None:\n        return c\n    return a - b\n"
    assert digest(form(f"{helper}def f(x, y):\n    return {call}\n")) == digest(form(one("x - y", "x, y")))


@pytest.mark.parametrize("call", ["h(x, y, y)", "h(x)", "h(*x)", "h(**x)"])
def test_a_call_that_does_not_fit_is_not_followed(call):
    assert form(f"def h(a, b):\n    return a - b\ndef f(x, y):\n    return {call}\n").result.op == "call"


@pytest.mark.parametrize(
    "helper",
    [
        "@wrapped\ndef h(a):\n    return a - 1\n",
        "async def h(a):\n    return a - 1\n",
        "def h(a):\n    while a:\n        a = a - 1\n    return a\n",
        "def h(a):\n    return h(a)\n",
        "def h(a):\n    yield a\n",
        "def h(a):\n    return a - 1\nh = wrapped(h)\n",
        "def h(a):\n    return a - 1\ndef h(a):\n    return a - 2\n",
        "def h(a):\n    return a - 1\ndef g():\n    global h\n    h = None\n",
        "def h(a):\n    raise ValueError\n",
    ],
)
def test_a_function_that_may_be_another_is_not_followed(helper):
    assert form(f"{helper}def f(x):\n    return h(x)\n").result.op == "call"


def test_a_function_that_is_not_followed_leaves_no_trace():
    helper = "def h(a, g):\n    g(a)\n    while a:\n        pass\n    return a\n"
    found = form(f"{helper}def f(x, g):\n    return h(x, g)\n")
    assert not found.effects
    assert not found.inlined


NORM = """
class A(Base):
    def _norm(self, x):
        return x - x.mean(-1, keepdim=True)

    def forward(self, x):
        return self._norm(x.float())
"""


def test_methods_are_followed():
    found = method_form(NORM, "A")
    assert found.inlined == ("A._norm",)
    assert digest(found) == digest(form(one("x.float() - x.float().mean(-1, keepdim=True)")))


def test_a_method_that_a_class_of_the_file_overrides_is_not_followed():
    overriding = f"{NORM}class B(A):\n    def _norm(self, x):\n        return x\n"
    assert method_form(overriding, "A").result.op == "call"
    deeper = f"{NORM}class B(A):\n    pass\nclass C(B):\n    def _norm(self, x):\n        return x\n"
    assert method_form(deeper, "A").result.op == "call"


def test_a_method_of_a_class_elsewhere_is_not_followed():
    text = "class M(Base):\n    def forward(self, x):\n        return self._norm(x)\n"
    assert method_form(text).result.op == "call"
    between = f"{NORM}class B(Other):\n    pass\nclass M(B):\n    def forward(self, x):\n        return self._norm(x)\n"
    assert method_form(between).result.op == "call"
    mixed = f"{NORM}class M(Mixin, A):\n    def forward(self, x):\n        return self._norm(x)\n"
    assert method_form(mixed).result.op == "call"


def test_super_goes_to_the_base_class():
    text = f"{NORM}class B(A):\n    def forward(self, x):\n        return super().forward(x) * 2\n"
    found = method_form(text, "B")
    assert set(found.inlined) == {"A.forward", "A._norm"}


def test_static_methods_and_other_receivers():
    text = """
    class M(nn.Module):
        @staticmethod
        def half(x):
            return x / 2

        def forward(this, x):
            return this.half(x) * this.weight
    """
    found = method_form(text)
    assert found.receiver == "this"
    assert digest(found) == digest(
        method_form("class M:\n    def forward(self, x):\n        return x / 2 * self.w\n")
    )


def test_what_a_method_has_set_hides_a_method():
    text = f"{NORM}class M(A):\n    def forward(self, x, g):\n        self._norm = g\n        return self._norm(x)\n"
    assert repr(method_form(text).result).startswith("g(x")
