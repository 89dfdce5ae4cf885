"""What users replace of what was recognised: a kernel that would skip it does not run, and upstream's code does.

Every case replaces something in a patched model and in the installed one, which is the oracle: outputs and
gradients have to be equal, and different from those before.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode
from torch.utils._device import DeviceContext
from transformers import Gemma3TextConfig, GptOssConfig, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig
from transformers.loss import loss_utils

from tests.kernels.matching import grads_of
from tests.kernels.patched_qwen3 import SIZES, twins
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.kernels.shared.function_modes import HARMLESS
from veomni_hook.tools.report.explanation import explain

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 0, "partial_rotary_factor": 0.5,
}  # fmt: skip
TOKENS = torch.arange(24).reshape(2, 12) % 61
FAMILIES = {
    "qwen3": ("Qwen3ForCausalLM", Qwen3Config, {}),
    "gemma3": ("Gemma3ForCausalLM", Gemma3TextConfig, {"layer_types": ["full_attention"] * 2}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", Qwen3MoeConfig, MOE),
    "qwen3_next": ("Qwen3NextForCausalLM", Qwen3NextConfig, LINEAR),
    "gpt_oss": ("GptOssForCausalLM", GptOssConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.fixture(autouse=True)
def chosen():
    set_choice("torch")


def doubled(function: Callable) -> Callable:
    """A wrapper that says that it is what it wraps, and computes something else."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        result = function(*args, **kwargs)
        return tuple(2 * each for each in result) if isinstance(result, tuple) else 2 * result

    return wrapper


def on_module(name: str):
    def replace(module, model, patch):
        patch.setattr(module, name, doubled(getattr(module, name)))

    return replace


def on_class(place: str):
    def replace(module, model, patch):
        owner, method = place.split(".")
        kind = getattr(module, owner)
        patch.setattr(kind, method, doubled(getattr(kind, method)))

    return replace


def by_code(name: str):
    def replace(module, model, patch):
        function = getattr(module, name)
        other = types.FunctionType(function.__code__, function.__globals__, name, function.__defaults__)
        module.__dict__["_kept"] = other
        scope = {}
        exec("def rotate_half(x):\n    return 2 * _kept(x)", module.__dict__, scope)
        patch.setattr(function, "__code__", scope["rotate_half"].__code__)

    return replace


def in_subclass(place: str):
    def replace(module, model, patch):
        owner, method = place.split(".")
        kind = getattr(module, owner)
        derived = type(owner, (kind,), {method: doubled(getattr(kind, method))})
        for each in model.modules():
            if type(each) is kind:
                each.__class__ = derived

    return replace


def in_mixin(place: str):
    def replace(module, model, patch):
        owner, method = place.split(".")
        kind = getattr(module, owner)
        mixin = type("Mixin", (), {method: doubled(getattr(kind, method))})
        derived = type(owner, (mixin, kind), {})
        for each in model.modules():
            if type(each) is kind:
                each.__class__ = derived

    return replace


def on_instances(place: str):
    def replace(module, model, patch):
        owner, method = place.split(".")
        for each in model.modules():
            if type(each) is getattr(module, owner):
                setattr(each, method, types.MethodType(doubled(getattr(type(each), method)), each))

    return replace


def on_activation(module, model, patch):
    kind = type(model.model.layers[0].mlp.act_fn)
    patch.setattr(kind, "forward", doubled(kind.forward))


def on_head(module, model, patch):
    class Halved(nn.Linear):
        def __call__(self, x):
            return super().__call__(x) / 2

    model.lm_head.__class__ = Halved


def on_norms_call(module, model, patch):
    kind = module.Qwen3RMSNorm
    derived = type("Qwen3RMSNorm", (kind,), {"__call__": doubled(kind.__call__)})
    patch.setattr(module, "Qwen3RMSNorm", derived)
    for each in model.modules():
        if type(each) is kind:
            each.__class__ = derived


def on_activations_call(module, model, patch):
    kind = type(model.model.layers[0].mlp.act_fn)
    patch.setattr(kind, "__call__", doubled(kind.__call__), raising=False)


def on_loss(module, model, patch):
    patch.setattr(loss_utils, "fixed_cross_entropy", doubled(loss_utils.fixed_cross_entropy))


def on_cross_entropy(module, model, patch):
    patch.setattr(nn.functional, "cross_entropy", doubled(nn.functional.cross_entropy))


def on_linear(module, model, patch):
    patch.setattr(nn.Linear, "forward", doubled(nn.Linear.forward))


def by_source(name: str, old: str, new: str):
    """Another line in the source of a function, which is executed with its decorators."""

    def replace(module, model, patch):
        source = inspect.getsource(inspect.unwrap(getattr(module, name)))
        assert old in source
        exec(source.replace(old, new), scope := dict(vars(module)))
        patch.setattr(module, name, scope[name])

    return replace


def by_call_impl(find: Callable):
    def replace(module, model, patch):
        for each in find(model):
            each._call_impl = doubled(each._call_impl)

    return replace


