"""flex_attention in compiled code: the mask is known by the graph, outputs and all gradients by the formulas."""

import inspect
from itertools import product

import pytest
import torch
import torch._dynamo.testing
from transformers import LlamaConfig, masking_utils

from tests.kernels.attention.flexible import on_a_cpu
from tests.kernels.attention.test_flex import CLOSE, VARIANTS, Attention, kernel, results
from tests.kernels.attention.windows_on_a_cpu import patched
from tests.kernels.dispatched import targets
from veomni_hook.kernels.attention import flex, reference

MASKS = patched(masking_utils)
UNKNOWN = "the attention mask is not known, while tracing, to be causal or a causal window alone"


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    torch._dynamo.reset()
    # Dynamo guards on a decorated function, and on what a table has, by the name in the module.
    for name in ("find_packed_sequence_indices", "ALL_MASK_ATTENTION_FUNCTIONS"):
        monkeypatch.setattr(masking_utils, name, getattr(MASKS, name))
    with on_a_cpu():
        yield


def config_of(window=None, implementation="eager"):
    return LlamaConfig(sliding_window=window, attn_implementation=implementation)


def mask_of(query, config, masks=MASKS, **given):
    """The mask that a model of any release makes for its queries, ``[batch, 1, queries, keys]``."""
    name = "create_causal_mask" if config.sliding_window is None else "create_sliding_window_causal_mask"
    create = getattr(masks, name)
    names = inspect.signature(create).parameters
    length, embeds = query.shape[2], query[:, 0]
    offered = {
        "config": config,
        "attention_mask": None,
        "past_key_values": None,
        "cache": None,
        "cache_position": torch.arange(length),
        ("inputs_embeds" if "inputs_embeds" in names else "input_embeds"): embeds,
    } | given
    return create(**{name: value for name, value in offered.items() if name in names})


class Compiled:
    """One kernel under torch.compile, with the mask made in the graph; `reasons` are of the last tracing."""

    def __init__(self, variant, config=None, change=lambda mask: mask, dynamic=None, **given):
        config = config or config_of()
        self.reasons = [""]
        self.counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

        def attention(query, key, value, module, *values):
            mask = change(mask_of(query, config, **given))
            reason = flex.refuses(module, query, key, value, mask, module, *values[:2])
            self.reasons[:] = [reason]
            if reason is not None:
                return query.transpose(1, 2) + 0
            return kernel(variant)(query, key, value, mask, module, *values)[0]

        self._run = torch.compile(attention, backend=self.counter, fullgraph=True, dynamic=dynamic)

    def __call__(self, query, key, value, mask, module, *values):
        return (self._run(query, key, value, module, *values),)


def check(compiled, variant, operands, mask, module, dtype=torch.float32, scaling=0.3):
    values = (scaling, 0.0, 2.0) if variant == "softcap" else (scaling, 0.0)
    found = results(compiled, operands, mask, module, *values)
    assert compiled.reasons == [None]
    expected = results(getattr(reference, variant), operands, mask, module, *values)
    rtol, atol = CLOSE[dtype]
    for name, one, other in zip(("output", "query", "key", "value", "sinks"), expected, found, strict=True):
        assert one.dtype == other.dtype, name
        torch.testing.assert_close(
            other, one, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


#: By default each variant and each window once, and one case in bfloat16.
FIRST = [
    *((variant, 9, torch.float32) for variant in VARIANTS),
    ("softcap", None, torch.bfloat16),
    ("sinks", 200, torch.float32),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("variant", "window", "dtype"),
    [
        pytest.param(*case, marks=[] if case in FIRST else pytest.mark.slow)
        for case in product(VARIANTS, [None, 9, 200], CLOSE)
    ],
    ids=str,
)
def test_equals_the_formula(variant, window, dtype):
    module = Attention().to(dtype)
    operands = module.operands(300, dtype=dtype)
    compiled = Compiled(variant, config_of(window))
    check(compiled, variant, operands, mask_of(operands[0], config_of(window)), module, dtype)
    assert compiled.counter.frame_count == 1
    assert targets(compiled.counter).count("flex_attention") == 1


@pytest.mark.parametrize(
    "heads", [(6, 2), *(pytest.param(e, marks=pytest.mark.slow) for e in ((4, 4), (8, 1)))]
)
def test_any_number_of_groups(heads):
    module = Attention(*heads)
    operands = module.operands(130, heads[1], batch=1)
    check(Compiled("sinks"), "sinks", operands, mask_of(operands[0], config_of()), module)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "dynamic", "window"),
    [
        pytest.param(
            *case, marks=[] if case in {("sinks", None, None), ("softcap", True, 100)} else pytest.mark.slow
        )
        for case in product(["sinks", "softcap"], [True, None], [None, 100])
    ],
)
def test_lengths_that_change_are_compiled_once(variant, dynamic, window):
    module, compiled = Attention(), Compiled(variant, config_of(window), dynamic=dynamic)
    counts = []
    for length in (256, 300, 130, 512):
        operands = module.operands(length)
        check(compiled, variant, operands, mask_of(operands[0], config_of(window)), module)
        counts.append(compiled.counter.frame_count)
    assert counts[0 if dynamic else 1] == counts[-1] <= 2


