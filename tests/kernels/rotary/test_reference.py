"""References against one elementwise definition with explicit indices, values and gradients bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tests.kernels.matching import close
from veomni_hook.kernels.rotary import reference
from veomni_hook.kernels.rotary.variants import OP
from veomni_hook.kernels.selection.registry import registry

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 5, 8
Q, K = torch.float32, torch.bfloat16


def halves(width):
    return [(i, i + width // 2) for i in range(width // 2)]


def pairs(width):
    return [(2 * i, 2 * i + 1) for i in range(width // 2)]


@dataclass
class Form:
    """How one tensor is rotated.

    ``table(i, number, width)`` is the column of cos for member ``number`` (0 or 1) of couple ``i``; ``tables``
    the width of cos for ``width`` rotated columns; ``sorts``: first members come out in front of second ones.
    """

    couples: Callable[[int], list[tuple[int, int]]] = halves
    table: Callable[[int, int, int], int] | None = None
    tables: float = 1
    rotated: int = WIDTH
    trailing: bool = False
    sorts: bool = False
    sign: int = 1
    compute: torch.dtype | None = None
    casts_tables: bool = False
    out: str = "own"

    def widths(self):
        return int(self.rotated * self.tables)

    def turn(self, x, cos, sin, query_dtype):
        wide = x.to(self.compute) if self.compute else x
        if self.casts_tables:
            cos, sin = cos.to(self.compute), sin.to(self.compute)
        dtype = torch.promote_types(wide.dtype, cos.dtype) if self.out == "promoted" else x.dtype
        dtype = query_dtype if self.out == "query" else dtype
        offset = WIDTH - self.rotated if self.trailing else 0
        given = wide.unbind(-1)
        columns = list(x.unbind(-1))
        couples = [(a + offset, b + offset) for a, b in self.couples(self.rotated)]
        for i, (a, b) in enumerate(couples):
            s, t = (self.column(i, number, (a, b)[number] - offset) for number in (0, 1))
            at = (offset + i, offset + i + self.rotated // 2) if self.sorts else (a, b)
            columns[at[0]] = given[a] * cos[..., s] - self.sign * given[b] * sin[..., s]
            columns[at[1]] = given[b] * cos[..., t] + self.sign * given[a] * sin[..., t]
        return torch.stack([column.to(dtype) for column in columns], dim=-1)

    def column(self, i, number, at):
        return self.table(i, number, self.rotated) if self.table else at


def of_couple(i, number, width):
    return i


def of_sorted(i, number, width):
    return i + number * width // 2


FP32 = {"compute": torch.float32}
FORMS = {
    "half_split": Form(out="promoted"),
    "half_split_cast_out": Form(),
    "half_split_fp32": Form(**FP32, casts_tables=True),
    "half_split_fp32_as_query": Form(**FP32, out="query"),
    "half_split_reversed": Form(sign=-1, out="promoted"),
    "half_split_partial": Form(rotated=4, out="promoted"),
    "half_split_partial_optional_key": Form(rotated=4, out="promoted"),
    "half_split_single": Form(out="promoted"),
    "half_width_halves": Form(table=of_couple, tables=0.5, out="promoted"),
    "half_width_pairs": Form(pairs, of_couple, tables=0.5, out="promoted"),
    "pairs": Form(pairs, out="promoted"),
    "pairs_fp32": Form(pairs, **FP32, casts_tables=True),
    "pairs_fp32_as_query": Form(pairs, **FP32, out="query"),
    "pairs_partial": Form(pairs, rotated=4, out="promoted"),
    "pairs_repeated": Form(pairs, of_couple, out="promoted"),
    "pairs_repeated_fp32": Form(pairs, of_couple, **FP32, out="query"),
    "pairs_partial_repeated": Form(pairs, of_couple, rotated=4, out="promoted"),
    "pairs_to_halves": Form(pairs, of_couple, sorts=True, out="promoted"),
    "pairs_to_halves_optional_key": Form(pairs, of_couple, sorts=True, out="promoted"),
    "pairs_to_halves_full_width": Form(pairs, of_sorted, sorts=True, out="promoted"),
    "pairs_trailing_fp32_single": Form(pairs, of_couple, tables=0.5, rotated=4, trailing=True, **FP32),
    "pairs_doubled_single": Form(pairs, of_couple, tables=0.5, out="promoted"),
    # Tables broadcast as they are.
    "half_width_halves_single": Form(table=of_couple, tables=0.5, out="promoted"),
    "half_width_pairs_single": Form(pairs, of_couple, tables=0.5, out="promoted"),
    "pairs_fp32_broadcast": Form(pairs, **FP32),
    "half_split_first_positions_single": Form(out="promoted"),
    "pairs_partial_fp64_single": Form(pairs, rotated=4, compute=torch.float64, casts_tables=True),
}
#: Variants with a test of their own below.
OTHERS = {
    "half_split_after_prefix", "half_split_gathered", "half_split_sections",
    "half_split_of_angles_fp32_single", "pairs_matrix", "complex_pairs", "complex_pairs_moved",
    "half_split_gathered_with_value", "half_split_packed_heads", "sections",
}  # fmt: skip
BROADCAST = {
    "half_width_halves_single",
    "half_width_pairs_single",
    "pairs_fp32_broadcast",
    "half_split_first_positions_single",
    "pairs_partial_fp64_single",
}


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def assert_same(one, other, *leaves):
    """Equal values and dtypes; gradients within rounding, since casts may round parts of a sum or the sum."""
    one, other = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (one, other))
    for a, b in zip(one, other, strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)
    gradients = []
    for results in (one, other):
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in results]
        gradients.append(torch.autograd.grad(results, leaves, weights))
    for a, b in zip(*gradients, strict=True):
        close(a, b, 2e-2 if K in (a.dtype, one[0].dtype) else 0.0)


def test_every_variant_is_tested():
    assert {*FORMS, *OTHERS} == {*OP.variants}
    assert {each.variant for each in registry.kernels("rotary")} == {*OP.variants}


@pytest.mark.sample(27)
@pytest.mark.parametrize(
    "dtypes", [(Q, Q, Q), (K, K, K), (Q, K, Q), (K, Q, K), (K, K, Q), (Q, Q, K)], ids=str
)
@pytest.mark.parametrize("name", FORMS)
def test_elementwise(name, dtypes):
    torch.manual_seed(0)
    form, function = FORMS[name], getattr(reference, name)
    single, heads_at = name.endswith("_single"), 2 if name == "pairs_doubled_single" else 1
    shape = (BATCH, HEADS, LENGTH, WIDTH) if heads_at == 1 else (BATCH, LENGTH, HEADS, WIDTH)
    q, k = (random(*shape, dtype=dtype).requires_grad_() for dtype in dtypes[:2])
    cos, sin = (random(BATCH, LENGTH, form.widths(), dtype=dtypes[2]) for _ in range(2))
    tables = {"cos": cos.unsqueeze(heads_at), "sin": sin.unsqueeze(heads_at)}
    given = tables if name in BROADCAST else {"cos": cos, "sin": sin}
    want_q, want_k = form.turn(q, **tables, query_dtype=q.dtype), form.turn(k, **tables, query_dtype=q.dtype)
    if single:
        assert_same(function(q, **given), want_q, q)
    else:
        assert_same(function(q=q, k=k, **given), (want_q, want_k), q, k)


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in FORMS
        if n not in BROADCAST and n not in ("pairs_doubled_single", "pairs_to_halves_full_width")
    ],
)
def test_heads_after_positions(name):
    form, function = FORMS[name], getattr(reference, name)
    q = random(BATCH, HEADS, LENGTH, WIDTH)
    cos, sin = (random(BATCH, LENGTH, form.widths()) for _ in range(2))

    def both(x, dim):
        return function(
            x, cos=cos, sin=sin, unsqueeze_dim=dim, **({} if name.endswith("_single") else {"k": x})
        )

    one, other = both(q, 1), both(q.transpose(1, 2), 2)
    one, other = (x if isinstance(x, torch.Tensor) else x[1] for x in (one, other))
    assert torch.equal(one, other.transpose(1, 2))


def test_without_a_key():
    q, cos, sin = random(BATCH, HEADS, LENGTH, WIDTH), *random(2, BATCH, LENGTH, WIDTH)
    alone = reference.half_split_partial_optional_key(q, cos, sin)
    assert torch.equal(alone, reference.half_split_partial(q, q, cos, sin)[0])
    turned, nothing = reference.pairs_to_halves_optional_key(q, None, cos, sin)
    assert nothing is None and torch.equal(turned, reference.pairs_to_halves(q, q, cos, sin)[0])


def test_positions_in_front_stay():
    q, k = (random(BATCH, HEADS, LENGTH + 2, WIDTH).requires_grad_() for _ in range(2))
    cos, sin = random(2, LENGTH, WIDTH)
    want = [
        torch.cat((x[:, :, :2], FORMS["half_split"].turn(x[:, :, 2:], cos, sin, x.dtype)), dim=2)
        for x in (q, k)
    ]
    assert_same(reference.half_split_after_prefix(q, k, cos, sin), want, q, k)


def test_tables_by_position():
    q, k = (random(BATCH, HEADS, LENGTH, WIDTH).requires_grad_() for _ in range(2))
    cos, sin = random(2, 7, WIDTH)
    ids = torch.tensor([[6, 1, 0, 3, 3], [0, 1, 2, 3, 4]])
    rows = [torch.stack([table[i] for i in ids.flatten()]).view(BATCH, LENGTH, WIDTH) for table in (cos, sin)]
    want = reference.half_split(q, k, *rows)
    assert_same(reference.half_split_gathered(q, k, cos, sin, ids), want, q, k)


def test_the_value_turns_too():
    q, k, v = (random(BATCH, HEADS, LENGTH, WIDTH).requires_grad_() for _ in range(3))
    cos, sin = random(2, 7, WIDTH)
    ids = torch.randint(0, 7, (BATCH, LENGTH))
    first = reference.half_split_gathered(q, k, cos, sin, ids)
    second = reference.half_split_gathered(v, v, cos, sin, ids)[:1]
    assert_same(reference.half_split_gathered_with_value(q, k, v, cos, sin, ids), (*first, *second), q, k, v)


@pytest.mark.parametrize("name", [name for name in vars(reference) if "__" in name.strip("_")])
def test_a_variant_in_other_words(name):
    q, k = (random(BATCH, HEADS, LENGTH, WIDTH, dtype=K).requires_grad_() for _ in range(2))
    cos, sin = random(2, BATCH, LENGTH, WIDTH)
    want = getattr(reference, name.partition("__")[0])(q, k, cos, sin)
    assert_same(getattr(reference, name)(q, k, cos, sin), want, q, k)


def test_heads_side_by_side():
    x = random(BATCH, LENGTH, HEADS * WIDTH).requires_grad_()
    tables = random(2, LENGTH + 2, 1, 1, WIDTH)
    heads = [x[..., i * WIDTH : (i + 1) * WIDTH] for i in range(HEADS)]
    cos, sin = tables[:, :LENGTH, 0, 0].unbind()
    want = torch.cat([FORMS["half_split"].turn(head, cos, sin, x.dtype) for head in heads], dim=-1)
    assert_same(reference.half_split_packed_heads(x, tables, HEADS, WIDTH), want, x)


def test_sections():
    freqs = random(3, BATCH, LENGTH, 4).requires_grad_()
    want = torch.stack([freqs[axis, ..., i] for i, axis in enumerate([0, 1, 1, 2])], dim=-1)
    assert_same(reference.sections(freqs, [1, 2, 1]), want, freqs)


def test_tables_by_section():
    q, k = (random(BATCH, HEADS, LENGTH, WIDTH).requires_grad_() for _ in range(2))
    tables = random(2, 3, BATCH, LENGTH, WIDTH)
    # Sections 1, 2, 1 of half the width, twice: columns 0 | 1 2 | 3 | 4 | 5 6 | 7 from axes 0 1 2 0 1 2.
    axes = [0, 1, 1, 2, 0, 1, 1, 2]
    rows = [torch.stack([table[axis, ..., i] for i, axis in enumerate(axes)], -1) for table in tables]
    want = reference.half_split(q, k, *rows)
    assert_same(reference.half_split_sections(q, k, *tables, [1, 2, 1]), want, q, k)


def test_tables_of_angles():
    x = random(1, LENGTH, HEADS, WIDTH, dtype=K).requires_grad_()
    angles = random(LENGTH, WIDTH // 2)
    tables = [torch.cat([table, table], -1)[None, :, None] for table in (angles.cos(), angles.sin())]
    want = FORMS["half_split_fp32"].turn(x, *tables, K)
    assert_same(reference.half_split_of_angles_fp32_single(x, angles), want, x)


def test_fewer_positions_than_tables():
    x = random(BATCH, HEADS, LENGTH, WIDTH).requires_grad_()
    cos, sin = random(2, 1, 1, LENGTH + 3, WIDTH)
    want = FORMS["half_split"].turn(x, cos[:, :, :LENGTH], sin[:, :, :LENGTH], x.dtype)
    assert_same(reference.half_split_first_positions_single(x, cos, sin), want, x)


@pytest.mark.parametrize(("name", "heads_at"), [("complex_pairs", 2), ("complex_pairs_moved", 1)])
@pytest.mark.parametrize("dtype", [Q, K])
def test_complex(name, heads_at, dtype):
    shape = (BATCH, HEADS, LENGTH, WIDTH) if heads_at == 1 else (BATCH, LENGTH, HEADS, WIDTH)
    q, k = (random(*shape, dtype=dtype) for _ in range(2))
    cos, sin = random(2, BATCH, LENGTH, WIDTH // 2)
    turned = getattr(reference, name)(q, k, torch.complex(cos, sin))
    form = Form(pairs, of_couple, tables=0.5, **FP32)
    for x, found in zip((q, k), turned, strict=True):
        want = form.turn(x, cos.unsqueeze(heads_at), sin.unsqueeze(heads_at), dtype)
        assert found.dtype is dtype
        torch.testing.assert_close(found, want)


def test_matrices():
    q, k = (random(BATCH, HEADS, LENGTH, WIDTH).requires_grad_() for _ in range(2))
    cos, sin = random(2, BATCH, LENGTH, WIDTH)
    # Row vectors times matrices summed over columns: x1 meets cos and sin, x2 -sin and cos.
    form = Form(pairs, of_couple)
    want = tuple(form.turn(x, cos[:, None], sin[:, None], x.dtype) for x in (q, k))
    assert_same(reference.pairs_matrix(q, k, cos, sin), want, q, k)