CASES = {
    "a part of the delta rule": ("qwen3_next", on_module("l2norm")),
    "the delta rule, edited": ("qwen3_next", by_source("torch_chunk_gated_delta_rule", "** -0.5", "** -0.6")),
    "the convolution, edited": ("qwen3_next", by_source("causal_conv1d_fn", "return out", "return 2 * out")),
    "norms, by _call_impl": (
        "qwen3",
        by_call_impl(lambda model: [layer.post_attention_layernorm for layer in model.model.layers]),
    ),
    "heads' norms, by _call_impl": (
        "qwen3",
        by_call_impl(lambda model: [layer.self_attn.q_norm for layer in model.model.layers]),
    ),
    "activations, by _call_impl": (
        "qwen3",
        by_call_impl(lambda model: [layer.mlp.act_fn for layer in model.model.layers]),
    ),
    "head, by _call_impl": ("qwen3", by_call_impl(lambda model: [model.lm_head])),
    "rotary function wrapped": ("qwen3", on_module("apply_rotary_pos_emb")),
    "rotate_half wrapped": ("qwen3", on_module("rotate_half")),
    "rotate_half, its code": ("qwen3", by_code("rotate_half")),
    "norm's forward wrapped on the class": ("qwen3", on_class("Qwen3RMSNorm.forward")),
    "norm's forward, on instances": ("qwen3", on_instances("Qwen3RMSNorm.forward")),
    "norm's forward, in a subclass": ("qwen3", in_subclass("Qwen3RMSNorm.forward")),
    "norm's helper, on the class": ("gemma3", on_class("Gemma3RMSNorm._norm")),
    "norm's helper, in a subclass": ("gemma3", in_subclass("Gemma3RMSNorm._norm")),
    "norm's helper, in a mixin": ("gemma3", in_mixin("Gemma3RMSNorm._norm")),
    "norm's helper, on instances": ("gemma3", on_instances("Gemma3RMSNorm._norm")),
    "activation's forward, on its class": ("qwen3", on_activation),
    "experts' gate, on the class": ("qwen3_moe", on_class("Qwen3MoeExperts._apply_gate")),
    "experts' gate, in a subclass": ("qwen3_moe", in_subclass("Qwen3MoeExperts._apply_gate")),
    "experts' gate, on instances": ("qwen3_moe", on_instances("Qwen3MoeExperts._apply_gate")),
    "experts' own gate, on the class": ("gpt_oss", on_class("GptOssExperts._apply_gate")),
    "experts' own gate, in a subclass": ("gpt_oss", in_subclass("GptOssExperts._apply_gate")),
    "rotation's helper, on the module": ("gpt_oss", on_module("_apply_rotary_emb")),
    "head's __call__": ("qwen3", on_head),
    "norm's __call__": ("qwen3", on_norms_call),
    "activation's __call__": ("qwen3", on_activations_call),
    "a part of the loss": ("qwen3", on_loss),
    "torch's cross-entropy": ("qwen3", on_cross_entropy),
    "torch's Linear": ("qwen3", on_linear),
    "load-balancing loss": ("qwen3_moe", on_module("load_balancing_loss_func")),
}


def config_of(family: str, changes: dict):
    _, kind, more = FAMILIES[family]
    sizes = {"hidden_activation": "silu"} if family == "gemma3" else {}
    return kind(**{**SIZES, **sizes, "tie_word_embeddings": False, **more, **changes})


def models(pair, family: str, **changes):
    name, _, _ = FAMILIES[family]
    return twins(*pair, name, config_of(family, changes), std=0.3)


def step(model):
    model.zero_grad()
    out = model(input_ids=TOKENS, labels=TOKENS, use_cache=False)
    out.loss.backward()
    return out.loss.detach(), grads_of(model)


def same(one, other) -> bool:
    loss, grads = one
    return torch.allclose(loss, other[0], rtol=1e-4, atol=1e-5) and all(
        torch.allclose(each, other[1][name], rtol=1e-3, atol=1e-4) for name, each in grads.items()
    )


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", CASES)
def test_what_is_replaced_runs(modules, monkeypatch, case):
    family, replace = CASES[case]
    pair = modules(family)
    upstream, patched = models(pair, family)
    before = step(patched)
    assert same(step(upstream), before)
    for module, model in zip(pair, (upstream, patched), strict=True):
        replace(module, model, monkeypatch)
    expected, found = step(upstream), step(patched)
    assert not same(expected, before), "nothing was replaced"
    assert same(expected, found), explain(patched)


class Tripled(nn.Module):
    """Stands where a model is made in the place of upstream's class of norms."""

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, hidden_states):
        return 3 * self.weight * hidden_states


def test_a_class_that_is_replaced_before_the_model_is_made(modules, monkeypatch):
    pair = modules("qwen3")
    for module in pair:
        monkeypatch.setattr(module, "Qwen3RMSNorm", Tripled)
    upstream, patched = models(pair, "qwen3")
    assert same(step(upstream), step(patched))
    rows = [row for row in explain(patched).rows if row.op in ("add_rms_norm", "qk_norm_rotary")]
    assert rows and all("Tripled.forward" in row.reason for row in rows)


