"""The double of torch_npu's operators: true to the schemas and shapes of the wheel, and strict about limits."""

import pytest
import torch

from tests.ascend.double import LimitError
from tests.ascend.extract import DOUBLED, OPERATORS, schema_of
from tests.ascend.wheel import fetch, meta_functions, schemas

pytestmark = pytest.mark.usefixtures("operators")

x, w = torch.randn(4, 6), torch.rand(6)
TABLE = torch.rand(1, 5, 1, 8)
HEADS = torch.randn(2, 5, 3, 8)
IDS = torch.tensor([[0, 2], [1, 0], [2, 2], [0, 1]])
PLACES = torch.tensor([0, 5, 3, 1, 6, 7, 2, 4], dtype=torch.int32)
ENDS = torch.tensor([3, 3, 8])
ROWS, MATRICES = torch.randn(8, 6), torch.randn(3, 6, 4)
TARGET = torch.tensor([0, 5, 2, 1])
RSTD = torch.rand(4, 1)
GROUPED = {"group_list": ENDS, "split_item": 3, "group_type": 0}
SUMS = {**GROUPED, "group_type": 2}

QUERIES, KEYS = torch.randn(5, 4, 8), torch.randn(5, 2, 8)
FUSED = {"actual_seq_qlen": [2, 5], "actual_seq_kvlen": [2, 5]}
SAVED = {
    "softmax_max": torch.rand(5, 4, 8), "softmax_sum": torch.rand(5, 4, 8), "attention_in": QUERIES, **FUSED,
}  # fmt: skip

#: Calls that are allowed, of every operator that kernels use.
CALLS = {
    "npu_rms_norm": [((x, w), {}), ((x[None].bfloat16(), w.bfloat16(), 1e-3), {})],
    "npu_rms_norm_backward": [((x, x, w, RSTD), {})],
    "npu_add_rms_norm": [((x, x, w), {})],
    "npu_rotary_mul": [
        ((HEADS, TABLE, TABLE), {}),
        ((HEADS.half(), TABLE.half(), TABLE.half(), "interleave"), {}),
    ],
    "npu_swiglu": [((x,), {}), ((x,), {"dim": 0})],
    "npu_swiglu_backward": [((x[:, :3], x), {"dim": -1})],
    "npu_moe_token_permute": [((x, IDS), {}), ((x[:0], IDS[:0]), {}), ((x, IDS[:, 0].int()), {})],
    "npu_moe_token_unpermute": [((ROWS, PLACES, torch.rand(4, 2)), {}), ((ROWS.half(), PLACES), {})],
    "npu_grouped_matmul": [
        (([ROWS], [MATRICES]), GROUPED),
        (([ROWS], [MATRICES]), {**GROUPED, "group_list": torch.tensor([3, 0, 5]), "group_list_type": 1}),
        (([ROWS], [MATRICES.transpose(1, 2).contiguous().transpose(1, 2)]), GROUPED),
        (([ROWS.t()], [torch.randn(8, 4)]), SUMS),
    ],
    "npu_cross_entropy_loss": [((x, TARGET), {"reduction": "none"}), ((x, TARGET), {})],
    "npu_cross_entropy_loss_backward": [((torch.rand(4), x, TARGET), {"reduction": "none"})],
    "npu_fusion_attention": [((QUERIES, KEYS, KEYS, 4, "TND"), FUSED)],
    "npu_fusion_attention_grad": [((QUERIES, KEYS, KEYS, QUERIES, 4, "TND"), SAVED)],
    "npu_moe_gating_top_k_softmax": [((x, None, 2), {}), ((x[None].bfloat16(),), {})],
}

