"""Whole models whose layers mix the positions of a row: samples that share one stay apart, or it is an error."""

import importlib
import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from transformers import __version__
from transformers.integrations import hub_kernels

from tests.kernels.matching import close
from tests.kernels.patched_qwen3 import SIZES, load
from veomni_hook.errors import SamplesError
from veomni_hook.kernels.selection.process_choice import set_active
from veomni_hook.kernels.shared.hub_functions import running

HYBRID = {
    **SIZES, "num_hidden_layers": 3, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": 2,
}  # fmt: skip
STATES = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16,
}  # fmt: skip
HEADS = {"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 16, "state_size": 8}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHORT = {"layer_types": ["conv", "full_attention", "conv"]}
N_GRAMS = {"ple_layer_ids": [1], "ngram_vocab_size_base": 50, "heads_per_ngram": 2, "ple_embed_dim": 32}
RULE = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
RULE |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
LINEAR = ["linear_attention", "full_attention", "linear_attention"]
SLIDING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4}
#: The prefix of the names, sizes, and the layer of the error.
MODELS = {
    "lfm2": ("Lfm2", SHORT, "Lfm2ShortConv (layer 0)"),
    "bamba": ("Bamba", {**STATES, "attn_layer_indices": [1]}, "BambaMixer (layer 0)"),
    "mamba2": ("Mamba2", HEADS, "Mamba2Mixer (layer 0)"),
}
SLOW = {
    "lfm2_moe": ("Lfm2Moe", {**SHORT, **EXPERTS, "num_dense_layers": 1}, "Lfm2MoeShortConv (layer 0)"),
    "qwen3_next": ("Qwen3Next", {**EXPERTS, **RULE, "layer_types": LINEAR}, "Qwen3NextGatedDeltaNet (layer 0)"),
    "xlstm": ("xLSTM", {"num_heads": 4, "num_blocks": 3}, "xLSTMBlock"),
    "lfm3": ("Lfm3", SHORT, "Lfm3ShortConv (layer 0)"),
    "mamba": ("Mamba", {"state_size": 8}, "MambaMixer (layer 0)"),
    "falcon_mamba": ("FalconMamba", {"state_size": 8}, "FalconMambaMixer (layer 0)"),
    "falcon_h1": ("FalconH1", {**STATES, "mamba_d_ssm": 64}, "FalconH1Mixer (layer 0)"),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {**STATES, **EXPERTS, "layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 16},
        "GraniteMoeHybridMambaLayer (layer 0)",
    ),
    "jamba": (
        "Jamba",
        {**EXPERTS, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
        "JambaMambaMixer (layer 0)",
    ),
    "recurrent_gemma": ("RecurrentGemma", {"lru_width": 32}, "RecurrentGemmaRglru"),
    "minimax": ("MiniMax", {**EXPERTS, "layer_types": LINEAR, "block_size": 16}, "MiniMaxLightningAttention (layer 0)"),
    "inkling": (
        "Inkling",
        {**SLIDING, "n_routed_experts": 4, "n_shared_experts": 1, "mlp_layer_types": ["dense"] * 3},
        "InklingShortConvolution (layer 0)",
    ),
    "zaya": ("Zaya", {**EXPERTS, "num_experts_per_tok": 1}, "ZayaCCAProjection (layer 0)"),
    "rwkv": ("Rwkv", {"attention_hidden_size": 32}, "RwkvSelfAttention"),
    "qwen4_exp": ("Qwen4Exp", {**EXPERTS, **N_GRAMS, "layer_types": LINEAR[:1] * 3}, "Qwen4ExpTextPLELayer (layer 0)"),
}  # fmt: skip
#: The releases from which on samples stay apart.
APART = {"lfm2": (5, 23), "lfm2_moe": (5, 23), "qwen3_next": (5, 9)}
LENGTHS = [5, 1, 3, 40, 2, 2, 9]
POSITIONS = {"position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None]}
BY = {
    "positions": {},
    "lengths": {"cu_seq_lens_q": torch.tensor([0, *LENGTHS]).cumsum(0).int()},
    "numbers": {"seq_idx": torch.arange(7).repeat_interleave(torch.tensor(LENGTHS))[None].int()},
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Upstream's model and the patched one of a family, with equal weights."""

    def made(family):
        prefix, sizes, _ = {**MODELS, **SLOW}[family]
        name = f"transformers.models.{family}"
        home = pytest.importorskip(f"{name}.modeling_{family}")
        configs = importlib.import_module(f"{name}.configuration_{family}")
        config = getattr(configs, f"{prefix}TextConfig", None) or getattr(configs, f"{prefix}Config")
        patched = load(tmp_path_factory.mktemp(family), home.__name__)
        config = config(**{**HYBRID, **sizes})
        torch.manual_seed(0)
        theirs, ours = (getattr(each, f"{prefix}ForCausalLM")(config).eval() for each in (home, patched))
        for parameter in theirs.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.2)
        ours.load_state_dict(theirs.state_dict())
        return theirs, ours

    return made


def logits(model, ids, **given):
    use_cache = {} if "Rwkv" in type(model).__name__ else {"use_cache": False}
    with torch.no_grad():
        return model(ids, **use_cache, **given).logits


def check(family, theirs, ours):
    torch.manual_seed(1)
    row = torch.randint(3, HYBRID["vocab_size"], (1, sum(LENGTHS)))
    layer = {**MODELS, **SLOW}[family][2]
    release = tuple(int(each) for each in __version__.split(".")[:2])
    stays_apart = release >= APART.get(family, (6,))
    apart = torch.cat([logits(theirs, each) for each in row.split(LENGTHS, dim=1)], dim=1)
    leaked = (logits(theirs, row, **POSITIONS) - apart).abs().max()
    assert leaked > 5e-3 * apart.abs().max()
    for by in BY.values():
        if stays_apart:
            close(logits(ours, row, **POSITIONS, **by), apart, 1e-5)
            continue
        with pytest.raises(SamplesError, match="samples share a row, and nothing keeps them apart") as caught:
            logits(ours, row, **POSITIONS, **by)
        assert caught.value.where == layer and "pass one sample a row" in caught.value.fix
    set_active(False)
    close(logits(ours, row, **POSITIONS), logits(theirs, row, **POSITIONS), 1e-6)


def check_rows_of_one_sample(theirs, ours):
    torch.manual_seed(1)
    rows = torch.randint(3, HYBRID["vocab_size"], (2, 12))
    padding = torch.ones(2, 12, dtype=torch.long)
    padding[0, :4] = 0
    padded = (padding.cumsum(1) - 1).masked_fill(padding == 0, 1)
    for given in (
        {},
        {"attention_mask": padding},
        {"attention_mask": padding, "position_ids": padded},
        {"position_ids": torch.arange(12)[None]},
    ):
        close(logits(ours, rows, **given), logits(theirs, rows, **given), 1e-5)
    expected = logits(theirs, rows)
    for given in ({"cu_seq_lens_q": torch.tensor([0, 12, 24])}, {"seq_idx": torch.zeros(2, 12)}):
        try:
            found = logits(ours, rows, **given)
        except (ValueError, NotImplementedError) as error:  # upstream's own, which does not look at values
            assert any(each in str(error) for each in ("can't keep packed", "requires fast path"))
        else:
            close(found, expected, 1e-5)


def check_decoding(theirs, ours):
    rows = torch.randint(3, HYBRID["vocab_size"], (2, 9))
    given = {"attention_mask": torch.ones(2, 9), "max_new_tokens": 3, "do_sample": False}
    assert torch.equal(ours.generate(rows, **given), theirs.generate(rows, **given))


@pytest.mark.parametrize("family", [*MODELS, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_samples_stay_apart_or_it_is_an_error(family, pairs):
    theirs, ours = pairs(family)
    check_rows_of_one_sample(theirs, ours)
    if family not in ("qwen4_exp", "xlstm"):  # upstream's own cache raises an error for these sizes
        check_decoding(theirs, ours)
    check(family, theirs, ours)


def test_layers_that_packages_compute_get_the_numbers_of_samples(pairs, monkeypatch):
    """With the packages, upstream's layers take ``seq_idx``; without it, there is an error that names it."""
    declared = getattr(hub_kernels, "use_kernel_func_from_hub_with_fallback", None)
    if declared is None:
        pytest.skip("this release declares no functions")
    _, ours = pairs("bamba")
    home, seen = sys.modules[type(ours).__module__], []

    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, seq_idx=None):
        seen.append(seq_idx)
        return hidden_states

    def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, seq_idx=None):
        seen.append(seq_idx)
        return x

    functions = {"causal_conv1d_fn": causal_conv1d_fn, "mamba2_chunk_scan": mamba_chunk_scan_combined}
    for own, function in functions.items():
        holder = ModuleType("package")
        monkeypatch.setitem(sys.modules, "package", holder)
        setattr(holder, function.__name__, function)
        wrap = declared(function.__name__, "package")
        monkeypatch.setattr(home, own, wrap(running(vars(home)[own])))
    row = torch.randint(3, HYBRID["vocab_size"], (1, sum(LENGTHS)))
    logits(ours, row, **POSITIONS, **BY["numbers"])
    assert len(seen) == 4 and all(torch.equal(each, BY["numbers"]["seq_idx"]) for each in seen)
    for given in (BY["positions"], BY["lengths"]):
        with pytest.raises(SamplesError, match="needs seq_idx, which was not passed"):
            logits(ours, row, **POSITIONS, **given)
