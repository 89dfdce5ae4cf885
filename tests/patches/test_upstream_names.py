"""Upstream's names of variables: read from the code, declared in one table, or in the budget below.

A name of upstream's is a parameter of a forward of a model or a layer, or of a mask function. Every string in the
packages that are for upstream's code that equals one counts.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch.overrides
import transformers

import veomni_hook
from veomni_hook.patches.upstream_names import UPSTREAM_NAMES, names

ROOT = Path(veomni_hook.__file__).parent
UPSTREAM = Path(transformers.__file__).parent
PACKAGES = ("patches", "parallel", "multimodal", "kernels")
TABLE = ROOT / "patches" / "upstream_names.py"
_KINDS = ("PreTrainedModel", "GradientCheckpointingLayer")
#: The other strings, by what they are: how many there may be of each name at most. A budget only shrinks.
BUDGET: dict[str, dict[str, int]] = {
    "an attribute of every model, or the name of a PatchConfig": {"config": 19},
    "operands of our own kernels and helpers, our ops, or fields of ours": {
        "causal_mask": 1, "chunk_size": 3, "code": 1, "frame": 1, "hidden": 8, "hidden_states": 18, "keys": 7,
        "labels": 3, "queries": 4, "states": 9, "temperature": 4,
    },
    "what transformers' attention interface and its kwargs are called; attention gets all of them by name": {
        "allow_is_causal_skip": 1, "attention_mask": 6, "cache": 2, "cu_seqlens": 13, "layer_idx": 1,
        "output_attentions": 2, "position_bias": 2, "sliding_window": 3,
    },
    "mask functions: a pattern of their whole signature, and a miss if it differs": {
        "kv_length": 2, "kv_offset": 1, "local_attention_size": 2, "padding_mask": 2, "q_length": 1,
        "q_offset": 1, "query_length": 2,
    },
    "what the state_dict of torch's optimizers has": {"state": 1},
    "what a processor returns, and so a batch has: upstream's interface to data": {
        "audio_feature_lengths": 1, "feature_attention_mask": 3, "grid_thw": 3, "image": 1, "image_sizes": 2,
        "input_features": 1, "merge_sizes": 1, "mm_token_type_ids": 1, "patch_size": 1,
        "second_per_grid_ts": 1, "spatial_shapes": 2, "use_audio_in_video": 1, "video_second_per_grid": 1,
    },
    "not in the table yet: to be read from the code, or declared": {
        "input_ids": 3, "inputs_embeds": 2, "last_hidden_state": 1,
        "per_layer_input": 1, "position_ids": 12, "token_type_ids": 1,
    },
}  # fmt: skip


def _functions(file):
    tree = ast.parse(file.read_text("utf-8"))
    if file.name == "masking_utils.py":
        yield from (node for node in tree.body if isinstance(node, ast.FunctionDef))
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef) and any(
            ast.unparse(base).endswith(_KINDS) for base in owner.bases
        ):
            methods = (node for node in owner.body if isinstance(node, ast.FunctionDef))
            yield from (method for method in methods if method.name == "forward")


@pytest.fixture(scope="module")
def upstreams():
    """The names of upstream's variables, without those that torch's own functions have."""
    files = [*UPSTREAM.glob("models/*/modeling_*.py"), UPSTREAM / "masking_utils.py"]
    found = {
        argument.arg for file in files for function in _functions(file) for argument in _arguments(function)
    }
    return found - {"self"} - torchs()


def _arguments(function):
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def torchs():
    every = torch.overrides.get_testing_overrides().values()
    return {name for function in every for name in inspect.signature(function).parameters} | {
        "device",
        "dtype",
    }


def strings(text):
    """The strings of code, without docstrings and the names in ``__all__``."""
    tree = ast.parse(text)
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
        for inner in ([node.value] if isinstance(node, ast.Expr) else ast.walk(node))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def counted(upstreams):
    """The places of each name, once for each string."""
    found: dict[str, list[str]] = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for text in strings(file.read_text("utf-8")):
                if file != TABLE and text in upstreams:
                    found.setdefault(text, []).append(file.relative_to(ROOT).as_posix())
    return found


def test_every_other_name_is_in_the_budget(upstreams):
    places = counted(upstreams)
    allowed = {name: most for every in BUDGET.values() for name, most in every.items()}
    above = {name: held for name, held in places.items() if len(held) > allowed.get(name, 0)}
    assert not above, "read these names from the code, or declare them in patches/upstream_names.py"
    release = ".".join(transformers.__version__.split(".")[:2])
    if release == "5.23":  # other releases have other names
        below = {name: most for name, most in allowed.items() if len(places.get(name, ())) < most}
        assert not below, "fewer than allowed: shrink the budget"


def test_the_table_says_in_which_releases_names_were_seen():
    release = ".".join(transformers.__version__.split(".")[:2])
    words = {
        word
        for file in UPSTREAM.glob("models/*/modeling_*.py")
        for word in re.findall(r"^ +(\w+): ", file.read_text("utf-8"), re.MULTILINE)
    }
    for held in UPSTREAM_NAMES.values():
        for name, seen in held.items():
            if release in ("5.9", "5.23", "5.24"):
                assert (name in words) == (release in seen) or (name in words and name == "cache"), name


def test_a_name_has_one_meaning_and_the_oldest_comes_first():
    every = [name for meaning in UPSTREAM_NAMES for name in names(meaning)]
    assert len(every) == len({*every})
    assert names("the cache") == ("past_key_values", "cache_params", "cache")