#: Calls that fit the schema and that the documentation does not allow, and what is said of them.
LIMITS = [
    ("npu_rms_norm", (x, w.half()), {}, "different dtypes"),
    ("npu_rms_norm", (w, w), {}, "1 dimensions"),
    ("npu_rms_norm", (x.double(), w.double()), {}, "float64"),
    ("npu_rms_norm", (x[:0], w), {}, "empty"),
    ("npu_rms_norm", (x, w[:3]), {}, "does not fit"),
    ("npu_rms_norm_backward", (x, x, w, RSTD.half()), {}, "no rstd"),
    ("npu_add_rms_norm", (x, x[:1], w), {}, "different shapes"),
    ("npu_rotary_mul", (HEADS[0], TABLE[0], TABLE[0]), {}, "4 dimensions"),
    ("npu_rotary_mul", (torch.randn(1, 5, 3, 896), *[torch.rand(1, 5, 1, 896)] * 2), {}, "D is 896"),
    ("npu_rotary_mul", (torch.randn(1, 5, 3, 7), *[torch.rand(1, 5, 1, 7)] * 2), {}, "D is 7"),
    ("npu_rotary_mul", (torch.randn(1, 5, 1000, 2), *[torch.rand(1, 5, 1, 2)] * 2), {}, "for [1, 5, 1000, 2]"),
    ("npu_rotary_mul", (HEADS, *[torch.rand(2, 5, 1, 8)] * 2, "interleave"), {}, "interleave"),
    ("npu_rotary_mul", (HEADS, TABLE * 3, TABLE), {}, "from -1 to 1"),
    ("npu_rotary_mul", (HEADS, TABLE.half(), TABLE.half()), {}, "different dtypes"),
    ("npu_rotary_mul", (HEADS, TABLE, TABLE, "pairs"), {}, "mode 'pairs'"),
    ("npu_swiglu", (x[:, :3],), {}, "along -1"),
    ("npu_swiglu", (x.view(1, 1, 1, 1, 1, 1, 1, 4, 6),), {}, "along -1"),
    ("npu_swiglu_backward", (x, x), {}, "not like the product"),
    ("npu_moe_token_permute", (x, IDS - 1), {}, "range"),
    ("npu_moe_token_permute", (x, IDS.short()), {}, "int16"),
    ("npu_moe_token_permute", (x, torch.zeros(4, 513, dtype=torch.int64)), {}, "topK is 513"),
    ("npu_moe_token_permute", (x, IDS), {"padded_mode": True}, "padded"),
    ("npu_moe_token_unpermute", (ROWS, PLACES.long(), None), {}, "int64"),
    ("npu_moe_token_unpermute", (ROWS, PLACES * 0, None), {}, "repeat"),
    ("npu_moe_token_unpermute", (ROWS, PLACES, torch.rand(2, 2)), {}, "probs [2, 2]"),
    ("npu_grouped_matmul", ([ROWS], [MATRICES]), {**GROUPED, "group_list": ENDS.int()}, "1-D int64"),
    ("npu_grouped_matmul", ([ROWS], [MATRICES]), {**GROUPED, "group_list": ENDS - 1}, "hold 7 of 8"),
    ("npu_grouped_matmul", ([ROWS], [MATRICES]), {**GROUPED, "group_list": ENDS.flip(0)}, "groups [8, -5, 0]"),
    ("npu_grouped_matmul", ([ROWS], [MATRICES]), {**GROUPED, "group_list": None}, "must be given"),
    ("npu_grouped_matmul", ([ROWS], [MATRICES]), {**GROUPED, "group_list": ENDS[1:]}, "2 groups, 3 matrices"),
    ("npu_grouped_matmul", ([ROWS], [MATRICES[:1]]),
     {**GROUPED, "group_list": torch.tensor([8]), "group_list_type": 1}, "one count alone"),
    ("npu_grouped_matmul", ([ROWS], [MATRICES]), {**GROUPED, "split_item": 0}, "split_item 2 or 3"),
    ("npu_grouped_matmul", ([ROWS], [MATRICES]), {**GROUPED, "group_type": 1}, "group_type 1"),
    ("npu_grouped_matmul", ([ROWS], [MATRICES]), {**GROUPED, "bias": [torch.rand(4)]}, "['bias']"),
    ("npu_grouped_matmul", ([ROWS], [MATRICES]), {**GROUPED, "act_type": 5}, "activation"),
    ("npu_grouped_matmul", ([ROWS], [MATRICES.half()]), GROUPED, "different dtypes"),
    ("npu_grouped_matmul", ([ROWS.t().contiguous().t()], [MATRICES]), GROUPED, "x is not transposed"),
    ("npu_grouped_matmul", ([ROWS], [torch.randn(3, 6, 8)[..., ::2]]), GROUPED, "or transposed"),
    ("npu_grouped_matmul", ([ROWS.t().contiguous()], [torch.randn(8, 4)]), SUMS, "x is transposed"),
    ("npu_grouped_matmul", ([ROWS.t()], [torch.randn(4, 8).t()]), SUMS, "weight is not transposed"),
    ("npu_cross_entropy_loss", (x, TARGET - 1), {}, "no class"),
    ("npu_cross_entropy_loss", (x, TARGET.int()), {}, "int64"),
    ("npu_cross_entropy_loss", (x, TARGET), {"return_zloss": True}, "not supported yet"),
    ("npu_cross_entropy_loss", (x[None], TARGET), {}, "logits"),
    ("npu_cross_entropy_loss", (torch.zeros(1, 1).expand(200_001, 1), TARGET), {}, "logits [200001, 1]"),
    ("npu_cross_entropy_loss_backward", (torch.rand(4).half(), x, TARGET), {"reduction": "none"}, "float16"),
    ("npu_fusion_attention", (QUERIES, KEYS, KEYS, 4, "BSH"), FUSED, "no double"),
    ("npu_fusion_attention", (QUERIES, KEYS, KEYS, 4, "TND"), {}, "no double"),
    ("npu_fusion_attention", (QUERIES, KEYS, KEYS, 2, "TND"), FUSED, "2 heads"),
    ("npu_fusion_attention", (QUERIES, KEYS, KEYS[..., :4], 4, "TND"), FUSED, "shapes"),
    ("npu_fusion_attention", (QUERIES, KEYS, KEYS, 4, "TND"), {name: [2, 4] for name in FUSED}, "2 ends"),
    ("npu_fusion_attention", (QUERIES, KEYS, KEYS, 4, "TND"), {name: [6, 5] for name in FUSED}, "no sums"),
    ("npu_fusion_attention_grad", (QUERIES, KEYS, KEYS, QUERIES.half(), 4, "TND"), SAVED, "dy"),
    ("npu_fusion_attention_grad", (QUERIES, KEYS, KEYS, QUERIES, 4, "TND"), FUSED, "has saved"),
    ("npu_moe_gating_top_k_softmax", (x, None, 7), {}, "k is 7"),
    ("npu_moe_gating_top_k_softmax", (x[0],), {}, "x [6]"),
]  # fmt: skip

