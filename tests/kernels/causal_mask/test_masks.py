"""Every mask function of the installed release under ``torch.compile``, beside upstream without it."""

from functools import partial
from itertools import product

import pytest
import torch
import torch._dynamo.testing
from torch.nn.attention.flex_attention import BlockMask
from transformers import DynamicCache, StaticCache

from tests.kernels.causal_mask.patched_masking import MASKS, WIDTH, call, compiled, patched, takes, tiny
from veomni_hook.kernels.selection.process_choice import set_active, set_choice

LENGTH = 6
CAUSAL = [name for name in MASKS if takes(name, "position_ids")]
LAYERS = {"layer_types": ["full_attention", "sliding_attention"]}
#: The longest window that masks something, and the shortest that masks nothing.
WINDOWS = [LENGTH, LENGTH + 1]
PADDING = {
    "ones": [[1] * LENGTH] * 2,
    "left": [[0, 0, 1, 1, 1, 1], [1] * LENGTH],
    "right": [[1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0]],
}
PACKED = {
    "packed": [[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 4]],
    "whole": [[*range(LENGTH)], [*range(LENGTH)]],
}


@pytest.fixture
def embeds():
    return torch.randn(2, LENGTH, WIDTH)


def config_of(window=LENGTH + 1, **changes):
    return tiny(sliding_window=window, attention_chunk_size=window, **changes)


def made(embeds):
    """Position ids as models make them when their caller gives none."""
    return (torch.arange(embeds.shape[1], device=embeds.device) + 0).unsqueeze(0)


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, BlockMask):
        return torch.equal(one.to_dense(), other.to_dense())
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


class Results:
    """What a function returns uncompiled, and compiled with the patch; the same without it where it is asked for."""

    def __init__(self, function, *inputs):
        self.function, self.inputs = function, inputs
        self.eager = function(*inputs)
        with patched():
            self.patched = compiled(function)(*inputs)

    @property
    def as_uncompiled(self):
        return same(self.patched, self.eager)

    @property
    def as_compiled_upstream(self):
        return same(self.patched, compiled(self.function)(*self.inputs))


@pytest.mark.sample(1)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", CAUSAL)
def test_no_mask_where_none_is_built_without_compiling(name, window, embeds):
    config = config_of(window, **(LAYERS if name == "create_masks_for_generate" else {}))
    found = Results(lambda x: call(name, config, x, made(x)), embeds)
    assert found.as_uncompiled
    if name == "create_causal_mask" and window == LENGTH:
        assert not found.as_compiled_upstream, "nothing has to be patched"


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for name in MASKS if "bidirectional" in name])
@pytest.mark.parametrize("window", WINDOWS)
def test_no_bidirectional_mask_where_none_is_built_without_compiling(name, window, embeds):
    config = config_of(window)
    assert Results(lambda x: call(name, config, x), embeds).as_uncompiled


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CAUSAL)
def test_positions_are_not_needed(name, embeds):
    config = config_of()
    found = Results(lambda x: call(name, config, x), embeds)
    assert found.as_uncompiled and found.patched is None


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "padding"),
    [
        # What a mask of padding says is no matter of the function: the others are left to the slow tests.
        pytest.param(
            *each, marks=[] if each[1] == "left" or each[0] == "create_causal_mask" else pytest.mark.slow
        )
        for each in product(MASKS, PADDING)
    ],
)
def test_padding_is_masked(name, padding, embeds):
    config = config_of(4)
    mask = torch.tensor(PADDING[padding])
    found = Results(lambda x, m: call(name, config, x, made(x), attention_mask=m), embeds, mask)
    assert found.as_compiled_upstream
    assert found.eager is None or found.as_uncompiled


@pytest.mark.sample(1)
@pytest.mark.parametrize("positions", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("name", CAUSAL)
def test_positions_of_the_user_may_be_packed(name, positions, embeds):
    config = config_of(64)
    found = Results(lambda x, ids: call(name, config, x, ids), embeds, torch.tensor(positions))
    assert found.as_compiled_upstream and found.patched is not None
    assert found.eager is None or found.as_uncompiled


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CAUSAL)
def test_positions_that_the_compiled_code_packs_itself(name, embeds):
    config = config_of(64)

    def packed(x):
        ids = made(x)
        return call(name, config, x, ids % 3)

    def written(x):
        ids = made(x)
        ids[:, 3:] -= 3
        return call(name, config, x, ids)

    for function in (packed, written):
        found = Results(function, embeds)
        assert found.as_uncompiled and found.patched is not None


def some_rows(batch, head, q, kv):
    return kv < 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("given", ["or_mask_function", "and_mask_function", "block_sequence_ids"])
