"""Triton's gated delta rule against the recurrence in float64: in the interpreter, or on a GPU.

The interpreter computes in float32, and in float16, of which it multiplies matrices. On a GPU there are more
sizes, and bfloat16.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

pytest.importorskip("triton")

from tests.kernels.gated_delta_rule.test_long import agree, carried, whole
from tests.kernels.gated_delta_rule.test_torch import OWNER, bounds, exact, operands
from tests.kernels.matching import assert_matches
from veomni_hook.kernels.gated_delta_rule import packages
from veomni_hook.kernels.gated_delta_rule import torch as chunked
from veomni_hook.kernels.gated_delta_rule import triton as ours
from veomni_hook.kernels.gated_delta_rule.tables import tables_of
from veomni_hook.kernels.shared.hub_functions import running

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE = torch.float16 if GPU else torch.float32
#: One position, none, a whole chunk, and one more.
LENGTHS = [65, 1, 0, 64]
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a GPU")]


def test_tables_are_aligned_for_launches():
    """A launch with a pointer that is no multiple of 16 bytes goes through Triton's own, slower code."""
    tables = tables_of(torch.empty(0), torch.tensor([0, 27, 54, 200]))
    assert tables.ends.tolist() == [27, 54, 200, 200, 200]
    assert tables.first.tolist() == [0, 1, 2, 5]
    assert [each.data_ptr() % 16 for each in tables] == [0] * 4