#: Calls that do not fit the schema.
WRONG = [
    ("npu_rms_norm", (x,), {}),
    ("npu_rms_norm", (x, w), {"eps": 1e-6}),
    ("npu_swiglu", (x,), {"axis": -1}),
    ("npu_rotary_mul", (HEADS, TABLE), {}),
    ("npu_grouped_matmul", (ROWS, MATRICES), GROUPED),
    ("npu_grouped_matmul", ([ROWS], [MATRICES], None), GROUPED),
    ("npu_moe_token_permute", (x, IDS, 8.5), {}),
    ("npu_cross_entropy_loss", (x, TARGET, "none"), {}),
    ("npu_moe_gating_top_k_softmax", (x, 2), {}),
    ("npu_fusion_attention", (QUERIES, KEYS, KEYS, 4), FUSED),
    ("npu_fusion_attention_grad", (QUERIES, KEYS, KEYS, QUERIES, 4, "TND", None), SAVED),
]


def run(name, args, kwargs):
    found = getattr(torch.ops.npu, name).default(*args, **kwargs)
    found = found if isinstance(found, (tuple, list)) else [found]
    return [each for each in found if not isinstance(each, int)]  # a seed, an offset, a number


def test_every_operator_has_a_double():
    assert set(CALLS) == set(OPERATORS)
    for name in OPERATORS:
        schema = str(getattr(torch.ops.npu, name).default._schema)
        assert schema == str(torch._C.parse_schema(f"npu::{schema_of(name)}"))


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_allowed_runs(name):
    for args, kwargs in CALLS[name]:
        assert all(isinstance(each, torch.Tensor) for each in run(name, args, kwargs))


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "said"), LIMITS, ids=[f"{each[0]}-{each[-1]}" for each in LIMITS]
)
def test_what_is_not_allowed_is_an_error(name, args, kwargs, said):
    with pytest.raises(LimitError) as caught:
        run(name, args, kwargs)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "args", "kwargs"), WRONG, ids=[f"{each[0]}-{number}" for number, each in enumerate(WRONG)]
)
def test_what_does_not_fit_the_schema_is_an_error(name, args, kwargs):
    with pytest.raises((RuntimeError, TypeError)) as caught:
        run(name, args, kwargs)
    assert not isinstance(caught.value, LimitError)


