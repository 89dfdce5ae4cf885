import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veomni_hook.errors import NameMapError
from veomni_hook.patches.code.snippet import apply_name_map

words = st.text(alphabet="abcAB1_", min_size=1, max_size=8)


def mapped(text, name_map):
    return apply_name_map(text, name_map, where="here")


@pytest.mark.parametrize(
    ("text", "name_map", "expected"),
    [
        ("Qwen3VLModel(Qwen3VLConfig)", {"Qwen3VL": "Qwen3VLMoe"}, "Qwen3VLMoeModel(Qwen3VLMoeConfig)"),
        ("Qwen3, Qwen3Moe", {"Qwen3": "Qwen3Moe"}, "Qwen3Moe, Qwen3Moe"),
        ("Qwen3_5MLP, Qwen3MLP", {"Qwen3_5": "A", "Qwen3": "B"}, "AMLP, BMLP"),
        ("Qwen3a, Qwen3_a", {"Qwen3": "B"}, "Qwen3a, B_a"),
        ("_Qwen3Helper", {"Qwen3": "B"}, "_BHelper"),
        ("modelQwen3 Qwen3MLP", {"Qwen3": "B"}, "modelQwen3 BMLP"),
        ("a, b", {"a": "b", "b": "a"}, "b, a"),
        ("'see Qwen3MLP' # Qwen3MLP\n", {"Qwen3": "B"}, "'see BMLP' # BMLP\n"),
        (r"'\nQwen3MLP\tnone'", {"Qwen3": "B"}, r"'\nBMLP\tnone'"),
        ("self.attn(x)", {"self.attn": "self.self_attn"}, "self.self_attn(x)"),
        ("myself.attn self.attn", {"self.attn": "q"}, "myself.attn q"),
    ],
)
def test_name_map(text, name_map, expected):
    assert mapped(text, name_map) == expected


prefixes = st.from_regex(r"[A-C][ab]{0,2}1?", fullmatch=True)  # as in class names: Qwen3, Llama


suffixes = st.from_regex(r"[A-C][ab]+", fullmatch=True)  # a word of a class name: Moe, Text


@given(st.lists(words, max_size=6), st.lists(words, max_size=3), prefixes, suffixes)
def test_extending_map_is_idempotent(names, ends, key, suffix):
    text = " ".join([key, *names, *(key + end for end in ends), *(key + suffix + end for end in ends)])
    once = mapped(text, {key: key + suffix})
    try:
        assert mapped(once, {key: key + suffix}) == once
    except NameMapError:
        assert not re.search(rf"(?<!\w){re.escape(key)}(?!\w)", once)


@pytest.mark.parametrize("name_map", [{"Qwen3Mo": "X"}, {"Qwen3": "X", "Llama": "Y"}])
def test_entry_that_matches_nothing(name_map):
    with pytest.raises(NameMapError) as caught:
        mapped("Qwen3VLModel", name_map)
    assert caught.value.where == "here"
