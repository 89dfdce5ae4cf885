"""Triton's rule in both forms against the recurrence in float64: in the interpreter, or on a GPU.

The interpreter computes in float32, and in float16, of which it multiplies matrices. On a GPU there are more
sizes, and bfloat16.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations import hub_kernels

pytest.importorskip("triton")

from tests.kernels.declared import refusal
from tests.kernels.gated_delta_rule.forms import FORMS, OWNER, bounds, carried, whole
from tests.kernels.matching import assert_matches, close
from veomni_hook.kernels.gated_delta_rule import operand_checks
from veomni_hook.kernels.gated_delta_rule import triton as ours
from veomni_hook.kernels.gated_delta_rule.tables import tables_of
from veomni_hook.kernels.shared.hub_functions import running

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
#: float32 is for the interpreter: it does not fit into a GPU's shared memory.
DTYPE, TOLERANCE = (torch.float16, 1e-2) if GPU else (torch.float32, 2e-5)
#: One position, none, a whole chunk, and one more.
LENGTHS = [65, 1, 0, 64]
both = pytest.mark.parametrize("form", FORMS, ids=repr)


def rule(form):
    return getattr(ours, form.variant)


def there(tensors):
    return [each.to(DEVICE) for each in tensors]


def compared(form, tensors, tolerance=TOLERANCE, normalise=True, cu_seqlens=None, truth=None):
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(DEVICE)
    assert_matches(
        lambda *each: rule(form)(*each, True, normalise, cu_seqlens),
        lambda *each: (truth or form.exact)(*each, normalise=normalise, cu_seqlens=cu_seqlens),
        there(tensors),
        tolerance=tolerance,
    )


def test_tables_are_aligned_for_launches():
    """A launch with a pointer that is no multiple of 16 bytes goes through Triton's own, slower code."""
    tables = tables_of(torch.empty(0), torch.tensor([0, 27, 54, 200]))
    assert tables.ends.tolist() == [27, 54, 200, 200, 200]
    assert tables.first.tolist() == [0, 1, 2, 5]
    assert [each.data_ptr() % 16 for each in tables] == [0] * 4


@pytest.mark.sample(1)
@pytest.mark.parametrize(("dtype", "normalise"), [(DTYPE, True), (DTYPE, False), (torch.float16, True)])
@both
def test_samples_that_share_a_row(form, dtype, normalise):
    tensors = form.operands(1, sum(LENGTHS), dtype=dtype, samples=len(LENGTHS), keys=1, widths=(20, 12))
    if not normalise:
        tensors[1] = tensors[1] / 8  # else the state grows without end
    compared(form, tensors, TOLERANCE if dtype is DTYPE else 1e-2, normalise, bounds(LENGTHS))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("rows", "positions", "widths", "groups"), [(2, 66, (8, 6), 1), (1, 1, (8, 6), None), (1, 3, (72, 20), 1)]
)
@both
def test_rows(form, rows, positions, widths, groups):
    """Also with channels in several parts, the last of them not full."""
    compared(form, form.operands(rows, positions, dtype=DTYPE, keys=1, widths=widths, groups=groups))


@pytest.mark.sample(4)
@pytest.mark.parametrize(("g", "beta"), [(-2000.0, 0.0), (-40.0, 1.0), (-1e-7, 1.0), (0.0, 0.0)])
@both
def test_decays_and_betas_at_their_limits(form, g, beta):
    """Beside other decays, so that the sum over a chunk is large where a few positions still read others."""
    tensors = form.at_limits(form.operands(1, 102, samples=2, keys=1, groups=1, dtype=DTYPE), g, beta)
    # Of a scalar decay's sum over a chunk, -2e4, float32 keeps 1e-3: as in upstream's code.
    loose = {} if form.channels or GPU else {-2000.0: 2e-3, -40.0: 1e-4}
    compared(form, tensors, loose.get(g, TOLERANCE), cu_seqlens=bounds([33, 69]))


