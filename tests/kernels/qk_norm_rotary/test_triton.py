"""The Triton kernels: through the interpreter on a CPU (conftest sets it up), compiled on a GPU."""

import pytest
import torch

from tests.kernels import declared
from tests.kernels.declared import refusal
from tests.kernels.matching import DEVICE, assert_matches

pytest.importorskip("triton")


WHOLE, PARTIAL = "cast_before_weight_half_split", "one_plus_weight_half_split_partial"
# Batch, heads of queries and keys, length, head_dim, what turns of it.
SIZES = [
    (2, 4, 2, 3, 16, 16),
    (1, 5, 1, 7, 12, 12),
    (3, 2, 2, 1, 6, 4),
    (2, 3, 3, 2, 24, 10),
    (2, 40, 3, 2, 128, 128),
    (0, 4, 2, 3, 8, 8),
    (2, 4, 2, 0, 8, 8),
]

refuses = refusal("qk_norm_rotary", "cast_before_weight_half_split", "triton")


def operands(size=SIZES[0], dtype=torch.float32, weight=None, table=None, batches=1):
    """q, k ``[batch, heads, length, head_dim]`` as projections give them, weights, cos and sin."""
    batch, q_heads, k_heads, length, columns, width = size
    made = [torch.randn(batch, length, heads, columns).transpose(1, 2) for heads in (q_heads, k_heads)]
    made += [torch.rand(columns) + 0.5 for _ in "qk"]
    made = [x.to(DEVICE, dtype if n < 2 else weight or dtype) for n, x in enumerate(made)]
    shape = (batch if batches > 1 else 1, length, width)
    return made, [torch.randn(shape).to(DEVICE, table or dtype) for _ in "cs"]


def sides(variant, tables):
    """The kernel and the reference of a variant, as functions of what has gradients."""
    cos, sin = tables

    def side(formula):
        return lambda q, k, q_weight, k_weight: formula(q, k, q_weight, k_weight, 1e-3, 1e-5, cos, sin)

    return [side(each) for each in declared.pair("qk_norm_rotary", variant, "triton")]


@pytest.mark.parametrize("variant", [WHOLE, PARTIAL])
def test_rounds_as_upstream_and_lies_as_upstream(variant):
    given, tables = operands(dtype=torch.float16, batches=2)
    for ours, theirs in zip(*(side(*given) for side in sides(variant, tables)), strict=True):
        assert ours.stride() == theirs.stride()
        if ours.is_cuda:  # where products and sums are one instruction, and upstream adds in another order
            torch.testing.assert_close(ours, theirs, rtol=4e-3, atol=4e-3)
        else:
            assert torch.equal(ours, theirs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("turned", [True, False], ids=["as results lie", "heads first"])
def test_gradients_of_any_layout_are_the_same(turned):
    given, tables = operands(batches=2)
    leaves = [x.detach().requires_grad_() for x in given]
    found = sides(WHOLE, tables)[0](*leaves)
    torch.manual_seed(1)
    grads = [torch.randn(x.shape).to(x) for x in found]
    plain = torch.autograd.grad(found, leaves, grads, retain_graph=True)
    if turned:
        grads = [g.transpose(1, 2).contiguous().transpose(1, 2) for g in grads]
    else:
        grads = [torch.stack((g, g), dim=-1)[..., 0] for g in grads]
    for one, other in zip(plain, torch.autograd.grad(found, leaves, grads), strict=True):
        assert torch.equal(one, other)


@pytest.mark.sample(1)
@pytest.mark.parametrize("used", [0, 1])
def test_one_of_the_results_is_not_used(used):
    given, tables = operands()
    assert_matches(*(lambda *x, side=side: side(*x)[used] for side in sides(WHOLE, tables)), given)


def test_one_norm_for_queries_and_keys():
    (q, k, weight, _), tables = operands()
    assert_matches(
        *(lambda q, k, weight, side=side: side(q, k, weight, weight) for side in sides(WHOLE, tables)),
        [q, k, weight],
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda g, t: ([*g[:1], g[1].half(), *g[2:]], t),
        lambda g, t: (g, [t[0].half(), t[1]]),
        lambda g, t: ([x.double() for x in g], [x.double() for x in t]),
        lambda g, t: ([*g[:2], *(torch.stack((w, w), 1)[:, 0] for w in g[2:])], t),
        lambda g, t: (g, [torch.stack((x, x), 3)[..., 0] for x in t]),
        lambda g, t: (g, [x.requires_grad_() for x in t]),
        lambda g, t: (g, [x[:, :1] for x in t]),
        lambda g, t: ([*(x.as_subclass(Other) for x in g[:2]), *g[2:]], t),
    ],
    ids=[
        "keys in another dtype", "cos in another dtype", "float64", "weights apart", "tables apart",
        "tables with gradients", "one position for all", "a subclass",
    ],
)  # fmt: skip
def test_what_the_kernel_cannot_take_is_computed_by_the_formula(change):
    given, tables = change(*operands())
    ours, theirs = sides(WHOLE, tables)
    for one, other in zip(ours(*given), theirs(*given), strict=True):
        assert torch.equal(one, other) and type(one) is type(other)


class Other(torch.Tensor):
    pass


def test_a_table_of_another_width_is_upstreams_error():
    given, (cos, sin) = operands()
    tables = cos[..., :6], sin[..., :6]
    for side in sides(WHOLE, tables):
        with pytest.raises(RuntimeError, match="size"):
            side(*given)


@pytest.mark.slow
def test_equal_bits_from_run_to_run_and_for_a_position_in_any_batch():
    given, tables = operands((3, 4, 2, 5, 16, 16), torch.float16, batches=3)

    def run(given, tables):
        leaves = [x.detach().requires_grad_() for x in given]
        found = sides(WHOLE, tables)[0](*leaves)
        return *found, *torch.autograd.grad(found, leaves, [x.detach() for x in found])

    whole = run(given, tables)
    assert all(map(torch.equal, run(given, tables), whole))
    one = run([*(x[1:2, :, 3:4] for x in given[:2]), *given[2:]], [x[1:2, 3:4] for x in tables])
    for part, all_of_them in zip(one[:4], whole[:4], strict=True):
        assert torch.equal(part, all_of_them[1:2, :, 3:4])


def turn(q, k, cos, sin):
    return q, k


class Norm(torch.nn.Module):
    def __init__(self, dtype=torch.float32, **made):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, dtype=dtype, **made))

    def forward(self, x):
        return x


def asked(hidden=(2, 3, 16), dtype=torch.float32, norm=None, tables=torch.float32):
    cos = torch.ones(1, 3, 8, dtype=tables)
    given = torch.ones(hidden, dtype=dtype)
    return given, norm or Norm(), Norm(), Norm, turn, (cos, cos)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float64}, "float64"),
        ({"norm": Norm(torch.float64)}, "float64"),
        ({"tables": torch.float64}, "float64"),
        ({"norm": Norm(device="meta")}, "the weight of a norm is on meta"),
        ({"norm": torch.nn.Identity()}, "not the recognised Norm"),
    ],
    ids=str,
)
def test_refuses(change, reason):
    found = refuses(None, *asked(**change))
    assert found is None if reason is None else reason in found


def test_refuses_no_tables_that_are_not_known_yet():
    assert refuses(None, *asked()[:5], None) is None