COMPILED = [
    "rotary function wrapped",
    "rotate_half wrapped",
    "norm's forward wrapped on the class",
    "norm's helper, in a subclass",
    "activation's forward, on its class",
    pytest.param("experts' own gate, on the class", marks=pytest.mark.slow),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_code_notices_it(modules, monkeypatch, case):
    family, replace = CASES[case]
    pair = modules(family)
    torch._dynamo.reset()
    upstream, patched = models(pair, family, num_hidden_layers=1, layer_types=["full_attention"])
    for model in (upstream, patched):  # on 5.2.0 upstream's default for experts takes bfloat16 only, compiled
        model.config._experts_implementation_internal = "eager"
    compiled = torch.compile(patched.model, backend="eager")

    def results():
        return [each(TOKENS, use_cache=False).last_hidden_state for each in (upstream.model, compiled)]

    before, found = results()
    assert torch.allclose(before, found, atol=1e-4)
    for module, model in zip(pair, (upstream, patched), strict=True):
        replace(module, model, monkeypatch)
    expected, found = results()
    assert not torch.allclose(expected, before, atol=1e-4), "nothing was replaced"
    assert torch.allclose(expected, found, atol=1e-4)


@pytest.mark.parametrize("backend", ["torch", "reference", "auto"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_an_eps_that_is_none_is_upstreams_error(modules, family, backend):
    set_choice(backend)
    for model in models(modules(family), family):
        for each in model.modules():
            if type(each).__name__.endswith("RMSNorm"):
                setattr(each, "eps" if hasattr(each, "eps") else "variance_epsilon", None)
        with pytest.raises(TypeError, match="unsupported operand"):
            step(model)


@pytest.mark.parametrize("name", ["final_logit_softcapping"])
def test_a_soft_cap_that_is_none_is_left_out(modules, name):
    upstream, patched = models(modules("gemma3"), "gemma3", **{name: None})
    assert same(step(upstream), step(patched))
    assert any(row.op == "linear_cross_entropy" and row.backend == "torch" for row in explain(patched).rows)


class Doubling(TorchFunctionMode):
    """Changes what one function of torch returns."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return 2 * result if getattr(func, "__name__", "") == self.name else result


INTERCEPTED = [
    ("qwen3", "cross_entropy"),
    ("qwen3", "silu"),
    ("qwen3", "rsqrt"),
    ("qwen3", "cat"),
    ("qwen3_moe", "softmax"),
    ("qwen3_next", "softplus"),
    ("qwen3_next", "cumsum"),
    ("gpt_oss", "sigmoid"),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize(("family", "function"), INTERCEPTED)
def test_a_mode_that_intercepts_functions(modules, family, function, backend):
    set_choice(backend)
    upstream, patched = models(modules(family), family)
    if family in ("qwen3_moe", "gpt_oss"):  # both run the loop, which calls the function
        upstream.config._experts_implementation = patched.config._experts_implementation = "eager"
    before = step(patched)
    with Doubling(function):
        expected, found = step(upstream), step(patched)
    assert not same(expected, before), "nothing was intercepted"
    assert same(expected, found), explain(patched)
    rows = [row for row in explain(patched).rows if row.called]
    assert all(row.backend == "eager" for row in rows), rows
    assert any(
        "TorchFunctionMode tests.kernels.test_replaced.Doubling is active" in row.reason for row in rows
    )
    assert same(step(patched), before) and any(row.backend != "eager" for row in explain(patched).rows)


@pytest.mark.slow
@pytest.mark.parametrize("function", ["rsqrt", "silu"])
def test_a_mode_that_intercepts_functions_of_compiled_code(modules, function):
    torch._dynamo.reset()
    pair = modules("qwen3")
    upstream, patched = models(pair, "qwen3", num_hidden_layers=1, layer_types=["full_attention"])
    compiled, plain = (torch.compile(each.model, backend="eager") for each in (patched, upstream))
    with Doubling(function):
        expected, found = (each(TOKENS, use_cache=False).last_hidden_state for each in (plain, compiled))
    assert torch.allclose(expected, found, atol=1e-4)
    rows = [row for row in explain(patched).rows if row.compiled]
    assert rows and all(row.backend == "eager" and "Doubling is active" in row.reason for row in rows)


def test_modes_that_change_no_result_leave_kernels_on(modules):
    _, patched = models(modules("qwen3"), "qwen3")
    with torch.device("cpu"), TransformGetItemToIndex(), BaseTorchFunctionMode():
        step(patched)
    rows = explain(patched).rows
    assert rows and all(row.backend == "torch" for row in rows if row.called)


def test_the_names_of_these_modes_are_torchs():
    kinds = (DeviceContext, TransformGetItemToIndex, BaseTorchFunctionMode)
    assert {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds} == HARMLESS
