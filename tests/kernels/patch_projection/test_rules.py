"""Which calls of a convolution run as upstream's code, and why."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from veomni_hook.kernels.patch_projection import rules


def made(prepare=lambda convolution: None, kind=nn.Conv2d, **changes):
    convolution = kind(**{"in_channels": 3, "out_channels": 5, "kernel_size": 4, "stride": 4, **changes})
    prepare(convolution)
    return convolution


def setting(name, value):
    return made(lambda convolution: setattr(convolution, name, value))


class Other(nn.Conv2d):
    pass


X = torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize(
    "convolution",
    [
        made(),
        made(bias=False),
        made(padding="valid"),
        made(padding_mode="reflect"),
        made(kernel_size=(4, 2), stride=(4, 2)),
        made(lambda each: each.to(memory_format=torch.channels_last)),
    ],
    ids=["usual", "no bias", "valid", "no values to reflect", "two sizes", "channels last"],
)
def test_accepts(convolution):
    assert rules.refuses(None, X, convolution) is None


@pytest.mark.parametrize(
    ("convolution", "reason"),
    [
        (Other(3, 5, 4, 4), "Other, not torch's"),
        (nn.Linear(3, 5), "Linear, not torch's"),
        (nn.ConvTranspose2d(3, 5, 4, 4), "ConvTranspose2d, not torch's"),
        (nn.LazyConv2d(5, 4, 4), "LazyConv2d, not torch's"),
        (None, "NoneType, not torch's"),
        (made(lambda each: each.register_forward_hook(lambda *_: None)), "has hooks"),
        (made(lambda each: each.register_forward_pre_hook(lambda *_: None)), "has hooks"),
        (made(lambda each: each.register_full_backward_hook(lambda *_: None)), "has hooks"),
        (setting("forward", lambda x: x), "has its own forward"),
        (setting("_conv_forward", lambda x, weight, bias: x), "Conv2d._conv_forward was replaced"),
        (made(lambda each: each.compile()), "is compiled separately"),
        (made(lambda each: nn.utils.parametrizations.weight_norm(each)), "not torch's"),
        (made(lambda each: nn.utils.spectral_norm(each)), "has hooks"),
        (made(stride=2), "stride is (2, 2), its kernel (4, 4)"),
        (made(stride=(4, 2)), "stride is (4, 2), its kernel (4, 4)"),
        (made(padding=1), "pads its input by (1, 1)"),
        (made(padding=(0, 1)), "pads its input by (0, 1)"),
        (made(kernel_size=1, stride=1, padding="same"), "pads its input by same"),
        (made(dilation=2), "has dilation (2, 2)"),
        (made(in_channels=6, groups=3, out_channels=6), "has 3 groups"),
        (made(dtype=torch.float64), "the weight has dtype torch.float64, the input torch.float32"),
        (made(device="meta"), "the weight is on meta, the input on cpu"),
        (made(in_channels=2), "the weight has shape (5, 2, 4, 4) instead of (5, 3, 4, 4)"),
        (setting("bias", nn.Parameter(torch.ones(4))), "the bias has shape (4,) instead of (5,)"),
        (setting("bias", nn.Parameter(torch.ones(5).half())), "the bias has dtype torch.float16"),
        (setting("weight", nn.Parameter(torch.empty(0))), "the weight has shape (0,)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_refuses_convolutions(convolution, reason):
    assert rules.refuses(None, X, made()) is None
    assert reason in rules.refuses(None, X, convolution)


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (X[0], "of 3 dimensions"),
        (X[None], "of 5 dimensions"),
        (X.int(), "torch.int32"),
        (X.to(torch.complex64), "torch.complex64"),
        (X.to_sparse(), "torch.sparse_coo tensor"),
        (X[..., :3], "smaller than the kernel"),
        (X[:, :2], "the weight has shape (5, 3, 4, 4) instead of (5, 2, 4, 4)"),
        (X.bfloat16(), "the weight has dtype torch.float32, the input torch.bfloat16"),
        (nn.Parameter(X).as_subclass(type("Sub", (torch.Tensor,), {})), "an operand is a Sub"),
        (1.0, "an operand is a float"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses_inputs(x, reason):
    assert reason in rules.refuses(None, x, made())


def test_refuses_parameters_that_are_not_plain():
    weight = torch.ones(5, 3, 4, 4).as_subclass(type("Sharded", (torch.Tensor,), {}))
    convolution = made(lambda each: each._parameters.__setitem__("weight", weight))
    assert "an operand is a Sharded" in rules.refuses(None, X, convolution)


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_refuses_where_torchs_own_code_was_replaced(kind, monkeypatch):
    convolution = made(kind=kind)
    x = torch.randn(2, 3, *(4 for _ in convolution.kernel_size))
    places = {
        "forward": (kind, lambda self, x: x),
        "_conv_forward": (kind, lambda self, x, weight, bias: x),
        kind.__name__.lower(): (nn.functional, lambda *_: x),
    }
    for name, (place, replacement) in places.items():
        assert rules.refuses(None, x, convolution) is None
        with monkeypatch.context() as patched:
            patched.setattr(place, name, replacement)
            assert f"{name} was replaced" in rules.refuses(None, x, convolution)


@pytest.mark.parametrize(
    ("dtypes", "refused"),
    [
        ((torch.float32, torch.bfloat16), False),
        ((torch.float64, torch.float64), False),
        ((torch.float64, torch.float32), True),
        ((torch.float32, torch.float64), True),
    ],
    ids=str,
)
def test_autocast_converts_only_what_is_smaller_than_float64(dtypes, refused):
    convolution = made(dtype=dtypes[1])
    with torch.autocast("cpu", torch.bfloat16):
        assert (rules.refuses(None, X.to(dtypes[0]), convolution) is not None) == refused


def test_refuses_in_transforms_of_functions():
    convolution, reasons = made(), []
    torch.func.vmap(lambda x: reasons.append(rules.refuses(None, x, convolution)) or x)(X[None])
    assert "torch.func transform" in reasons[0]


def test_several_blocks_lose_on_a_cpu():
    assert rules.loses(None, X[..., :4, :4], made()) is None
    for x in (X, X[..., :4], X[..., :4, :5]):
        assert "several blocks" in rules.loses(None, x, made())
        on_a_gpu = SimpleNamespace(is_cuda=True, shape=x.shape, dtype=torch.bfloat16)
        assert rules.loses(None, on_a_gpu, made()) is None
