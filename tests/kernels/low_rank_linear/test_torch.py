"""Adapted layers against PEFT's own code: results and every gradient, and what is saved and made."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("peft")

from tests.kernels.dispatched import Operators
from tests.kernels.low_rank_linear.adapted import base_of, pair, results
from tests.kernels.matching import close
from veomni_hook.kernels.low_rank_linear import products
from veomni_hook.kernels.selection.process_choice import set_choice

F32, BF16 = torch.float32, torch.bfloat16
#: Dtypes of the layer and of its adapters; PEFT's default for a bfloat16 model is the last.
DTYPES = {"float32": (F32, F32), "bfloat16": (BF16, BF16), "mixed": (BF16, F32)}
TOLERANCE = {F32: 3e-6, BF16: 2e-2}


def inputs(shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def outcome(patched, layer):
    return patched.veomni_low_rank_linear_product_added.outcome(layer)


def assert_equal(found, expected, tolerance):
    close(found, expected, tolerance)
    for name, truth in expected.items():
        assert (found[name].dtype, found[name].shape) == (truth.dtype, truth.shape), name


class _Kept(nn.Linear):
    """A layer that needs its result in backward, and returns a view of it."""

    def forward(self, x):
        return super().forward(x).sigmoid().view(*x.shape[:-1], -1)


class _Same(nn.Linear):
    """A layer that returns something that it holds."""

    def forward(self, x):
        self.held = super().forward(x)
        return self.held


def freezing(frozen):
    """Set what is trained: all but the parameters whose name contains ``frozen``."""

    def change(layer):
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(frozen not in name)

    return {"change": change}


def hook(layer):
    layer.base_layer.register_forward_hook(lambda module, args, y: y * 2)


TWO = {"names": ("one", "two")}
#: The shape of inputs, what makes inputs of them, the layer, what is done to it, and PEFT's options.
CASES = {
    "a batch": {},
    "rows, rank 1": {"shape": (7, 24), "rank": 1, "base": {"bias": False}},
    "one row": {"shape": (24,), "rank": 3},
    "no rows": {"shape": (0, 24)},
    "rank 256": {"shape": (2, 3, 4, 24), "rank": 256},
    "transposed": {"shape": (5, 2, 24), "laid": lambda x: x.transpose(0, 1)},
    "strided": {"shape": (2, 5, 48), "laid": lambda x: x[..., ::2]},
    "expanded": {"shape": (1, 5, 24), "laid": lambda x: x.expand(2, 5, 24)},
    "frozen layer": freezing("base"),
    "frozen layer and input": {**freezing("base"), "to_x": False},
    "frozen weight": freezing("base_layer.weight"),
    "frozen bias": freezing("base_layer.bias"),
    "frozen adapter": freezing("lora"),
    "frozen A": freezing("lora_A"),
    "frozen B": freezing("lora_B"),
    "dropout": {"lora_dropout": 0.4},
    "dropout of two": {"lora_dropout": 0.4, **TWO},
    "another scale": {"use_rslora": True},
    "two": TWO,
    # As quantised layers: the term is added.
    "a result that is kept": {"kind": _Kept, **TWO},
    "a result that is held": {"kind": _Same, **TWO},
    "hooks": {"change": hook},
}


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_upstreams(patched, dtypes, case):
    dtype, factors = DTYPES[dtypes]
    options = dict(CASES[case])
    shape, laid = options.pop("shape", (2, 5, 24)), options.pop("laid", lambda x: x)
    change, to_x = options.pop("change", lambda layer: None), options.pop("to_x", True)
    base, kind = base_of(dtype=dtype, **options.pop("base", {})), options.pop("kind", None)
    base = base if kind is None else kind(24, 40).to(dtype)
    layers = pair(patched, base, factors, **options)
    for layer in layers:
        change(layer)
    x = laid(inputs(shape, dtype))
    expected, found = (results(layer, x, to_x=to_x) for layer in layers)
    assert case == "hooks" or outcome(patched, layers[1]).backend == "torch"
    assert case != "a batch" or len(found) == 4
    if found["y"].numel():
        assert_equal(found, expected, TOLERANCE[dtype])
    if kind is _Same:  # stays as it is
        assert torch.equal(*(layer.base_layer.held for layer in layers))
    if "lora_dropout" in options:
        without = [results(layer.eval(), x) for layer in layers]
        assert not torch.allclose(without[1]["y"], found["y"], atol=0.05)
        assert_equal(without[1], without[0], TOLERANCE[dtype])


@pytest.mark.parametrize("dtypes", DTYPES)
def test_it_is_as_exact_as_its_roundings_allow(patched, dtypes):
    """Mean errors, against float64 of the same weights and inputs, in any order of summation.

    n float32 numbers of random signs are summed to within sqrt(n) roundings of their root mean square. A
    bfloat16 result is rounded three times, where upstream's is five times: its first and its last product, and
    their sum. A rounding takes half a unit on average at most.
    """
    dtype, factors = DTYPES[dtypes]
    tokens, inner, outer, rank = 512, 96, 160, 8
    theirs, ours = pair(patched, base_of(inner, outer, dtype), factors, rank=rank)
    x = inputs((tokens, inner), dtype)
    truth = results(theirs.double(), x.double())
    found = results(ours, x)
    units = {F32: 2**-24 * (tokens + outer) ** 0.5, BF16: 2**-8 * 3 / 2}
    parts = 2 * 2**-17 if factors is not dtype else 0  # a factor and a thin matrix, each in two parts
    for name, true in truth.items():
        error = (found[name].double() - true).abs().mean()
        assert error <= (units[found[name].dtype] + parts) * true.square().mean().sqrt(), name


def test_float32_factors_in_bfloat16_parts_as_on_a_gpu(patched, monkeypatch):
    """The products of the parts, each exact in float32, as `torch.mm` of a GPU returns them."""
    widths = []

    def in_float32(left, right):
        assert left.dtype is right.dtype is BF16
        widths.append((*left.shape, right.shape[1]))
        return left.float() @ right.float()

    monkeypatch.setattr(products, "_in_float32", in_float32)
    theirs, ours = pair(patched, base_of(dtype=BF16), F32)
    expected, found = (results(layer, inputs((7, 24), BF16)) for layer in (theirs, ours))
    assert widths == [(7, 24, 8), (7, 40, 8), (8, 7, 24), (40, 7, 8)]
    for name in expected:
        tolerance = 2**-14 if "lora" in name else TOLERANCE[BF16]
        close(found[name], expected[name], tolerance)


def test_adapters_of_two_dtypes(patched):
    layers = pair(patched, base_of(dtype=BF16), F32, names=("one", "two"))
    for layer in layers:
        layer.lora_A["two"].to(BF16), layer.lora_B["two"].to(BF16)
    expected, found = (results(layer, inputs((2, 5, 24), BF16)) for layer in layers)
    assert_equal(found, expected, TOLERANCE[BF16])


def test_a_layer_with_a_result_of_another_dtype(patched):
    class Wide(nn.Linear):
        def forward(self, x):
            return super().forward(x).float()

    layers = pair(patched, Wide(24, 40).to(BF16), F32)
    expected, found = (results(layer, inputs((2, 5, 24), BF16)) for layer in layers)
    assert found["y"].dtype is F32
    assert_equal(found, expected, 0.0)


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (BF16, F32)])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_autocast(patched, dtypes, dropout):
    dtype, factors = dtypes
    layers = pair(patched, base_of(dtype=dtype), factors, lora_dropout=dropout)

    def run(layer):
        def call(x):
            with torch.autocast("cpu", BF16):
                return layer(x)

        return results(layer, inputs((2, 5, 24), dtype), call)

    expected, found = (run(layer) for layer in layers)
    assert outcome(patched, layers[1]).backend == "torch"
    assert found["y"].dtype is BF16
    assert_equal(found, expected, TOLERANCE[BF16])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(patched, reentrant):
    layers = pair(patched, base_of(), lora_dropout=0.3)
    expected = results(layers[0], inputs((2, 5, 24), F32))
    run = lambda x: checkpoint(layers[1], x, use_reentrant=reentrant)  # noqa: E731
    assert_equal(results(layers[1], inputs((2, 5, 24), F32), run), expected, TOLERANCE[F32])


def test_without_gradients(patched):
    theirs, ours = pair(patched, base_of(dtype=BF16), F32)
    x = inputs((2, 5, 24), BF16)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            close(ours(x), theirs(x), TOLERANCE[BF16])


#: Parts of an adapted layer that are trained, beside the input or without it.
TRAINED = [("x", "A", "B"), ("A", "B"), ("x",), ("x", "B"), ("B",), ("x", "A"), ("x", "W", "A", "B"), ("W",)]


@pytest.mark.parametrize("trained", TRAINED, ids=" ".join)
@pytest.mark.parametrize("dtypes", ["float32", "mixed"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_derivatives_of_derivatives(patched, trained, dtypes, dropout):
    dtype, factors = DTYPES[dtypes]
    found = []
    for layer in pair(patched, base_of(dtype=dtype), factors, lora_dropout=dropout):
        named = dict(layer.named_parameters())
        parts = {
            "W": named["base_layer.weight"],
            "A": named["lora_A.default.weight"],
            "B": named["lora_B.default.weight"],
        }
        for name, parameter in named.items():
            parameter.requires_grad_(
                any(parameter is parts[part] for part in trained if part != "x") or "bias" in name
            )
        x = inputs((5, 24), dtype).requires_grad_("x" in trained)
        leaves = [x if part == "x" else parts[part] for part in trained]
        derivatives = []
        for end in (lambda y: y.float(), lambda y: y.float().square()):
            torch.manual_seed(3)
            # The input depends on a trained part, where one is trained.
            y = layer(x + 0.1 * leaves[-1].mean().to(dtype))
            first = torch.autograd.grad((end(y) * torch.linspace(-1, 1, 40)).sum(), leaves, create_graph=True)
            slope = sum(dx.float().square().sum() for dx in first)
            second = torch.autograd.grad(slope, leaves, allow_unused=True) if slope.requires_grad else ()
            derivatives += [
                *first,
                *(torch.zeros_like(x) if dx is None else dx for x, dx in zip(leaves, second, strict=False)),
            ]
        found.append(derivatives)
    assert outcome(patched, layer).backend == "torch"
    for theirs, ours in zip(*found, strict=True):
        close(ours, theirs, 2e-5 if dtype is F32 else 4e-2)


def test_nothing_is_computed_for_frozen_weights(patched):
    tokens, inner, outer, rank = 6, 24, 40, 4
    _, ours = pair(patched, base_of(inner, outer), rank=rank)
    with FlopCounterMode(display=False) as counter:
        results(ours, inputs((tokens, inner), F32))
    wide, thin = 2 * tokens * inner * outer, 2 * tokens * rank
    # y and dx; h, y += ...; dh, dB, dA, dx += ...
    assert counter.get_total_flops() == 2 * wide + thin * (inner + outer) + thin * 2 * (inner + outer)


VIEWS = ("view", "t", "reshape", "detach", "_unsafe_view", "alias", "transpose", "as_strided")


def test_nothing_of_the_results_size_is_made_but_the_result(patched):
    """Forward: the layer's product, and the term in place; backward the same for x."""
    theirs, ours = pair(patched, base_of())
    made = []
    for layer in (theirs, ours):
        names = []

        def note(operator, _, result, names=names):
            # Of the size of the layer's input or result.
            if isinstance(result, torch.Tensor) and result.numel() in (7 * 24, 7 * 40):
                names.append(operator.overloadpacket.__name__)

        x = inputs((7, 24), F32).requires_grad_()
        with Operators(note):
            layer(x).backward(torch.ones(7, 40))
        made.append([name for name in names if name not in (*VIEWS, "ones")])
    assert len(made[0]) >= 8
    assert made[1] == ["addmm", "addmm_", "mm", "addmm_"]


def test_saved_is_what_gradients_need(patched):
    _, ours = pair(patched, base_of(dtype=BF16), F32, rank=2)
    x = inputs((64, 24), BF16).requires_grad_()
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        ours(x)
    # x, the parameters themselves, A and B in three parts, and h.
    made = [3 * 2 * 24, 3 * 2 * 40, 3 * 2 * 64]
    assert sorted(sizes) == sorted([64 * 24, 24 * 40, 40, 2 * 24, 2 * 40, *made])
    with torch.no_grad():
        x = x.clone()
    sizes.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        ours(x)
    assert 24 * 40 not in sizes  # without a gradient of x


def test_torch_compile_leaves_it_to_inductor(patched):
    theirs, ours = pair(patched, base_of())
    expected = results(theirs, inputs((2, 5, 24), F32))
    set_choice("auto")
    found = results(ours, inputs((2, 5, 24), F32), torch.compile(ours, backend="aot_eager", fullgraph=True))
    assert_equal(found, expected, TOLERANCE[F32])
    slot = patched.veomni_low_rank_linear_product_added
    assert slot.traced(ours, compiled=True).reason == "left to Inductor"
