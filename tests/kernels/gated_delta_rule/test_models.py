"""Whole models with linear attention: samples that share a row are those that are alone."""

import inspect
import sys
from functools import partial
from types import ModuleType

import pytest
import torch
from transformers.integrations import hub_kernels

from tests.kernels.matching import close, grads_of
from tests.kernels.patched_qwen3 import SIZES, config_of, twins
from tests.patches.upstream import HANDED
from veomni_hook.errors import SamplesError
from veomni_hook.kernels.gated_delta_rule import boundaries, calls
from veomni_hook.kernels.gated_delta_rule import torch as chunked
from veomni_hook.kernels.selection.process_choice import set_active, set_choice
from veomni_hook.kernels.shared.hub_functions import running
from veomni_hook.tools.report.explanation import explain

#: Releases before 5.17 have no such decorator: layers hold a package's functions, or transformers' own.
DECORATOR = getattr(hub_kernels, "use_kernel_func_from_hub_with_fallback", None)
HELD = {"torch_chunk_gated_delta_rule": "chunk_gated_delta_rule"}
HYBRID = {
    **SIZES, "pad_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 512,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
CHANNELS = {
    "linear_num_heads": 2, "linear_head_dim": 8, "num_key_value_heads": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "kv_lora_rank": 8, "q_lora_rank": None,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
    "mlp_layer_types": ["dense", "sparse", "dense"],
}  # fmt: skip
INDEXED = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 64,
           "indexer_compress_ratio": 4, "ple_layer_ids": [], "ngram_vocab_size_base": 50}  # fmt: skip
#: Attention that an indexer sparsifies reads no positions, so samples cannot share a row there.
SPARSE = {"q_lora_rank": 8, "qk_rope_head_dim": 0, "qk_nope_head_dim": 8, "index_n_heads": 2, "index_head_dim": 8,
          "index_topk": 16, "layer_types": ["linear_attention"] * 3}  # fmt: skip
FAMILIES = {
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM", CHANNELS),
    "bailing_hybrid": ("BailingHybridConfig", "BailingHybridForCausalLM", {**CHANNELS, "num_mtp_layers": 0}),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", EXPERTS),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", {"linear_num_key_heads": 4}),
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", {**EXPERTS, **INDEXED}),
    "glm5_next": ("Glm5NextTextConfig", "Glm5NextTextModel", {**CHANNELS, **SPARSE}),
}
#: 16 samples: shorter than the convolution, longer than a chunk, single positions side by side.
LENGTHS = [5, 1, 3, 70, 2, 2, 9, 1, 17, 4, 65, 3, 8, 1, 1, 20]
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
NUMBERS = torch.arange(16).repeat_interleave(torch.tensor(LENGTHS))[None].int()
ENDS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
BY = {
    "positions": {"position_ids": POSITIONS},
    "lengths": {"position_ids": POSITIONS, "cu_seq_lens_q": ENDS},
    "numbers": {"position_ids": POSITIONS, "seq_idx": NUMBERS},
}


@pytest.fixture
def pairs(modules):
    """Upstream's model and the patched one of a family, with equal weights."""

    def made(family):
        pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
        config, kind, sizes = FAMILIES[family]
        torch.manual_seed(0)
        return twins(*modules(family), kind, config_of(family, config, **{**HYBRID, **sizes}), std=0.2)

    return made


@pytest.fixture
def put(monkeypatch):
    """Lets layers of a model call another function in place of one of their file."""

    def replace(model, name, function):
        if DECORATOR is not None:
            monkeypatch.setattr(sys.modules[type(model).__module__], name, function)
            return
        for layer in model.model.layers:
            if hasattr(layer, "linear_attn"):
                monkeypatch.setattr(layer.linear_attn, HELD.get(name, name), function)

    return replace


def ids(rows=1, positions=212):
    torch.manual_seed(1)
    return torch.randint(2, HYBRID["vocab_size"], (rows, positions))


def step(model, calls):
    """Logits of calls, side by side, and the gradients of a sum over all of them."""
    model.zero_grad()
    logits = torch.cat([model(use_cache=False, **call)[0] for call in calls], dim=1)
    torch.manual_seed(2)
    (logits * torch.randn_like(logits)).sum().backward()
    return logits.detach(), {name: each.clone() for name, each in grads_of(model).items()}


