"""Decays of linear attention, of heads and of channels: the forms of upstream's modules, and what is near them."""

import pytest
import torch

from tests.patches.idioms.applied import assert_missed, assert_routed, class_of, compared, executed, sites_of
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.patches.idioms import log_decay

DECAY = "g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)\n"
# Body of forward(self, x), the variant, and the call of the kernel.
ROUTED = {
    "beside": (
        "a, b = self.a_proj(x), self.b_proj(x)\nbeta = b.sigmoid()\n" + DECAY,
        "softplus_and_sigmoid",
        "beta, g = kernel(a, self.A_log, self.dt_bias, b)",
    ),
    "a call": (
        "beta = self.b_proj(x).sigmoid()\nbeta = beta * 2.0\n"
        + DECAY.replace("a.float", "self.a_proj(x).float"),
        "softplus",
        "g = kernel(self.a_proj(x), self.A_log, self.dt_bias)",
    ),
    "another sigmoid": (
        "a, b = self.a_proj(x), self.b_proj(x)\nbeta = b.sigmoid() * 2\n" + DECAY,
        "softplus",
        "g = kernel(a, self.A_log, self.dt_bias)",
    ),
    "the sigmoid is used": (
        "a, b = self.a_proj(x), self.b_proj(x)\nbeta = b.sigmoid()\n"
        + DECAY.replace("a.float", "(a * beta).float"),
        "softplus",
        "g = kernel(a * beta, self.A_log, self.dt_bias)",
    ),
}
NEAR_MISSES = {
    "not float32": DECAY.replace("a.float()", "a"),
    "another sign": DECAY.replace("g = -", "g = "),
    "another threshold": DECAY.replace("self.dt_bias)", "self.dt_bias, threshold=10.0)"),
    "no rate in float32": DECAY.replace("self.A_log.float()", "self.A_log"),
}


# As in Kimi-Linear, GLM-5-Next and Bailing-Hybrid: body, shape of A_log, variant, the end of the kernel's call.
FLAT = """
shape = (*x.shape[:2], -1, 4)
a = self.a_proj(x)
g = (a.float() + self.dt_bias.float().view(1, 1, -1)).view(shape)
A_log = self.A_log.float()
rate = torch.exp(A_log)
softplus = torch.where(g > 20.0, g, torch.log(1.0 + torch.exp(g)))
return -rate * softplus
"""
BOUND = FLAT.replace("self.A_log.float()", "self.A_log.float().view(1, 1, self.heads, 1)").replace(
    "softplus = ", "if self.lower is not None:\n    return self.lower * torch.sigmoid(rate * g)\nsoftplus = "
)
ROUNDED = """
shape = (*x.shape[:2], self.heads, 4)
g = self.a_proj(x).float().view(shape)
g = g + self.dt_bias.view(1, 1, self.heads, 4)
rate = self.A_log.exp().view(1, 1, self.heads, 1)
if self.safe:
    g = self.lower * torch.sigmoid(rate * g)
else:
    g = -rate * F.softplus(g)
return g.to(x.dtype)
"""
CHANNELS = {
    "flat": (FLAT, "1, 1, 3, 1", "channels", "kernel(a.reshape(shape), self.A_log, self.dt_bias, None, False, None)"),
    "a bound": (
        BOUND,
        "3",
        "channels",
        "kernel(a.reshape(shape), self.A_log.view(1, 1, self.heads, 1), self.dt_bias, None,"
        " self.lower is not None, self.lower)",
    ),
    "rounded": (
        ROUNDED,
        "3",
        "channels_rounded_rate",
        "kernel(self.a_proj(x).reshape(shape), self.A_log.view(1, 1, self.heads, 1), self.dt_bias, x.dtype,"
        " self.safe, self.lower)",
    ),
    "always bounded": (
        FLAT.replace("-rate * softplus", "-5.0 * torch.sigmoid(g * rate)"),
        "1, 1, 3, 1",
        "channels",
        "kernel(a.reshape(shape), self.A_log, self.dt_bias, None, True, -5.0)",
    ),
}  # fmt: skip
NEAR_CHANNELS = {
    "another sign": FLAT.replace("-rate *", "rate *"),
    "another threshold": FLAT.replace("20.0", "10.0"),
    "log(2 + exp)": FLAT.replace("log(1.0", "log(2.0"),
    "a rate for each channel": BOUND.replace("view(1, 1, self.heads, 1)", "view(1, 1, 1, self.heads)"),
    "no bias": FLAT.replace("a.float() + self.dt_bias.float().view(1, 1, -1)", "a.float() * self.dt_bias"),
    "a bias of another shape": FLAT.replace("view(1, 1, -1)", "view(1, 1, -1, 1)"),
    "two bounds": BOUND.replace(
        "softplus = ", "if self.safe:\n    return -9.0 * torch.sigmoid(rate * g)\nsoftplus = "
    ),
    "another rate below a bound": BOUND.replace("sigmoid(rate * g)", "sigmoid(g * 2.0)"),
}


