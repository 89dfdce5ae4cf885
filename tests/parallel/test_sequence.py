"""Models whose sequences two processes share: what is refused, and what must stay right around it."""

from importlib.metadata import version

import pytest

CLOSE = 1e-5


@pytest.fixture
def facts(ranks):
    return ranks.once("facts_of_sequence:facts", 2, "sp=2")[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name",
    [
        "a_reference_model_and_other_lengths_between_forward_and_backward",
        "padded_batches_of_other_lengths",
        "new_layers",
        "after_an_error_in_the_layers",
        "accumulated_gradients",
        "fully_sharded_training",
    ],
)
def test_gradients_are_those_of_one_process(facts, name):
    assert isinstance(facts[name], float), facts[name]
    assert facts[name] < CLOSE


def test_a_gradient_of_all_positions_is_summed_only_where_somebody_may_see_it(facts):
    told = facts["positions_of_the_loss"]
    assert {seen: count for seen, (count, _) in told.items() if not count} == {"nobody": 0}
    assert all(far < CLOSE for _, far in told.values())


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "heads_that_cannot_be_divided",
            [
                "LlamaAttention",
                "sp=2 does not divide its 3 heads, and its implementation `<lambda>` is not known",
                "choose sp from 1, or set VEOMNI_PARALLEL without sp",
            ],
        ),
        ("attention_weights", ["LlamaModel was asked for `attentions`", "output_attentions"]),
        ("layers_that_bypass_the_interface", ["LlamaModel", "only 1 of its 2 layers"]),
        ("tensor_parallelism", ["LlamaModel", "tensor parallelism divides layers.0.mlp.gate_proj.weight"]),
        ("filled_caches", ["this cache was filled in a pass with gradients"]),
        ("kept_caches", ["its cache holds keys already"]),
        (
            "explanations",
            [
                "sp=2: with gradients, each of 2 processes runs the layers of LlamaModel",
                "attention (sdpa) gets its positions and all heads, while keys go around a ring of 2",
            ],
        ),
    ],
)
def test_what_is_refused_and_explained(facts, name, parts):
    assert [part for part in parts if part not in facts[name]] == [], facts[name]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("ids", "other values of `input_ids`"),
        ("two tokens", "other values of `input_ids`"),
        ("labels", "other values of `labels`"),
        (
            "lengths",
            "other shapes of `input_ids`: torch.int64 [2, 16] in rank 0, torch.int64 [2, 17] in rank 1",
        ),
        ("names", "other shapes of `position_ids`: no such tensor in rank 0, torch.int64 [1, 16] in rank 1"),
        ("embeddings", "hidden states of other tokens"),
    ],
)
def test_other_batches_are_an_error_that_names_step_and_field(facts, name, what):
    told = facts["other_batches"][name]
    assert f"the 2 processes that share each sequence have {what}" in told
    assert "of LlamaForCausalLM in training, rank 0" in told and "data_shard()" in told


def test_a_model_with_recurrent_layers_is_refused_in_training_only(facts):
    told = facts["recurrent_layers_are_refused"]
    assert "Mamba2Model cannot be split over sp=2 processes: recurrent layers" in told["error"]
    assert told["evaluated"] is True
    assert "sp=2: Mamba2Model cannot be trained with it: recurrent layers" in told["explain"]


@pytest.mark.parametrize(
    ("name", "model", "reason"),
    [
        ("gpt2", "GPT2Model", "cross attention"),
        ("upcast", "GPT2Attention", "_upcast_and_reordered_attn"),
        ("upcast, checkpoint", "GPT2Attention", "_upcast_and_reordered_attn"),
        ("llama4", "Llama4TextModel", "Llama4TextMoe.forward"),
        ("bert", "BertModel", "its layers are in BertEncoder"),
        ("t5", "T5Stack", "cross attention"),
    ],
)
def test_other_architectures_are_refused_before_the_first_step(facts, name, model, reason):
    told = facts["other_architectures"][name]
    if name.startswith("upcast") and version("transformers").startswith("5.2."):
        pytest.skip("there the loop over layers collects what they return, so the model is refused")
    assert f"{model} cannot be split over sp=2 processes: " in told
    assert reason in told
    assert "set VEOMNI_PARALLEL without sp for this model (docs/parallel.md" in told


def test_copies_and_saved_models_know_nothing_of_processes(facts):
    told = facts["copies_and_saved_models"]
    assert told["names us"] is False
    assert told["states"] is True
    assert told["copy"] < CLOSE


def test_generation_is_not_split(facts):
    assert facts["generation"] is True


def test_a_registered_implementation_sees_all_positions_and_its_heads(facts):
    told = facts["an_implementation_of_the_user"]
    assert told["whole"] == [[2, 4, 16, 8], [2, 1, 16, 8], 4, None]
    assert told["split"] == [[2, 2, 16, 8], [2, 1, 16, 8], 2, None]
    assert told["groups"] == [4]
    assert told["error"] < CLOSE


def test_cumulative_lengths_are_those_of_whole_sequences(facts):
    told = facts["packed_by_cumulative_lengths"]
    assert told["whole"] == [4, 15, 0, 5, 15, 10]
    assert told["split"] == [2, 15, 0, 5, 15, 10]
    assert told["error"] < CLOSE


def test_derivatives_of_gradients_need_an_sp_that_divides_the_key_heads(facts):
    told = facts["derivatives_of_gradients"]
    assert "no derivative of its gradients" in told["1"]
    assert "choose sp from 1, or set VEOMNI_PARALLEL without sp" in told["1"]
    assert told["2"] == "no error"


def test_dropout_differs_by_process_and_is_recomputed_alike(facts):
    assert facts["dropout"] == {"recomputed": 0.0, "generators agree": True}
    assert facts["own_dropout_in_each_process"] is True


def test_only_formulas_that_are_known_run_around_a_ring(facts):
    told = facts["eager_functions_that_were_replaced"]
    assert "it, or a function that it calls, was replaced" in told["repeat_kv"]
    assert "is not known" in told["eager_attention_forward"]
    assert "sp=2 does not divide its 3 heads, and it has dropout" in told["dropout"]


def test_keys_go_around_between_hosts(facts):
    told = facts["hosts_of_one_process"]
    assert told["rings"] == [2]
    assert told["error"] < CLOSE
    assert "around a ring of 2" in told["explain"]