@pytest.mark.parametrize("name", MASKS)
def test_additions_are_masked(name, given, embeds):
    if not takes(name, given):
        pytest.skip(f"{name} takes no {given} in this release")
    config = config_of(64)
    addition = torch.tensor([[0, 0, -1, -1, 1, 1]] * 2) if given == "block_sequence_ids" else some_rows
    found = Results(lambda x: call(name, config, x, made(x), **{given: addition}), embeds)
    assert found.as_uncompiled and found.patched is not None


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("create_causal_mask", None),
        ("create_causal_mask", 4),
        ("create_sliding_window_causal_mask", 4),
        ("create_sliding_window_causal_mask", 64),
        ("create_chunked_causal_mask", 4),
    ],
)
@pytest.mark.parametrize(
    ("kind", "length", "seen"),
    [
        ("dynamic", 1, 0),
        ("dynamic", 1, 3),
        ("dynamic", 3, 0),
        ("dynamic", 3, 3),
        # Nothing is changed where a cache is static.
        ("static", 1, 3),
        ("static", 3, 0),
        pytest.param("static", 1, 0, marks=pytest.mark.slow),
        pytest.param("static", 3, 3, marks=pytest.mark.slow),
    ],
)
def test_caches(name, window, kind, length, seen):
    config = config_of(window)
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=8)
    states = torch.randn(2, 1, max(seen, 1), WIDTH)
    if seen:
        cache.update(states, states, 0, {"cache_position": torch.arange(seen)})
    elif kind == "static":
        cache.early_initialization(2, 1, WIDTH, torch.float32, "cpu")
    embeds = torch.randn(2, length, WIDTH)

    def function(x, past):
        return call(name, config, x, seen + made(x), seen, past_key_values=past, cache=past)

    found = Results(function, embeds, cache)
    if kind == "static":
        assert found.as_compiled_upstream
    else:
        assert found.as_uncompiled


@pytest.mark.sample(2)
@pytest.mark.parametrize("attention", ["eager", "flash_attention_2"])
@pytest.mark.parametrize("name", CAUSAL)
def test_other_implementations_of_attention(name, attention, embeds):
    config = config_of(64)
    config._attn_implementation = attention
    assert Results(lambda x: call(name, config, x, made(x)), embeds).as_uncompiled


@pytest.mark.slow
def test_a_block_mask_is_the_causal_one(embeds, monkeypatch):
    config = config_of()
    # transformers compiles the mask; Inductor would call a C++ compiler.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    config._attn_implementation = "flex_attention"

    def function(x):
        return call("create_causal_mask", config, x, made(x))

    with patched():
        torch._dynamo.reset()
        # Not one graph in all torch versions: upstream asks `create_block_mask` to compile itself.
        assert same(torch.compile(function)(embeds), function(embeds))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CAUSAL)
def test_a_mask_that_is_wanted_is_built(name, embeds):
    if not takes(name, "allow_is_causal_skip"):
        pytest.skip("this release cannot ask for it")
    config = config_of()
    found = Results(lambda x: call(name, config, x, made(x), allow_is_causal_skip=False), embeds)
    assert found.as_uncompiled and found.patched is not None


def test_a_decoder_without_causality_has_no_mask(embeds):
    config = config_of(is_causal=False)
    found = Results(lambda x: call("create_causal_mask", config, x, made(x)), embeds)
    assert found.as_uncompiled and found.patched is None


class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config = config_of()

    def forward(self, x):
        mask = call("create_causal_mask", self.config, x, made(x))
        return x.sum() if mask is None else mask


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    "export",
    [
        lambda model, x: torch.export.export(model, (x,), strict=True).module()(x),
        lambda model, x: torch.export.export(model, (x,), strict=False).module()(x),
        lambda model, x: torch._dynamo.export(model)(x).graph_module(x),
        lambda model, x: torch.jit.trace(model, x)(x),
    ],
    ids=["strict", "not strict", "dynamo", "jit"],
)
def test_an_exported_program_has_its_mask(export, embeds):
    with patched():
        torch._dynamo.reset()
        assert export(Masked(), embeds).dtype == torch.bool


def counted(function, dynamic=True):
    """The function compiled into one graph, and what counts how often."""
    counter = torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic), counter


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamic", [True, None])
def test_lengths_that_change_are_compiled_as_without_the_patch(dynamic):
    config = config_of(64)
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        with patched():
            run, counter = counted(lambda x, name=name: (call(name, config, x, made(x)), x + 1), dynamic)
            for length in (5, 7, 11, 13, 32):
                assert run(torch.randn(3, length, WIDTH))[0] is None
        assert counter.frame_count == (1 if dynamic else 2)


def test_a_window_is_a_guard():
    config = config_of(8)
    with patched():
        run, counter = counted(
            lambda x: (call("create_sliding_window_causal_mask", config, x, made(x)), x + 1)
        )
        for length in (5, 7, 8, 9, 20, 3):
            x = torch.randn(3, length, WIDTH)
            assert same(run(x)[0], call("create_sliding_window_causal_mask", config, x, made(x)))
    assert counter.frame_count == 2


def test_a_static_cache_adds_no_guard_on_lengths():
    config = tiny()
    cache = StaticCache(config=config, max_cache_len=8)
    cache.early_initialization(2, 1, WIDTH, torch.float32, "cpu")
    with patched():
        run, counter = counted(
            lambda x, past: call("create_causal_mask", config, x, made(x), past_key_values=past, cache=past)
        )
        for length in (3, 8, 5):
            assert run(torch.randn(2, length, WIDTH), cache).shape == (2, 1, length, 8)
    assert counter.frame_count == 1


def test_only_the_choice_of_eager_code_brings_the_mask_back(embeds):
    config = config_of()
    with patched():
        run = compiled(lambda x: call("create_causal_mask", config, x, made(x)))
        for choice, built in {
            "auto": False,
            "eager": True,
            "eager,rms_norm=torch": True,
            "torch": False,
        }.items():
            set_choice(choice)
            assert (run(embeds) is not None) is built, choice
        set_active(False)
        assert run(embeds) is not None