def compared(tensors, tolerance, normalise=True, cu_seqlens=None, truth=exact):
    tensors = [each.to(DEVICE) for each in tensors]
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(DEVICE)
    assert_matches(
        lambda *each: ours.scalar_decay(*each, True, normalise, cu_seqlens),
        lambda *each: truth(*each, normalise=normalise, cu_seqlens=cu_seqlens),
        tensors,
        tolerance=tolerance,
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_samples_that_share_a_row(dtype, normalise):
    if GPU and dtype is torch.float32:
        pytest.skip("float32 is for the interpreter: it does not fit into a GPU's shared memory")
    tensors = operands(1, sum(LENGTHS), dtype=dtype, samples=len(LENGTHS), keys=1, widths=(20, 12))
    if not normalise:
        tensors[1] = tensors[1] / 8  # else the state grows without end
    compared(tensors, 2e-5 if dtype is torch.float32 else 1e-2, normalise, bounds(LENGTHS))


@pytest.mark.parametrize(("rows", "positions", "groups"), [(2, 70, 1), (1, 1, 2)])
def test_rows(rows, positions, groups):
    dtype = torch.float16 if GPU else torch.float32
    compared(operands(rows, positions, groups=groups, keys=1, dtype=dtype), 1e-2 if GPU else 2e-5)


@pytest.mark.parametrize(("g", "beta"), [(-2000.0, 0.0), (-40.0, 1.0), (-1e-7, 1.0), (0.0, 0.0)])
def test_decays_and_betas_at_their_limits(g, beta):
    """Beside other decays, so that the sum over a chunk is large where a few positions still read others."""
    tensors = operands(1, 102, samples=2, keys=1, groups=1, dtype=DTYPE)
    tensors[3][:, ::5] = g
    tensors[4][:, ::3] = beta
    # Of a sum over a chunk that reaches -2e4, float32 keeps 1e-3: as in upstream's code.
    tolerance = {-2000.0: 2e-3, -40.0: 1e-4}.get(g, 2e-5)
    compared(tensors, 1e-2 if GPU else tolerance, cu_seqlens=bounds([33, 69]))


@pytest.mark.slow
def test_a_state_that_the_next_call_goes_on_with():
    tensors = [each.to(DEVICE) for each in operands(1, 80, keys=1, dtype=DTYPE)]
    agree(carried(ours.scalar_decay, tensors, 65), whole(ours.scalar_decay, tensors), 1e-2 if GPU else 1e-5)


@pytest.mark.slow
def test_bits_do_not_change():
    tensors = [each.to(DEVICE) for each in operands(1, 70, keys=1, dtype=torch.float16)]
    assert all(map(torch.equal, whole(ours.scalar_decay, tensors), whole(ours.scalar_decay, tensors)))


def test_no_positions():
    tensors = [each.to(DEVICE).requires_grad_() for each in operands(2, 0, dtype=torch.float16)]
    output, state = ours.scalar_decay(*tensors, True)
    assert output.shape == (2, 0, 4, 6) and torch.equal(state, tensors[5])
    state.sum().backward()
    assert torch.equal(tensors[5].grad, torch.ones_like(tensors[5])) and tensors[0].grad.shape == (2, 0, 2, 8)


def test_what_is_not_wanted_is_not_computed():
    """Without an initial state or a gradient of the output; strides as those of a split projection."""
    query, key, value, g, beta, _ = (each.to(DEVICE) for each in operands(1, 66, dtype=torch.float16, keys=1))
    together = torch.cat((query, key, value.reshape(1, 66, 1, 12)), dim=3).requires_grad_()
    split = (*together[..., :16].split(8, dim=3), together[..., 16:].reshape(1, 66, 2, 6))
    output, state = ours.scalar_decay(*split, g, beta, None, True, True)
    state.sum().backward()
    truth = together.detach().requires_grad_()
    split = (*truth[..., :16].split(8, dim=3), truth[..., 16:].reshape(1, 66, 2, 6))
    expected, last = chunked.scalar_decay(*split, g, beta, None, True, True)
    last.sum().backward()
    torch.testing.assert_close(output, expected, rtol=0, atol=3e-3)
    torch.testing.assert_close(together.grad, truth.grad, rtol=0, atol=3e-3)
    assert ours.scalar_decay(*split, g, beta)[1] is None


def test_refusals(monkeypatch):
    def refused(dtype=torch.bfloat16, query=None, widths=(8, 6)):
        *tensors, _ = operands(1, 3, dtype=dtype, widths=widths)
        tensors[0] = tensors[0].to(query)
        return ours.refuses(OWNER, *tensors, None, False, True, None, torch_chunk_gated_delta_rule)

    assert refused() is None and refused(torch.float16) is None
    assert refused(widths=(264, 6)) == "heads of 264 and 6 are wider than 256"
    assert "torch.float32, torch.float32" in refused(torch.float32)
    assert "torch.float32, torch.bfloat16" in refused(query=torch.float32)
    assert refused(widths=(136, 6)) is None
    monkeypatch.setattr(ours, "generation", lambda device: 10)
    monkeypatch.setattr(ours, "TRITON", (3, 6))
    assert refused(widths=(136, 6)) is None
    monkeypatch.setattr(ours, "TRITON", (3, 5))
    assert refused() is None
    assert "Triton before 3.6 does not compile for Blackwell" in refused(widths=(136, 6))


def test_on_a_gpu_it_takes_precedence_over_flash_linear_attention(monkeypatch):
    """Which computes the same in twice the time, if at all; another package was somebody's choice."""
    wrapped = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")

    def yields(package, dtype=torch.bfloat16, channels=False):
        def chunk_gated_delta_rule(*operands):
            raise AssertionError

        chunk_gated_delta_rule.__module__ = f"{package}.ops"
        monkeypatch.setitem(
            sys.modules, "fla", SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
        )
        upstream = wrapped(running(torch_chunk_gated_delta_rule))
        assert running(upstream) is chunk_gated_delta_rule
        *tensors, _ = operands(1, 3, dtype=dtype)
        if channels:
            tensors[3] = tensors[3][..., None].expand(-1, -1, -1, 8)
        return packages.yields(OWNER, *tensors, None, False, True, None, upstream)

    reason = "chunk_gated_delta_rule computes it"
    assert reason in yields("fla")
    monkeypatch.setattr(packages, "_runs_triton", lambda device: True)
    assert yields("fla") is None
    assert all(
        reason in each
        for each in (yields("other"), yields("fla", torch.float32), yields("fla", channels=True))
    )


class TestOnGPU:
    pytestmark = on_gpu

    @pytest.mark.parametrize(
        ("heads", "widths", "lengths"),
        [
            ((2, 2), (128, 128), [70, 1, 0, 129, 200]),
            ((1, 4), (64, 128), [300]),
            ((2, 1), (96, 80), [64, 64, 3]),
            ((1, 2), (256, 64), [200]),
            ((1, 1), (256, 256), [130]),
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_sizes(self, dtype, heads, widths, lengths):
        keys, groups = heads
        tensors = operands(
            1, sum(lengths), groups=groups, dtype=dtype, samples=len(lengths), keys=keys, widths=widths
        )
        compared(tensors, 2e-2 if dtype is torch.bfloat16 else 4e-3, True, bounds(lengths))

    def test_a_long_sample_does_not_drift(self):
        tensors = operands(1, 32768, dtype=torch.bfloat16, keys=1, widths=(128, 128))

        def truth(*each, normalise, cu_seqlens):
            output, state = chunked.scalar_decay(*(t.double() for t in each), True, normalise, cu_seqlens)
            return output.to(each[0].dtype), state.float()

        compared(tensors, 2e-2, truth=truth)

    def test_bits_do_not_change(self):
        tensors = [each.to(DEVICE) for each in operands(2, 200, dtype=torch.bfloat16, widths=(128, 128))]

        def step():
            leaves = [each.detach().clone().requires_grad_() for each in tensors]
            output, state = ours.scalar_decay(*leaves, True, True)
            (output.float().square().sum() + state.square().sum()).backward()
            return [output, state, *(each.grad for each in leaves)]

        for _ in range(3):
            assert all(map(torch.equal, step(), step()))