def test_no_operator_has_a_gradient():
    leaf = x.clone().requires_grad_()
    (y,) = run("npu_swiglu", (leaf,), {})
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        y.sum().backward()
    assert leaf.grad is None


def test_what_is_open_hurts():
    (found,) = run("npu_grouped_matmul", ([ROWS.t()], [torch.randn(8, 4)]), SUMS)
    assert found[1].isnan().all() and not found[[0, 2]].isnan().any()


def test_gradients_are_those_of_the_forwards():
    for name, args in (("npu_rms_norm", (x, w)), ("npu_swiglu", (x,))):
        leaves = [each.double().requires_grad_() for each in args]
        if name == "npu_swiglu":
            gate, up = leaves[0].chunk(2, -1)
            y = torch.nn.functional.silu(gate) * up
            dy = torch.randn(4, 3)
            found = run(f"{name}_backward", (dy, x), {})
        else:
            y = torch.nn.functional.rms_norm(leaves[0], (6,), leaves[1], 1e-6)
            dy = torch.randn(4, 6)
            found = run(f"{name}_backward", (dy, x, w, run(name, (x, w), {})[1]), {})
        for got, truth in zip(found, torch.autograd.grad(y, leaves, dy.double()), strict=True):
            torch.testing.assert_close(got.double(), truth, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def wheel():
    try:
        return fetch(DOUBLED)
    except OSError as error:
        pytest.skip(str(error))


def test_schemas_are_the_wheels(wheel):
    known = schemas(wheel)
    assert {name: schema_of(name) for name in OPERATORS} == {name: known[name] for name in OPERATORS}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OPERATORS)
def test_shapes_and_dtypes_are_the_wheels(name, wheel):
    functions = meta_functions(wheel, [name, f"{name}.List"])
    meta = functions.get(name) or functions[f"{name}.List"]
    for args, kwargs in CALLS[name]:
        truth = meta(*map(abstract, args), **{key: abstract(value) for key, value in kwargs.items()})
        truth = list(truth) if isinstance(truth, (tuple, list)) else [truth]
        truth = [each for each in truth if not isinstance(each, int)]
        for got, said in zip(run(name, args, kwargs), truth, strict=True):
            if said is None:  # nothing of something that is not there
                assert not got.numel()
            else:
                assert (got.shape, got.dtype) == (said.shape, said.dtype), (args, kwargs)


def abstract(value):
    """A tensor without data in the place of one."""
    if isinstance(value, list):
        return [abstract(each) for each in value]
    return value.to("meta") if isinstance(value, torch.Tensor) else value