def agree(found, expected, tolerance=2e-5):
    close(found[0], expected[0], tolerance)
    close(found[1], expected[1], 5 * tolerance)


@HANDED
@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_samples_are_separate_ones(family, pairs):
    if DECORATOR is None and family == "olmo_hybrid":
        pytest.skip("its convolution is a class of its own, and its rule gets no boundaries")
    theirs, ours = pairs(family)
    row = ids()
    apart = step(ours, [{"input_ids": each} for each in row.split(LENGTHS, dim=1)])
    agree(apart, step(theirs, [{"input_ids": each} for each in row.split(LENGTHS, dim=1)]), 1e-4)
    for given in BY.values():
        agree(step(ours, [{"input_ids": row, **given}]), apart, 1e-4)
    leaked = step(theirs, [{"input_ids": row, **BY["positions"]}])[0]
    assert (leaked - apart[0]).abs().max() > 0.1 * apart[0].abs().max()
    assert {
        each.backend for each in explain(ours).rows if each.op in ("gated_delta_rule", "causal_conv")
    } == {"torch"}


def test_rows_that_are_said_to_be_one_sample(pairs):
    theirs, ours = pairs("qwen3_next")
    expected = theirs(ids(2, 9), use_cache=False).logits
    for given in ({"cu_seq_lens_q": torch.tensor([0, 9, 18])}, {"seq_idx": torch.zeros(2, 9)}):
        for choice in ("auto", "causal_conv=eager,gated_delta_rule=eager"):
            set_choice(choice)
            close(ours(ids(2, 9), use_cache=False, **given).logits, expected, 1e-5)


@HANDED
def test_a_state_of_a_cache_is_not_shared_by_samples(pairs):
    _, ours = pairs("qwen3_next")
    home, layer = sys.modules[type(ours).__module__], ours.model.layers[0].linear_attn
    function = calls.separated(
        home.veomni_gated_delta_rule_scalar_decay, layer, home.torch_chunk_gated_delta_rule
    )
    query, value, g = torch.randn(1, 6, 2, 8), torch.randn(1, 6, 4, 8), -torch.rand(1, 6, 4)
    given = {"initial_state": torch.zeros(1, 4, 8, 8), "cu_seqlens": torch.tensor([0, 2, 6])}
    with pytest.raises(SamplesError, match="the row continues the state of a cache") as caught:
        function(query, query, value, g=g, beta=-g, **given)
    assert caught.value.where == "Qwen3NextGatedDeltaNet (layer 0)"


@HANDED
def test_rows_of_packed_samples(pairs):
    _, ours = pairs("qwen3_5")
    rows = ids(2, 12)
    positions = torch.tensor([[*range(5), *range(7)], [*range(9), *range(1), *range(2)]])
    found = ours(rows, position_ids=positions, use_cache=False).logits
    for row, lengths in enumerate(([5, 7], [9, 1, 2])):
        parts = rows[row : row + 1].split(lengths, dim=1)
        apart = torch.cat([ours(each, use_cache=False).logits for each in parts], dim=1)
        close(found[row], apart[0], 1e-5)


# Experts are chosen by rounded logits, so in half precision only the dense model is compared.
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen3_next", torch.float32), ("qwen3_5", torch.float32), ("qwen3_5", torch.bfloat16)],
)
def test_rows_of_one_sample_are_upstreams(family, dtype, pairs):
    theirs, ours = (each.to(dtype) for each in pairs(family))
    padding = torch.ones(2, 21, dtype=torch.long)
    padding[0, :4] = 0
    padded = (padding.cumsum(1) - 1).masked_fill(padding == 0, 1)
    batches = [
        {"input_ids": ids(2, 70)},
        {"input_ids": ids(2, 21), "attention_mask": padding, "position_ids": padded},
        {"input_ids": ids(2, 21), "attention_mask": padding.flip(1)},
    ]
    for call in batches:
        # In bfloat16, 5.9 also normalises query and key in it: upstream is as far from float32's result as a kernel.
        tolerance = 2e-5 if dtype is torch.float32 else 5e-2
        agree(step(ours, [call]), step(theirs, [call]), tolerance)


