from functools import partial

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from tests.kernels.matching import assert_matches
from veomni_hook.kernels.rotary import reference
from veomni_hook.kernels.rotary.torch import loses, refuses, rotary

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def operands(batch=2, heads=3, kv_heads=1, length=5, width=8, cos_batch=1, dtype=torch.float32):
    query = torch.randn(batch, length, heads, width).to(dtype).transpose(1, 2)
    key = torch.randn(batch, length, kv_heads, width).to(dtype).transpose(1, 2)
    angle = torch.randn(cos_batch, length, width)
    return [query, key, angle.cos().to(dtype), angle.sin().to(dtype)]


QUERY_AND_KEY = (True, True, False, False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [{}, {"cos_batch": 2}, {"length": 1}, {"length": 0}, {"width": 2}, {"width": 130, "length": 33}],
    ids=str,
)
def test_has_upstreams_bits(shape, dtype):
    given = operands(**shape, dtype=dtype)
    assert_matches(rotary, apply_rotary_pos_emb, given, QUERY_AND_KEY, exact=True)
    assert_matches(reference.half_split, apply_rotary_pos_emb, given, QUERY_AND_KEY, exact=True)


def test_only_what_depends_on_a_parameter_requires_a_gradient():
    query, key, cos, sin = operands()
    turned = rotary(query.requires_grad_(), key, cos, sin)
    assert [x.requires_grad for x in turned] == [True, False]


def test_a_loss_of_one_output_only():
    query, key, cos, sin = operands()
    query.requires_grad_(), key.requires_grad_()
    rotary(query, key, cos, sin)[0].sum().backward()
    assert query.grad is not None and key.grad is None


def asked(given, heads_at=1):
    return refuses(None, *given, heads_at, apply_rotary_pos_emb)


def with_heads_after_positions(given):
    query, key, cos, sin = given
    return [query.transpose(1, 2), key.transpose(1, 2), cos, sin]


def test_takes_what_the_attention_of_the_models_gives():
    assert asked(operands()) is None
    assert asked(operands(cos_batch=2)) is None
    assert asked(with_heads_after_positions(operands(cos_batch=2)), heads_at=2) is None


def test_heads_after_positions_have_upstreams_bits():
    given = with_heads_after_positions(operands(cos_batch=2))
    ours, upstream = (partial(function, unsqueeze_dim=2) for function in (rotary, apply_rotary_pos_emb))
    assert_matches(ours, upstream, given, QUERY_AND_KEY, exact=True)


@pytest.mark.parametrize("heads_at", [0, 3, -2, None, True, 1.0])
def test_refuses_other_places_of_the_heads(heads_at):
    assert "1 or 2" in asked(operands(), heads_at=heads_at)


def test_the_length_is_looked_for_beside_the_heads():
    assert "do not match the positions" in asked(operands(), heads_at=2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda q, k, c, s: [q, k, c.double(), s.double()], "dtypes"),
        (lambda q, k, c, s: [q, k, c[..., :4], s[..., :4]], "head_dim"),
        (lambda q, k, c, s: [q[..., :7], k[..., :7], c[..., :7], s[..., :7]], "head_dim"),
        (lambda q, k, c, s: [q, k, c[0], s[0]], "length"),
        (lambda q, k, c, s: [q, k, c[:, :1], s[:, :1]], "do not match the positions"),
        (lambda q, k, c, s: [q, k, c.expand(4, -1, -1), s.expand(4, -1, -1)], "do not match the positions"),
        (lambda q, k, c, s: [q, k, c.clone().requires_grad_(), s], "gradient"),
        (lambda q, k, c, s: [q, k.as_subclass(Strange), c, s], "Strange"),
    ],
)
def test_refuses(change, reason):
    assert reason in asked(change(*operands()))


def test_refuses_under_transforms_and_tracing():
    seen, given = [], operands()

    def look(query):
        seen.append(asked([query, *given[1:]]))
        return query * 2

    torch.func.vmap(look)(torch.randn(2, 2, 3, 5, 8))
    torch.jit.trace(look, (given[0],), check_trace=False)
    with torch.autograd.forward_ad.dual_level():
        seen.append(asked(operands()))
    assert len(seen) == 3 and None not in seen


def test_auto_leaves_small_calls_without_gradients_to_upstream():
    query, key, cos, sin = operands()
    assert loses(None, query, key, cos, sin, 1, apply_rotary_pos_emb)
    assert loses(None, query.requires_grad_(), key, cos, sin, 1, apply_rotary_pos_emb) is None
    with torch.no_grad():
        assert loses(None, query, key, cos, sin, 1, apply_rotary_pos_emb)
        large = torch.empty(1, 32, 2048, 64)
        assert loses(None, large, large, cos, sin, 1, apply_rotary_pos_emb) is None


class Strange(torch.Tensor):
    pass