X = (2, 4, 5)
OF_HEADS = """
self.a_proj, self.b_proj = nn.Linear(5, 3), nn.Linear(5, 3)
self.A_log, self.dt_bias = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
"""
OF_CHANNELS = """
self.heads, self.lower, self.safe = 3, lower, lower is not None
self.a_proj, self.A_log = nn.Linear(5, 12), nn.Parameter(torch.randn(SHAPE))
self.dt_bias = nn.Parameter(torch.randn(12))
"""


def module(body, setup=OF_HEADS):
    return class_of("Some", setup, "forward(self, x)", body, arguments=", lower=None")


def of_heads(body):
    return module(body + "return beta, g")


def of_channels(body, shape="1, 1, 3, 1"):
    return module(body, OF_CHANNELS.replace("SHAPE", shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("name", ROUTED)
def test_the_guarded_path_is_the_upstream_one(name, backend, dtype):
    set_choice(f"log_decay={backend}")
    body, variant, call = ROUTED[name]
    text = of_heads(body)
    assert_routed(log_decay, text, variant, "Some.forward", call)
    outcomes = compared(text, sites_of(log_decay, text), "Some", [X], dtype=dtype)
    assert outcomes["log_decay"].backend == backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lower", [None, -5.0])
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("name", CHANNELS)
def test_the_guarded_path_of_channels(name, backend, lower, dtype):
    set_choice(f"log_decay={backend}")
    body, shape, variant, call = CHANNELS[name]
    text = of_channels(body, shape)
    assert_routed(log_decay, text, variant, "Some.forward", f"return {call}")
    # The logarithm of 1 + exp(g) rounds more than torch's softplus.
    exact = (
        "where" not in text or "sigmoid(g * rate)" in text or ("is not None:" in text and lower is not None)
    )
    outcomes = compared(
        text, sites_of(log_decay, text), "Some", [X], arguments=(lower,), dtype=dtype,
        every=0.0 if exact else 1e-5 if dtype is torch.float32 else 2e-2,
    )  # fmt: skip
    assert outcomes["log_decay"].backend == backend


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    assert_missed(log_decay, of_heads("a = self.a_proj(x)\nbeta = x\n" + NEAR_MISSES[name]))


@pytest.mark.parametrize("name", NEAR_CHANNELS)
def test_near_misses_of_channels(name):
    assert_missed(log_decay, of_channels(NEAR_CHANNELS[name]))


def test_what_is_no_candidate():
    assert not sites_of(log_decay, of_heads("beta = x\ng = F.softplus(self.a_proj(x))\n"))
    assert not sites_of(log_decay, of_channels(FLAT).replace("def forward", "def weights"))
    assert not sites_of(log_decay, of_channels(FLAT).replace("dt_bias", "bias"))


def test_a_bound_that_is_no_number_is_upstreams():
    set_choice("log_decay=reference")
    text = of_channels(ROUNDED, "3")
    scope = executed(text, sites_of(log_decay, text))
    model = scope["Some"](-5.0)
    model.lower = None
    with pytest.raises(TypeError):
        model(torch.randn(X))
    model.lower = nn_parameter = torch.nn.Parameter(torch.tensor(-5.0))
    model(torch.randn(X)).sum().backward()
    assert nn_parameter.grad is not None
