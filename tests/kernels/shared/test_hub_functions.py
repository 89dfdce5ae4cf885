"""What runs in place of functions that transformers lets a package or the hub replace."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers.integrations import hub_kernels
from transformers.models.qwen3_next import modeling_qwen3_next as upstream

from veomni_hook.kernels.shared.hub_functions import Held, is_upstreams, running, takes, yields

DECORATOR = getattr(hub_kernels, "use_kernel_func_from_hub_with_fallback", None)
declared = pytest.mark.skipif(DECORATOR is None, reason="this release declares no functions")
OWNER = SimpleNamespace()
WITHOUT_PACKAGE = upstream.causal_conv1d_fn


def packages(hidden_states, weight, seq_idx=None):
    """Stands for a package's function."""


@pytest.fixture
def with_package(monkeypatch):
    """Transformers' function where the package is installed."""
    module = ModuleType("causal_conv1d")
    module.causal_conv1d_fn = packages
    monkeypatch.setitem(sys.modules, "causal_conv1d", module)
    own = running(WITHOUT_PACKAGE)
    if DECORATOR is None:
        pytest.skip("this release declares no functions")
    return DECORATOR("causal_conv1d_fn", "causal_conv1d")(own)


def test_a_function_that_a_layer_holds_is_upstreams_choice_and_runs():
    held = Held(packages)
    assert running(held) is packages and is_upstreams(held, OWNER) and not is_upstreams(packages, OWNER)
    assert yields(OWNER, 1, held) == f"{__name__}.packages computes it"
    assert Held(lambda *given, **named: (given, named))(1, x=2) == ((1,), {"x": 2})


@declared
def test_without_the_package_upstreams_body_runs():
    own = running(WITHOUT_PACKAGE)
    assert own.__code__.co_filename == upstream.__file__ and own is not WITHOUT_PACKAGE
    assert is_upstreams(WITHOUT_PACKAGE, OWNER) and is_upstreams(own, OWNER)
    assert yields(OWNER, None, WITHOUT_PACKAGE) is None


def test_the_packages_function_runs_and_auto_yields_to_it(with_package):
    assert running(with_package) is packages
    assert is_upstreams(with_package, OWNER) and not is_upstreams(packages, OWNER)
    assert yields(OWNER, None, with_package) == f"{__name__}.packages computes it"


def test_a_replaced_function_is_not_upstreams():
    assert not is_upstreams(packages, OWNER) and running(packages) is packages
    assert is_upstreams(packages, type("Layer", (), {"__module__": __name__})())


def of_hub(function):
    """What the package ``kernels`` makes of a function."""

    class Func(torch.nn.Module):
        kernel_layer_name = "causal_conv1d_fn"

        def forward(self, *args, **kwargs):
            return function(*args, **kwargs)

    return Func()


def test_a_kernel_of_the_hub_runs_once_it_is_installed(with_package):
    made = of_hub(WITHOUT_PACKAGE)
    assert running(made) is running(WITHOUT_PACKAGE) and is_upstreams(made, OWNER)
    assert running(of_hub(with_package)) is packages
    made.forward = packages
    assert running(made) is packages
    assert yields(OWNER, made) == f"{__name__}.packages computes it"


def test_parameters():
    assert takes(packages, "seq_idx") and not takes(packages, "cu_seqlens")
    assert not takes(torch.relu, "seq_idx")