@HANDED
def test_checkpoints_recompute_with_the_same_boundaries(pairs):
    _, ours = pairs("qwen3_5")
    call = {"input_ids": ids(), **BY["positions"]}
    expected = step(ours, [call])
    ours.gradient_checkpointing_enable()
    agree(step(ours, [call]), expected, 1e-6)


@HANDED
def test_boundaries_are_found_once_a_call(pairs, monkeypatch):
    _, ours = pairs("qwen3_5")
    found = []
    monkeypatch.setattr(boundaries, "host_copy", lambda tensor: found.append(tensor) or tensor)
    ours(ids(), use_cache=False, **BY["positions"])
    assert len(found) == 1
    ours(ids(), use_cache=False)
    ours(ids(), use_cache=False, **BY["lengths"])
    assert len(found) == 1


def test_decoding_is_upstreams(pairs):
    theirs, ours = (each.eval() for each in pairs("qwen3_next"))
    padding = torch.ones(2, 9, dtype=torch.long)
    padding[0, :4] = 0
    given = {"attention_mask": padding, "max_new_tokens": 5, "do_sample": False, "output_logits": True,
             "return_dict_in_generate": True}  # fmt: skip
    found, expected = (each.generate(ids(2, 9), **given) for each in (ours, theirs))
    assert torch.equal(found.sequences, expected.sequences)
    close(torch.stack(found.logits), torch.stack(expected.logits), 1e-5)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "kimi_linear"])
def test_padding_within_a_prompt_is_no_sample(family, pairs):
    row = ids(2, 12)
    row[1, 4:6] = HYBRID["pad_token_id"]  # `generate` makes a mask of it, and positions of the mask
    theirs, ours = (model.eval() for model in pairs(family))
    expected, generated = (
        model.generate(
            row, max_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        for model in (theirs, ours)
    )
    close(torch.stack(generated.logits), torch.stack(expected.logits), 1e-5)


@HANDED
def test_a_cache_that_begins_with_packed_samples_holds_the_last_one(pairs):
    _, ours = pairs("qwen3_5")
    row = ids(1, 30)
    positions = torch.cat([torch.arange(20), torch.arange(10)])[None]
    # With a mask of the caller's, attention keeps the samples apart beside a cache as well.
    mask = torch.block_diag(torch.ones(20, 20), torch.ones(10, 10)).tril().bool()[None, None]
    packed = ours(row, position_ids=positions, attention_mask=mask, use_cache=True).past_key_values
    alone = ours(row[:, 20:], use_cache=True).past_key_values
    close(*(cache.layers[0].recurrent_states[0] for cache in (packed, alone)), 1e-5)
    with pytest.raises(SamplesError, match=r"do not divide 34 positions: \[0, 20, 30\]"):
        ours(row, past_key_values=packed, cu_seq_lens_q=torch.tensor([0, 20, 30]), use_cache=True)


@HANDED
@pytest.mark.parametrize("given", BY)
@pytest.mark.parametrize("op", ["causal_conv", "gated_delta_rule"])
def test_without_a_kernel_packed_samples_are_an_error(op, given, pairs):
    _, ours = pairs("qwen3_next")
    set_choice(f"{op}=eager")
    with pytest.raises(SamplesError, match="upstream's own code runs, which has no boundaries") as caught:
        ours(ids(), use_cache=False, **BY[given])
    assert caught.value.where == "Qwen3NextGatedDeltaNet (layer 0)" and op in caught.value.fix
    ours(ids(), use_cache=False)


def test_a_deactivated_hook_leaves_samples_to_upstream(pairs):
    theirs, ours = pairs("qwen3_5")
    set_active(False)
    found, expected = (each(ids(), use_cache=False, **BY["positions"]).logits for each in (ours, theirs))
    close(found, expected, 1e-6)
    refusal = "can't keep packed sequences apart"
    if refusal in inspect.getsource(hub_kernels):  # from 5.20 on
        with pytest.raises(ValueError, match=refusal):
            ours(ids(), use_cache=False, **BY["lengths"])


@pytest.fixture
def package(pairs, monkeypatch, put):
    """Installs a function as the package's for the patched model, and returns the model."""

    def install(name, distribution, function):
        _, ours = pairs("qwen3_next")
        holder = ModuleType(distribution)
        monkeypatch.setitem(sys.modules, distribution, holder)
        setattr(holder, name, function)
        own = {held: own for own, held in HELD.items()}.get(name, name)
        home = sys.modules[type(ours).__module__]
        if DECORATOR is None:
            monkeypatch.setattr(home, name, function)
        else:
            function = DECORATOR(name, distribution)(running(vars(home)[own]))
            assert running(function) is vars(holder)[name]
        put(ours, own, function)
        return ours

    return install


@HANDED
def test_a_package_that_takes_boundaries_gets_them(package):
    seen = []

    def chunk_gated_delta_rule(
        query, key, value, g, beta, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None,
    ):  # fmt: skip
        seen.append(cu_seqlens)
        return chunked.scalar_decay(
            query, key, value, g, beta, None, True, use_qk_l2norm_in_kernel, cu_seqlens
        )

    ours = package("chunk_gated_delta_rule", "fla", chunk_gated_delta_rule)
    expected = torch.cat([ours(each, use_cache=False).logits for each in ids().split(LENGTHS, dim=1)], dim=1)
    for given in BY.values():
        close(ours(ids(), use_cache=False, **given).logits, expected, 1e-4)
        assert seen.pop().tolist() == ENDS.tolist()
    rows = [each for each in explain(ours).rows if each.op == "gated_delta_rule"]
    assert all("chunk_gated_delta_rule computes it" in each.reason for each in rows)
    set_choice("gated_delta_rule=torch")
    seen.clear()
    close(ours(ids(), use_cache=False, **BY["positions"]).logits, expected, 1e-4)
    assert not seen


@HANDED
def test_a_package_with_numbers_of_samples_gets_these(package):
    seen = []

    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, seq_idx=None):
        seen.append(seq_idx)
        return hidden_states

    ours = package("causal_conv1d_fn", "causal_conv1d", causal_conv1d_fn)
    for given in BY.values():
        ours(ids(), use_cache=False, **given)
        assert torch.equal(seen.pop(), NUMBERS)


