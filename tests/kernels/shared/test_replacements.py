"""Functions that users put in place of upstream's, and whether upstream's runs below them."""

import functools
import sys
from types import ModuleType, SimpleNamespace

import pytest
from transformers.integrations import hub_kernels
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

from veomni_hook.kernels.shared.hub_functions import running
from veomni_hook.kernels.shared.replacements import reached_upstream

if (DECORATOR := getattr(hub_kernels, "use_kernel_func_from_hub_with_fallback", None)) is None:
    pytest.skip("this release declares no functions", allow_module_level=True)
OWNER = SimpleNamespace()
RULE = running(torch_chunk_gated_delta_rule)
WRAPPED = functools.wraps(RULE)(lambda *args, **kwargs: None)


def by_global(*args, cu_seqlens=None):
    return torch_chunk_gated_delta_rule(*args)


def by_module(*args, cu_seqlens=None):
    return modeling_qwen3_next.torch_chunk_gated_delta_rule(*args)


def by_helper(*args, cu_seqlens=None):
    return by_global(*args)


def by_default(*args, cu_seqlens=None, function=torch_chunk_gated_delta_rule):
    return function(*args)


def within(*args, cu_seqlens=None):
    def inner():
        return torch_chunk_gated_delta_rule(*args)

    return inner()


def closing(function):
    def closed(*args, cu_seqlens=None):
        return function(*args)

    return closed


class Held:
    def __init__(self, function):
        self.function = function

    def __call__(self, *args, cu_seqlens=None):
        return self.function(*args)

    def method(self, *args, cu_seqlens=None):
        return self.function(*args)


FOUND = {
    "global": by_global,
    "module": by_module,
    "helper": by_helper,
    "default": by_default,
    "inner function": within,
    "closure": closing(torch_chunk_gated_delta_rule),
    "closure of a closure": closing(closing(RULE)),
    "partial": functools.partial(torch_chunk_gated_delta_rule, chunk_size=32),
    "partial argument": functools.partial(by_default, function=torch_chunk_gated_delta_rule),
    "object": Held(torch_chunk_gated_delta_rule),
    "method": Held(torch_chunk_gated_delta_rule).method,
    "wrapped": WRAPPED,
}


@pytest.mark.parametrize("name", FOUND)
def test_upstreams_code_below_a_replacement(name):
    assert reached_upstream(FOUND[name], OWNER) is RULE


def test_upstreams_convolution_is_found():
    assert reached_upstream(closing(causal_conv1d_fn), OWNER) is running(causal_conv1d_fn)


def own(*args, cu_seqlens=None):
    """Uses a helper of upstream's, and nothing that mixes positions."""
    return modeling_qwen3_next.l2norm(args[0]), own


@pytest.mark.parametrize("function", [own, closing(own), functools.partial(own), Held(own), closing(len)])
def test_other_functions_are_the_users(function):
    assert reached_upstream(function, OWNER) is None


def test_a_packages_function_that_runs_in_upstreams_is_not_upstreams(monkeypatch):
    package = ModuleType("fla")
    package.chunk_gated_delta_rule = own
    monkeypatch.setitem(sys.modules, "fla", package)
    installed = DECORATOR("chunk_gated_delta_rule", "fla")(RULE)
    assert running(installed) is own
    assert reached_upstream(closing(installed), OWNER) is None
