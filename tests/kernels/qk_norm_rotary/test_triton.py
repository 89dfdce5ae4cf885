"""The Triton kernels: through the interpreter on a CPU (conftest sets it up), compiled on a GPU."""

from operator import itemgetter

import pytest
import torch

from tests.kernels.contract import call_of
from tests.kernels.declared import refusal
from tests.kernels.matching import assert_matches

pytest.importorskip("triton")


WHOLE, PARTIAL = "cast_before_weight_half_split", "one_plus_weight_half_split_partial"

refuses = refusal("qk_norm_rotary", "cast_before_weight_half_split", "triton")


def call(variant=WHOLE, *dtypes, batches=False, **changed):
    """A call with the tables of all rows, or with those of a batch."""
    if batches:
        changed |= dict.fromkeys(("cos", "sin"), lambda x: torch.cat((x, -x)))
    return call_of("qk_norm_rotary", variant, "triton", (2, 4, 2, 3, 16, 16), *dtypes, **changed)


@pytest.mark.parametrize("variant", [WHOLE, PARTIAL])
def test_rounds_as_upstream_and_lies_as_upstream(variant):
    made = call(variant, torch.float16, batches=True)
    for ours, theirs in zip(made.ours(*made.tensors), made.theirs(*made.tensors), strict=True):
        assert ours.stride() == theirs.stride()
        if ours.is_cuda:  # where products and sums are one instruction, and upstream adds in another order
            torch.testing.assert_close(ours, theirs, rtol=4e-3, atol=4e-3)
        else:
            assert torch.equal(ours, theirs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("turned", [True, False], ids=["as results lie", "heads first"])
def test_gradients_of_any_layout_are_the_same(turned):
    made = call(batches=True)
    leaves = [x.requires_grad_(wanted) for x, wanted in zip(made.tensors, made.wanted, strict=True)]
    found = made.ours(*leaves)
    torch.manual_seed(1)
    grads = [torch.randn(x.shape).to(x) for x in found]
    plain = torch.autograd.grad(found, leaves[:4], grads, retain_graph=True)
    if turned:
        grads = [g.transpose(1, 2).contiguous().transpose(1, 2) for g in grads]
    else:
        grads = [torch.stack((g, g), dim=-1)[..., 0] for g in grads]
    for one, other in zip(plain, torch.autograd.grad(found, leaves[:4], grads), strict=True):
        assert torch.equal(one, other)


@pytest.mark.sample(1)
@pytest.mark.parametrize("used", [0, 1])
def test_one_of_the_results_is_not_used(used):
    call().matches(of=itemgetter(used))


def test_one_norm_for_queries_and_keys():
    made = call()
    q, k, weight, _, *tables = made.tensors
    sides = (lambda q, k, weight, f=f: f(q, k, weight, weight, *tables) for f in (made.ours, made.theirs))
    assert_matches(*sides, [q, k, weight])


ALL = ("q", "k", "q_weight", "k_weight", "cos", "sin")
CHANGES = {
    "keys in another dtype": {"k": torch.Tensor.half},
    "cos in another dtype": {"cos": torch.Tensor.half},
    "float64": dict.fromkeys(ALL, torch.Tensor.double),
    "weights apart": dict.fromkeys(ALL[2:4], lambda w: torch.stack((w, w), 1)[:, 0]),
    "tables apart": dict.fromkeys(ALL[4:], lambda x: torch.stack((x, x), 3)[..., 0]),
    "tables with gradients": dict.fromkeys(ALL[4:], lambda x: x.requires_grad_()),
    "one position for all": dict.fromkeys(ALL[4:], lambda x: x[:, :1]),
    "a subclass": dict.fromkeys(ALL[:2], lambda x: x.as_subclass(Other)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_kernel_cannot_take_is_computed_by_the_formula(name):
    made = call(**CHANGES[name])
    for one, other in zip(made.ours(*made.tensors), made.theirs(*made.tensors), strict=True):
        assert torch.equal(one, other) and type(one) is type(other)


class Other(torch.Tensor):
    pass


def test_a_table_of_another_width_is_upstreams_error():
    made = call(**dict.fromkeys(ALL[4:], lambda x: x[..., :6]))
    for side in (made.ours, made.theirs):
        with pytest.raises(RuntimeError, match="size"):
            side(*made.tensors)


@pytest.mark.slow
def test_equal_bits_from_run_to_run_and_for_a_position_in_any_batch():
    made = call_of(
        "qk_norm_rotary", WHOLE, "triton", (3, 4, 2, 5, 16, 16), torch.float16,
        **dict.fromkeys(ALL[4:], lambda x: torch.cat((x, -x, x.flip(1)))),
    )  # fmt: skip

    def run(*tensors):
        leaves = [x.detach().requires_grad_(n < 4) for n, x in enumerate(tensors)]
        found = made.ours(*leaves)
        return *found, *torch.autograd.grad(found, leaves[:4], [x.detach() for x in found])

    q, k, *weights = made.tensors[:4]
    tables = made.tensors[4:]
    whole = run(q, k, *weights, *tables)
    assert all(map(torch.equal, run(q, k, *weights, *tables), whole))
    one = run(*(x[1:2, :, 3:4] for x in (q, k)), *weights, *(x[1:2, 3:4] for x in tables))
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