@pytest.mark.skipif(DECORATOR is None, reason="upstream itself calls a package's convolution with seq_idx")
def test_a_package_without_boundaries_is_an_error(package):
    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None):
        return hidden_states

    ours = package("causal_conv1d_fn", "causal_conv1d", causal_conv1d_fn)
    ours(ids(), use_cache=False)
    for given in BY.values():
        with pytest.raises(SamplesError, match="causal_conv1d_fn takes no boundaries") as caught:
            ours(ids(), use_cache=False, **given)
        assert caught.value.where == "Qwen3NextGatedDeltaNet (layer 0)"


@HANDED
def test_a_replaced_function_is_called_and_cannot_leak(pairs, put):
    _, ours = pairs("qwen3_next")
    seen = []

    def mine(*args, **kwargs):
        seen.append(kwargs)
        return torch.zeros_like(args[2]), None

    put(ours, "torch_chunk_gated_delta_rule", mine)
    ours(ids(), use_cache=False)
    assert len(seen) == 2
    with pytest.raises(SamplesError, match="mine takes no boundaries") as caught:
        ours(ids(), use_cache=False, **BY["positions"])
    assert caught.value.fix.startswith("restore upstream's function, or give yours a parameter cu_seqlens")


@HANDED
@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "causal_conv1d_fn"])
def test_a_function_around_upstreams_is_no_proof(name, pairs, put):
    """In 5.9 and 5.17 upstream's functions take boundaries and ignore them."""
    _, ours = pairs("qwen3_next")
    home = sys.modules[type(ours).__module__]
    if (upstream := vars(home)[name]) is None:
        pytest.skip("upstream's own code is a call of a module")

    def forwards(*args, cu_seqlens=None, seq_idx=None, **kwargs):
        return upstream(*args, **kwargs)

    own = f"{home.__name__}.{name}, upstream's code, which has no boundaries"
    for function, caller in ((forwards, "forwards calls "), (partial(upstream), "")):
        put(ours, name, function)
        with pytest.raises(SamplesError, match="nothing keeps them apart") as caught:
            ours(ids(), use_cache=False, **BY["positions"])
        assert caught.value.what.endswith(f"{caller}{own}") and "wrapped" not in str(caught.value)


