"""Calls of adapted layers that are PEFT's own, each with its reason; and states of PEFT's layers."""

import copy
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

pytest.importorskip("peft")

from tests.kernels.low_rank_linear.adapted import base_of, layer_of, pair, results
from tests.kernels.matching import close
from veomni_hook.kernels.selection.process_choice import set_choice

F32, BF16 = torch.float32, torch.bfloat16


def inputs(dtype=F32):
    return torch.randn((2, 5, 24), generator=torch.Generator().manual_seed(2)).to(dtype)


def slot(patched):
    return patched.veomni_low_rank_linear_product_added


def hooked(layer):
    layer.lora_A["default"].register_forward_hook(lambda module, args, h: h * 3)


def own_forward(layer):
    module = layer.lora_B["default"]
    module.forward = lambda x: nn.Linear.forward(module, x) * 3


def other_class(layer):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    layer.lora_A["default"].__class__ = Doubled


def other_dropout(layer):
    layer.lora_dropout["default"] = nn.AlphaDropout(0.2)


def hooked_dropout(layer):
    layer.lora_dropout["default"] = nn.Dropout(0.2)
    layer.lora_dropout["default"].register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def tensor_scale(layer):
    layer.scaling["default"] = torch.tensor(2.0)


def parametrised(layer):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    parametrize.register_parametrization(layer.lora_A["default"], "weight", Doubled())


def moved_where_they_are(self, *args, **kwargs):
    if self.weight.device != args[0].device:
        return self.forward_origin(args[0].to(self.weight.device), **kwargs)
    return self.forward_origin(*args, **kwargs)


def test_factors_whose_forward_only_moves_inputs_are_fused(patched):
    layers = pair(patched, base_of())
    for factor in (*layers[1].lora_A.values(), *layers[1].lora_B.values()):
        factor.forward_origin = factor.forward
        factor.forward = MethodType(moved_where_they_are, factor)
    expected, found = (results(layer, inputs()) for layer in layers)
    assert slot(patched).outcome(layers[1]).backend == "torch"
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (None, {"use_dora": True}, "the adapter is a variant, DoraLinearVariant"),
        (None, {"lora_bias": True}, "a factor of the adapter has a bias"),
        (hooked, {}, "a part of the adapter has hooks"),
        (own_forward, {}, "a part of the adapter has its own forward"),
        (other_class, {}, "the adapter's factors are Doubled and Linear, not plain nn.Linear"),
        (other_dropout, {}, "the adapter's dropout is a AlphaDropout"),
        (hooked_dropout, {}, "a part of the adapter has hooks"),
        (tensor_scale, {}, "the adapter's scale is a Tensor"),
    ],
)
def test_other_adapters_are_left_to_peft(patched, change, options, reason):
    layers = pair(patched, base_of(), **options)
    for layer in layers:
        if change is not None:
            change(layer)
    expected, found = (results(layer, inputs()) for layer in layers)
    assert slot(patched).outcome(layers[1]) == ("eager", reason)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_parametrised_factor_is_taken_as_it_is(patched):
    layers = pair(patched, base_of())
    for layer in layers:
        parametrised(layer)
    expected, found = (results(layer, inputs()) for layer in layers)
    close(found, expected, 3e-6)


@pytest.mark.parametrize(
    ("dtype", "factors", "reason"),
    [
        (F32, BF16, "the adapter is torch.bfloat16, the input torch.float32"),
        (torch.float16, F32, "the adapter is torch.float32, the input torch.float16"),
    ],
)
def test_other_dtypes_are_left_to_peft(patched, dtype, factors, reason):
    layers = pair(patched, base_of(dtype=dtype), factors)
    expected, found = (results(layer, inputs(dtype)) for layer in layers)
    assert slot(patched).outcome(layers[1]) == ("eager", reason)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_auto_leaves_float32_adapters_of_bfloat16_layers_to_peft_on_a_cpu(patched):
    set_choice("auto")
    for dtype, backend in ((F32, "torch"), (BF16, "eager")):
        _, ours = pair(patched, base_of(dtype=dtype), F32)
        ours(inputs(dtype))
        assert slot(patched).outcome(ours).backend == backend
    assert "products into float32" in slot(patched).outcome(ours).reason
    with torch.autocast("cpu", BF16):  # then both are bfloat16
        ours(inputs(BF16))
    assert slot(patched).outcome(ours).backend == "torch"