def test_nothing_is_left_of_what_is_forgotten():
    """A decay of 0 has a logarithm without end, of which no difference can be taken."""
    form = FORMS[1]
    tensors = form.operands(1, 40, keys=1, dtype=DTYPE)
    tensors[3][:, 17] = float("-inf")
    output, state = ours.channel_decay(*there(tensors), True, True)
    expected, last = form.chunked(*there(each[:, 17:] for each in tensors[:5]), None, True, True)
    torch.testing.assert_close(output[:, 17:], expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(state, last, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@both
def test_a_state_that_the_next_call_goes_on_with(form):
    tensors = there(form.operands(1, 80, keys=1, dtype=DTYPE))
    limit = 1e-2 if GPU else 2e-5
    close(carried(rule(form), tensors, 65), whole(rule(form), tensors), limit)


@pytest.mark.slow
@both
def test_bits_do_not_change(form):
    tensors = there(form.operands(1, 70, keys=1, dtype=torch.float16))
    assert all(map(torch.equal, whole(rule(form), tensors), whole(rule(form), tensors)))


@both
def test_no_positions(form):
    tensors = [each.requires_grad_() for each in there(form.operands(2, 0, dtype=torch.float16))]
    output, state = rule(form)(*tensors, True)
    assert output.shape == tensors[2].shape and torch.equal(state, tensors[5])
    state.sum().backward()
    assert torch.equal(tensors[5].grad, torch.ones_like(tensors[5]))
    assert all(each.grad.shape == each.shape for each in tensors)


@both
def test_what_is_not_wanted_is_not_computed(form):
    """Without an initial state or a gradient of the output; strides as those of a split projection."""
    *tensors, beta, _ = there(form.operands(1, 66, dtype=torch.float16, groups=1))
    tensors = tensors if form.channels else tensors[:3]
    g = () if form.channels else there(form.operands(1, 66, dtype=torch.float16, groups=1))[3:4]

    def of(kernel, leaf):
        parts = leaf.split([each[0, 0].numel() for each in tensors], dim=2)
        parts = [part.unflatten(2, each.shape[2:]) for part, each in zip(parts, tensors, strict=True)]
        output, state = kernel(*parts, *g, beta, None, True, True)
        state.sum().backward()
        assert kernel(*parts, *g, beta)[1] is None
        return output, leaf.grad

    together = torch.cat([each.flatten(2) for each in tensors], dim=2)
    found, truth = (of(kernel, together.clone().requires_grad_()) for kernel in (rule(form), form.chunked))
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=3e-3)


@both
def test_refusals(form, monkeypatch):
    refuses = refusal("gated_delta_rule", form.variant, "triton")

    def refused(dtype=torch.bfloat16, query=None, widths=(8, 6)):
        *tensors, _ = form.operands(1, 3, dtype=dtype, widths=widths)
        tensors[0] = tensors[0].to(query)
        return refuses(OWNER, *tensors, None, False, True, None, form.upstream)

    assert refused() is None and refused(torch.float16) is None
    assert refused(widths=(264, 6)) == "heads of 264 and 6 are wider than 256"
    assert "torch.float32, torch.float32" in refused(torch.float32)
    assert "torch.float32, torch.bfloat16" in refused(query=torch.float32)
    monkeypatch.setattr(ours, "generation", lambda device: 10)
    monkeypatch.setattr(ours, "TRITON", (3, 6))
    assert refused(widths=(136, 6)) is None
    monkeypatch.setattr(ours, "TRITON", (3, 5))
    assert refused() is None
    late = refused(widths=(136, 6))
    assert late is None if form.channels else "Triton before 3.6 does not compile for Blackwell" in late


@pytest.mark.skipif(
    not hasattr(hub_kernels, "use_kernel_func_from_hub_with_fallback"),
    reason="layers hold the package's function",
)
def test_on_a_gpu_it_takes_precedence_over_flash_linear_attention(monkeypatch):
    """Which takes more time, or raises an error in backward; another package was somebody's choice."""
    form = FORMS[0]
    wrapped = hub_kernels.use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")

    def yields(package, dtype=torch.bfloat16, channels=False, of=form):
        def chunk_gated_delta_rule(*operands):
            raise AssertionError

        chunk_gated_delta_rule.__module__ = f"{package}.ops"
        monkeypatch.setitem(
            sys.modules, "fla", SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
        )
        upstream = wrapped(running(form.upstream))
        assert running(upstream) is chunk_gated_delta_rule
        *tensors, _ = of.operands(1, 3, dtype=dtype)
        if channels:
            tensors[3] = tensors[3][..., None].expand(-1, -1, -1, 8)
        return operand_checks.yields(OWNER, *tensors, None, False, True, None, upstream)

    reason = "chunk_gated_delta_rule computes it"
    assert reason in yields("fla")
    monkeypatch.setattr(operand_checks, "_runs_triton", lambda device: True)
    assert yields("fla") is yields("fla", of=FORMS[1]) is None
    for each in (
        yields("other"),
        yields("fla", torch.float32),
        yields("fla", torch.float32, of=FORMS[1]),
        yields("fla", channels=True),  # of keys that two heads share
    ):
        assert reason in each


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@both
class TestOnGPU:
    @pytest.mark.parametrize(
        ("heads", "widths", "lengths"),
        [
            ((2, 2), (128, 128), [70, 1, 0, 129, 200]),
            ((1, 4), (64, 128), [300]),
            ((2, 1), (64, 64), [300]),
            ((2, 1), (96, 80), [64, 64, 3]),
            ((1, 2), (256, 64), [200]),
            ((1, 1), (256, 256), [130]),
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_sizes(self, form, dtype, heads, widths, lengths):
        keys, groups = (heads[0] * heads[1], 1) if form.channels else heads
        tensors = form.operands(
            1, sum(lengths), groups=groups, dtype=dtype, samples=len(lengths), keys=keys, widths=widths
        )
        if form.channels:
            tensors[3] = tensors[3].float()
        compared(form, tensors, 2e-2 if dtype is torch.bfloat16 else 4e-3, True, bounds(lengths))

    def test_a_long_sample_does_not_drift(self, form):
        positions = 16384 if form.channels else 32768
        tensors = form.operands(1, positions, dtype=torch.bfloat16, keys=1, widths=(128, 128))

        def truth(*each, normalise, cu_seqlens):
            output, state = form.chunked(*(t.double() for t in each), True, normalise, cu_seqlens)
            return output.to(each[0].dtype), state.float()

        compared(form, tensors, 2e-2, truth=truth)

    def test_bits_do_not_change(self, form):
        tensors = there(form.operands(2, 200, dtype=torch.bfloat16, widths=(128, 128)))

        def step():
            leaves = [each.detach().clone().requires_grad_() for each in tensors]
            output, state = rule(form)(*leaves, True, True)
            (output.float().square().sum() + state.square().sum()).backward()
            return [output, state, *(each.grad for each in leaves)]

        for _ in range(3):
            assert all(map(torch.equal, step(), step()))