@HANDED
def test_a_function_with_boundaries_of_its_own_gets_them(pairs, put):
    _, ours = pairs("qwen3_next")

    def mine(query, key, value, g, beta, cu_seqlens=None, **options):
        return chunked.scalar_decay(query, key, value, g, beta, None, True, True, cu_seqlens)

    expected = ours(ids(), use_cache=False, **BY["positions"]).logits
    put(ours, "torch_chunk_gated_delta_rule", mine)
    close(ours(ids(), use_cache=False, **BY["positions"]).logits, expected, 1e-4)


@HANDED
@pytest.mark.parametrize("given", BY)
def test_a_forward_that_drops_boundaries_is_an_error(given, pairs, monkeypatch):
    _, ours = pairs("qwen3_next")
    kind = type(ours.model.layers[2].linear_attn)
    forward = kind.forward

    def drops(self, hidden_states, attention_mask=None, position_ids=None, **kwargs):
        kept = (
            kwargs if honest else {name: kwargs[name] for name in ("cache", "cache_params") if name in kwargs}
        )
        return forward(self, hidden_states, attention_mask=attention_mask, **kept)

    monkeypatch.setattr(kind, "forward", drops)
    honest = True
    expected = ours(ids(), use_cache=False, **BY[given]).logits
    honest = False
    with pytest.raises(SamplesError, match="did not get their boundaries from its forward") as caught:
        ours(ids(), use_cache=False, **BY[given])
    assert caught.value.where == "Qwen3NextGatedDeltaNet (layer 0)"
    assert "hand on all keyword arguments" in caught.value.fix
    # A call that is over, or was, expects nothing of the layers: the traceback holds the failed one.
    ours(ids(), use_cache=False)
    honest = True
    close(ours(ids(), use_cache=False, **BY[given]).logits, expected, 1e-6)
    ours.model.layers[0].linear_attn(torch.randn(1, 9, HYBRID["hidden_size"]))


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["kimi_linear", "qwen3_5"])
def test_attention_that_would_mix_samples_is_an_error(family, pairs):
    """Each of these calls leaks in attention: samples are in masks by position_ids, and by these alone."""
    _, ours = pairs(family)
    row = ids()
    apart = torch.cat([ours(each, use_cache=False).logits for each in row.split(LENGTHS, dim=1)], dim=1)
    for given in (
        {**BY["positions"], "use_cache": True},
        {**BY["positions"], "use_cache": None},
        {**BY["positions"], "attention_mask": torch.ones_like(row)},
        {"cu_seq_lens_q": ENDS},
        {"seq_idx": NUMBERS},
    ):
        with pytest.raises(SamplesError, match="sdpa attention does not keep them apart") as caught:
            ours(row, **{"use_cache": False, **given})
        assert caught.value.where == type(ours.model).__name__
    ours.gradient_checkpointing_enable()  # makes no cache
    close(ours(row, **BY["positions"]).logits, apart, 1e-4)


def test_attention_that_reads_no_positions_is_an_error(pairs, monkeypatch):
    kinds = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    config, kind, sizes = FAMILIES["glm5_next"]
    monkeypatch.setitem(FAMILIES, "glm5_next", (config, kind, {**sizes, **kinds}))
    _, ours = pairs("glm5_next")
    for given in BY.values():
        with pytest.raises(SamplesError, match="no positions reach it"):
            ours(ids(), use_cache=False, **given)
    ours(ids(), use_cache=False)


@pytest.mark.skipif(DECORATOR is None, reason="upstream passes none twice")
def test_arguments_that_come_twice_are_an_error_of_one_line(pairs):
    _, ours = pairs("qwen3_next")
    with pytest.raises(TypeError, match=r"gated_delta_rule\(\) got multiple values for keyword") as caught:
        ours(ids(), use_cache=False, position_ids=POSITIONS, cu_seqlens=ENDS)
    assert "Linear(" not in str(caught.value)
