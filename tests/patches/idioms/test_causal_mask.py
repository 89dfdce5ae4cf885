import ast

import pytest

from tests.patches.idioms.applied import changed, sites_of, spliced
from tests.patches.upstream import ROOT
from veomni_hook.patches.idioms import causal_mask
from veomni_hook.patches.site import Status

SOURCE = (ROOT / "masking_utils.py").read_text("utf-8")
ANSWERS = {
    "find_packed_sequence_indices": "is_one_sequence(position_ids)",
    "_ignore_causal_mask_sdpa": "is_causal_suffices(padding_mask, ",
    "_ignore_bidirectional_mask_sdpa": "needs_no_mask(padding_mask, kv_length, local_attention_size)",
}
OLD = """
import torch

def _ignore_causal_mask_sdpa(padding_mask, query_length, kv_length, kv_offset, local_attention_size=None):
    if (
        not is_tracing(padding_mask)
        and (query_length == 1 or kv_length == query_length)
        and (local_attention_size is None or kv_length < local_attention_size)
        and (padding_mask is None or padding_mask.all())
    ):
        return True
    return False
"""


def by_target(source):
    return {site.target: site for site in sites_of(causal_mask, source)}


def test_each_function_asks_first_and_only_dynamo():
    patched = ast.parse(spliced(SOURCE, by_target(SOURCE).values()))
    for function in patched.body:
        if isinstance(function, ast.FunctionDef) and function.name in ANSWERS:
            _, guard, *_ = function.body
            assert isinstance(guard, ast.If)
            assert ast.unparse(guard.test) == "torch.compiler.is_dynamo_compiling()"
            assert ANSWERS[function.name] in ast.unparse(guard)


def test_another_name_for_the_queries_and_no_offset():
    (site,) = by_target(OLD).values()
    assert site.status is Status.ROUTED
    assert "is_causal_suffices(padding_mask, query_length, kv_length, local_attention_size):" in spliced(
        OLD, [site]
    )


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("kv_offset, local", "kv_offset, sinks, local", "its parameters differ: sinks"),
        ("padding_mask, query_length", "padding, query_length", "its parameters differ: padding, padding_mask"),
        ("query_length == 1 or", "query_length == 2 or", "it has no QUERIES == 1 or kv_length == QUERIES"),
        ("import torch\n", "import torch as t\n", "the module does not import torch"),
    ],
)  # fmt: skip
def test_other_code_is_a_miss_with_the_reason(old, new, reason):
    (site,) = by_target(changed(OLD, (old, new))).values()
    assert (site.status, site.edits) == (Status.MISSED, ())
    assert site.reason.startswith(reason), site.reason


@pytest.mark.parametrize(
    ("old", "new"),
    [("!= 1).cumsum", "< 1).cumsum"), ("prepend=first_dummy_value", "append=first_dummy_value")],
)
def test_other_packing_is_a_miss(old, new):
    site = by_target(changed(SOURCE, (old, new)))["find_packed_sequence_indices"]
    assert site.status is Status.MISSED and site.reason.startswith("it has no ")


def test_a_function_that_is_the_same_while_tracing_needs_nothing():
    assert by_target(OLD.replace("not is_tracing(padding_mask)\n        and ", "")) == {}