@pytest.mark.slow
def test_scales_and_softcaps_that_change():
    module, compiled = Attention(), Compiled("softcap")
    operands = module.operands(37)
    for scaling in (0.5, 0.3, 0.1):
        check(compiled, "softcap", operands, mask_of(operands[0], config_of()), module, scaling=scaling)


@pytest.mark.slow
def test_autocast_computes_in_its_dtype():
    module, compiled = Attention(), Compiled("sinks")
    query, key, value = module.operands(37)
    value = value.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        check(compiled, "sinks", [query, key, value], mask_of(query, config_of()), module, torch.bfloat16)


@pytest.mark.slow
def test_without_a_mask_every_query_sees_every_key():
    module, compiled = Attention(), Compiled("sinks", change=lambda mask: None)
    check(compiled, "sinks", module.operands(37), None, module)


def written(mask):
    mask[0, 0, 3, 0] = 0.0
    return mask


REFUSED = {
    "padding": ({"attention_mask": torch.tensor([[0] * 7 + [1] * 30, [1] * 37])}, UNKNOWN),
    "ones": ({"attention_mask": torch.ones(2, 37)}, UNKNOWN),
    "packed": ({"position_ids": torch.tensor([[*range(20), *range(17)]] * 2)}, UNKNOWN),
    "a copy": ({"change": lambda mask: mask.clone()}, UNKNOWN),
    "a part": ({"change": lambda mask: mask[:, :, :, :37]}, UNKNOWN),
    "written": ({"change": written}, UNKNOWN),
    "another function": ({"and_mask_function": lambda b, h, q, k: k != 2}, UNKNOWN),
    "booleans": ({"config": config_of(9, "sdpa")}, UNKNOWN),
    "unpatched": ({"masks": masking_utils}, UNKNOWN),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", REFUSED)
def test_a_mask_that_is_not_known_is_left_to_upstream(name):
    given, reason = REFUSED[name]
    module, compiled = Attention(), Compiled("sinks", **given)
    query, key, value = module.operands(37, batch=1 if name == "written" else 2)
    compiled(query, key, value, None, module, 0.3, 0.0)
    assert compiled.reasons == [reason]


CALLS = {
    "there is one query": {"length": 1},
    "the attention has dropout (0.1)": {"dropout": 0.1},
    "a forward hook of the module reads the attention weights": {"hook": True},
    "query, key and value are torch.float64": {"dtype": torch.float64},
    "head sizes are 24, 24 and 24, not one of (16, ": {"width": 24},
    "the numbers of queries and keys differ": {"keys": 40},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("reason", CALLS)
def test_what_refuses_uncompiled_refuses_compiled(reason):
    given = {"length": 37, "dropout": 0.0, "hook": False, "dtype": torch.float32, "width": 16} | CALLS[reason]
    module = Attention(width=given["width"]).train()
    if given["hook"]:
        module.register_forward_hook(lambda *_: None)
    compiled = Compiled("sinks")
    query, key, value = module.operands(given["length"], dtype=given["dtype"])
    if "keys" in given:
        _, key, value = module.operands(given["keys"])
    compiled(query, key, value, None, module, 0.3, given["dropout"])
    assert reason in compiled.reasons[0]


@pytest.mark.slow
def test_compiled_lengths_are_multiples_of_a_block(monkeypatch):
    monkeypatch.setattr(flex, "MULTIPLE_COMPILED", 16)
    module = Attention()
    for length, reason in (
        (37, "in compiled code, the number of queries must be a multiple of 16"),
        (48, None),
    ):
        compiled = Compiled("sinks")
        compiled(*module.operands(length), None, module, 0.3, 0.0)
        assert compiled.reasons == [reason]
