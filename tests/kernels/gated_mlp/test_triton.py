"""The Triton kernels: through the interpreter on a CPU (conftest sets it up), compiled on a GPU."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from tests.kernels import declared
from tests.kernels.contract import DTYPES, call_of
from tests.kernels.gated_mlp.cases import NUMBERS
from tests.kernels.matching import DEVICE
from veomni_hook.kernels.gated_mlp import reference
from veomni_hook.kernels.gated_mlp.variants import OP
from veomni_hook.kernels.shared.activations import FUNCTIONS

pytest.importorskip("triton")

from veomni_hook.kernels.gated_mlp import triton as kernels


def call(variant, activation=functional.silu, size=(4, 6), *of, **changed):
    """A call with another activation, where there is one."""
    chosen = {} if variant == "scaled_sigmoid" else {"activation": lambda _: activation}
    return call_of("gated_mlp", variant, "triton", size, *of, **chosen, **changed)


def skip_where_a_limit_is_missed(variant, name, dtype):
    """The interpreter cuts float32 off where bfloat16 is rounded, which moves an activation past its limit.

    After a dozen steps, it is as far from a GPU's as a limit is.
    """
    missed = variant == "clamped_after" or (variant == "clamped" and name.startswith("gelu_tanh_"))
    if missed and dtype is torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("the interpreter does not round to bfloat16")


def random(*shape, dtype=torch.float32):
    return torch.randn(shape).mul(2).to(DEVICE, dtype)


def test_declared():
    fused = declared.kernels("gated_mlp", "triton")
    assert fused.keys() == OP.variants.keys()
    assert all(kernel.priority == 10 and kernel.loses is None for kernel in fused.values())
    assert list(kernels.ACTIVATIONS) == list(FUNCTIONS)


#: What transformers calls them.
CALLED = {
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu_squared": "relu2",
    "gelu_tanh_cubed": "gelu_new",
    "gelu_tanh_factored": "gelu_fast",
}


@pytest.mark.sample(14)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("variant", ["product", "product_float32", "clamped", "clamped_after"])
def test_every_activation(variant, name, dtype):
    skip_where_a_limit_is_missed(variant, name, dtype)
    call(variant, ACT2FN[CALLED.get(name, name)], (33, 70), dtype).matches()


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("variant", "name"),
    [*((v, n) for v in OP.variants if v != "scaled_sigmoid" for n in FUNCTIONS), ("scaled_sigmoid", "silu")],
)
def test_rounds_where_upstream_does(variant, name):
    """In float16, where the interpreter rounds as a device does, nearly all bits are upstream's."""
    made, dy = (
        call(variant, FUNCTIONS[name], (128, 128), torch.float16),
        random(128, 128, dtype=torch.float16),
    )
    found = []
    for function in (made.ours, made.theirs):
        leaves = [x.detach().requires_grad_() for x in made.tensors]
        y = function(*leaves)
        found.append([y, *torch.autograd.grad(y, leaves, dy)])
    for ours, truth in zip(*found, strict=True):
        # Where a GELU is next to nothing, 1 + tanh and 1 + erf have lost digits, upstream's other ones. A GPU's
        # gradient of the sigmoid rounds once, a CPU's at every step; with tanh it is the other way round.
        if DEVICE == "cpu" and name.startswith("gelu_tanh_"):
            limit = 0.5
        elif DEVICE == "cuda" and (name == "quick_gelu" or variant == "scaled_sigmoid"):
            limit = 0.3
        else:
            limit = 3e-2 if "gelu" in name else 1e-3
        assert (ours != truth).float().mean() < limit


def test_numbers_far_out():
    gate = torch.tensor([-3e4, -100.0, -20.0, 0.0, 20.0, 100.0, 3e4, torch.nan], device=DEVICE)
    up = torch.full_like(gate, 1.5)
    for name in FUNCTIONS:
        made = call("product", FUNCTIONS[name])
        torch.testing.assert_close(made.ours(gate, up), made.theirs(gate, up), equal_nan=True)
    for variant in ("clamped", "clamped_after", "scaled_sigmoid"):
        made = call(variant)
        torch.testing.assert_close(made.ours(gate, up), made.theirs(gate, up), equal_nan=True)
        torch.testing.assert_close(made.ours(up, gate), made.theirs(up, gate), equal_nan=True)


@pytest.mark.parametrize("variant", ["clamped", "clamped_after", "scaled_sigmoid"])
def test_gradients_at_the_limit(variant):
    limit = NUMBERS[variant]["limit"]
    edge = torch.tensor([-limit, limit, limit + 1e-3, -limit - 1e-3], device=DEVICE)
    call(variant, gate=lambda _: edge.repeat_interleave(4), up=lambda _: edge.repeat(4)).matches()


def test_halves_of_a_projection_are_not_copied(monkeypatch):
    seen = []
    launch = kernels.device.forward

    class Spy:
        def __getitem__(self, grid):
            return lambda gate, up, *rest, **options: (
                seen.extend((gate, up)),
                launch[grid](gate, up, *rest, **options),
            )

    monkeypatch.setattr(kernels.device, "forward", Spy())
    gate, up = random(6, 32).chunk(2, dim=-1)
    kernels.product(gate, up, functional.silu)
    assert [x.data_ptr() for x in seen] == [gate.data_ptr(), up.data_ptr()]


def test_operands_that_promote_or_broadcast():
    doubled = dict.fromkeys(("gate", "up"), torch.Tensor.double)
    for change in ({"gate": torch.Tensor.bfloat16}, {"up": lambda up: up[:1]}, doubled):
        call("product", **change).matches()
    gate, up = random(4, 6), random(4, 6)
    for limit in (torch.tensor(0.5, device=DEVICE), -0.5):
        ours, truth = (f(gate, up, functional.silu, limit) for f in (kernels.clamped, reference.clamped))
        assert torch.equal(ours, truth)


@pytest.mark.sample(2)
@pytest.mark.parametrize("variant", ["product", "clamped"])
@pytest.mark.parametrize(
    "activation", [functional.silu, nn.SiLU(), ACT2FN["gelu_pytorch_tanh"]], ids=["silu", "SiLU", "GELUTanh"]
)
def test_compiles_to_one_graph(variant, activation):
    torch._dynamo.reset()
    made = call(variant, activation)
    made.ours = torch.compile(made.ours, backend="aot_eager", fullgraph=True)
    made.matches()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_takes_what_it_knows(name):
    assert kernels.refuses(nn.Module(), torch.randn(2), FUNCTIONS[name]) is None


def test_a_guard_that_names_no_activation_is_taken():
    assert kernels.refuses(nn.Module(), torch.randn(2)) is None


@pytest.mark.parametrize("activation", [nn.Identity(), ACT2FN["gelu_10"], nn.SiLU(inplace=True)])
def test_refuses_other_activations(activation):
    assert "activation" in kernels.refuses(nn.Module(), torch.randn(2), activation)


def test_refuses_under_transforms():
    seen = []

    def look(x):
        seen.append(kernels.refuses(None, x, functional.silu))
        return x * 2

    torch.func.vmap(look)(torch.randn(2, 2))
    assert "torch.func" in seen[0]
