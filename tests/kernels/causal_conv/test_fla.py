"""flash-linear-attention's convolution by name: what its function is called with; on a GPU, the function."""

import sys
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

from tests.kernels.matching import assert_matches, close
from veomni_hook.kernels.causal_conv import fla, reference
from veomni_hook.kernels.selection.registry import registry

BOUNDS = torch.tensor([0, 3, 3, 9, 18], dtype=torch.int32)


def strict(x, weight, bias, activation, cu_seqlens):
    """What flash-linear-attention 0.6.0 takes, computed by the formula."""
    assert x.is_contiguous() and weight.is_contiguous() and x.shape[2] == weight.shape[0]
    assert cu_seqlens is None or (len(x) == 1 and cu_seqlens.dtype is torch.int64)
    return reference.depthwise(x.transpose(1, 2), weight, bias, activation, cu_seqlens).transpose(1, 2), None


@pytest.fixture
def package(monkeypatch):
    for name in ("fla", "fla.modules", "fla.modules.causal_conv1d"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["fla.modules.causal_conv1d"], "causal_conv1d", strict, raising=False)


def operands(*, bias=True):
    torch.manual_seed(4)
    return [torch.randn(2, 5, 9), torch.randn(5, 4), *([torch.randn(5)] * bias)]


@pytest.mark.parametrize("activation", ["silu", "swish", None])
@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["rows", "samples"])
@pytest.mark.parametrize("bias", [True, False])
def test_what_the_function_gets(bias, bounds, activation, package):
    def run(home):
        return lambda x, weight, bias=None: home.depthwise(x, weight, bias, activation, bounds)

    assert_matches(run(fla), run(reference), operands(bias=bias))
    x, *rest = operands(bias=bias)
    assert_matches(run(fla), run(reference), [x.transpose(1, 2).contiguous().transpose(1, 2), *rest])


def test_it_runs_by_name_only():
    (kernel,) = [each for each in registry.kernels("causal_conv", "depthwise") if each.backend == "fla"]
    assert not kernel.automatic and kernel.requires.distributions == ("fla_core",)


@pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("fla") is None, reason="needs a GPU and fla-core"
)
@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["rows", "samples"])
def test_the_package_itself(bounds):
    tensors = [each.cuda().bfloat16() for each in operands()]
    ends = None if bounds is None else bounds.cuda()
    found, expected = (home.depthwise(*tensors, "silu", ends) for home in (fla, reference))
    close(found.float(), expected.float(), 2e-2)