def test_factors_of_two_dtypes_are_left_to_peft(patched):
    _, ours = pair(patched, base_of(dtype=BF16), F32)
    ours.lora_B["default"].to(BF16)
    with pytest.raises(RuntimeError, match="dtype"):
        ours(inputs(BF16))
    reason = "the adapter's factors are torch.float32 and torch.bfloat16"
    assert slot(patched).outcome(ours) == ("eager", reason)


def test_an_input_that_is_not_to_be_converted(patched):
    _, ours = pair(patched, base_of(dtype=BF16), F32)
    ours.cast_input_dtype_enabled = False
    with pytest.raises(RuntimeError, match="dtype"):  # upstream's own
        ours(inputs(BF16))
    ours.cast_input_dtype_enabled = True
    ours(inputs(BF16))
    assert slot(patched).outcome(ours).backend == "torch"


def test_a_conversion_that_was_replaced_is_called(patched):
    theirs, ours = pair(patched, base_of(dtype=BF16), F32)
    for layer in (theirs, ours):
        layer._cast_input_dtype = lambda x, dtype: 2 * x.to(dtype)
    assert torch.equal(ours(inputs(BF16)), theirs(inputs(BF16)))
    assert slot(patched).outcome(ours) == ("eager", "_cast_input_dtype was replaced")


def test_merged_disabled_and_other_adapters(patched):
    """PEFT's own branches are in front of the guard, or the guard passes what they would use."""
    theirs, ours = layers = pair(patched, base_of(), names=("one", "two"))

    def same(**given):
        close(ours(inputs(), **given), theirs(inputs(), **given), 3e-6)

    both = ours(inputs())
    for layer in layers:
        layer.set_adapter(["two"])
    same()
    assert not torch.allclose(ours(inputs()), both)
    for layer in layers:
        layer.merge()
    same()
    for layer in layers:
        layer.unmerge()
    same()
    same(adapter_names=["one", "__base__"])
    for layer in layers:
        layer.enable_adapters(False)
    same()
    assert torch.equal(ours(inputs()), ours.base_layer(inputs()))
    for layer in layers:
        layer.enable_adapters(True)
        layer.set_adapter([])
    same()
    assert slot(patched).outcome(ours) == ("eager", "no adapter is active")
    for layer in layers:
        layer.set_scale("two", 3.0)
        layer.set_adapter(["two"])
    same()


def test_names_in_state_dicts_stay(patched):
    theirs, ours = pair(patched, base_of())
    before = [*theirs.state_dict()]
    for layer in (theirs, ours):
        results(layer, inputs())
    assert [*ours.state_dict()] == before == [*theirs.state_dict()]
    copied = copy.deepcopy(ours)
    assert torch.equal(copied(inputs()), ours(inputs()))


def test_further_arguments_go_to_the_layer(patched):
    class Scaled(nn.Linear):
        def forward(self, x, factor=1.0):
            return super().forward(x) * factor

    theirs, ours = pair(patched, Scaled(24, 40))
    assert torch.equal(ours(inputs(), factor=2.0), theirs(inputs(), factor=2.0))


def test_tied_adapters_get_the_sum_of_gradients(patched):
    def tied(home):
        first, second = (layer_of(home, base_of()) for _ in range(2))
        second.lora_A["default"].weight = first.lora_A["default"].weight
        both = nn.ModuleList([first, second])
        return results(both, inputs(), lambda x: first(x) + second(x))

    import peft.tuners.lora.layer as upstream

    expected, found = tied(upstream), tied(patched)
    close(found, expected, 3e-6)
