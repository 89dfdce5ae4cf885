"""What holds for every kernel of every op: the cases are those of ``tests/kernels/<op>/cases.py``."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.contract import DTYPES, ELSEWHERE, OPS, Call, calls, cases, refusals, results
from tests.kernels.dispatched import Operators
from tests.kernels.matching import DEVICE, close
from veomni_hook.kernels.selection.registry import registry

F32, F16, B16 = DTYPES


@pytest.fixture(autouse=True)
def runs(request):
    """Skips what cannot run here, and doubles torch_npu."""
    kernel = request.node.callspec.params.get("kernel")
    backend = kernel and kernel.backend
    if backend == "triton":
        pytest.importorskip("triton")
    elif backend == "npu":
        request.getfixturevalue("operators")


@pytest.mark.parametrize("op", registry.names())
def test_every_variant_is_declared(op):
    if op not in ELSEWHERE:
        assert cases(op).keys() == registry.ops()[op].variants.keys()


@pytest.mark.parametrize(("kernel", "size", "dtype"), calls(0, "equals", sizes=True))
def test_equals_the_reference(kernel, size, dtype):
    call = Call(kernel, size, dtype)
    if call.refused() is None:
        call.matches()
    else:
        assert size is not call.case.sizes[0]


@pytest.mark.parametrize("kernel", calls(1, "wanted"))
def test_gradients_only_where_wanted(kernel):
    call = Call(kernel)
    places = [place for place, wanted in enumerate(call.wanted) if wanted]
    for chosen in ((), *((place,) for place in places), *(pairwise(places) if len(places) > 2 else ())):
        call.matches([place in chosen for place in range(len(call.wanted))])


LAYOUTS = {
    "swapped": lambda x: x.transpose(0, -2).contiguous().transpose(0, -2),
    "columns first": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "part of a row": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "every second column": lambda x: torch.stack((x, x), -1)[..., 0],
    "one row for all": lambda x: x[:1].expand(x.shape),
}

DEEP = {"first swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)}


@pytest.mark.parametrize("kernel", calls(2, "strides"))
def test_operands_and_gradients_of_any_strides(kernel):
    plain = Call(kernel)
    rows = [name for name in plain.names if name in plain.case.rows]
    others = [name for name in plain.names if name not in rows]
    laid = [(layout, None, names) for names in (rows, others) for layout in LAYOUTS]
    if plain.case.deep:
        laid += [("first swapped", plain.case.deep, rows)]
    taken = set()
    for layout, size, names in laid:
        least = 1 + (layout not in {"part of a row", "every second column"})
        names = [name for name in names if plain.operands[name].ndim >= least]
        call = Call(kernel, size, **dict.fromkeys(names, (LAYOUTS | DEEP)[layout]))
        if not names or call.refused() is not None or not computes(call):
            continue
        taken.add(layout)
        # The gradients that arrive are laid apart, too.
        call.matches(of=lambda found: tuple(map(turned, results(found))))
    assert len(taken) > 1


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, -1)


@pytest.mark.parametrize("kernel", calls(3, "dtypes"))
def test_operands_of_different_dtypes(kernel):
    plain = Call(kernel)
    taken = 0
    mixed = [Call(kernel, None, *dtypes) for dtypes in ((F16, F32), (F32, F16), (B16, F32), (torch.float64,))]
    mixed = [call for call in mixed if call.tensors[0].dtype in (*plain.case.dtypes, torch.float64)]
    differentiable = [name for name, wanted in zip(plain.names, plain.wanted, strict=True) if wanted]
    for name in (differentiable[0], differentiable[-1]):
        mixed.append(Call(kernel, **{name: torch.Tensor.half}))
    for call in mixed:
        dtypes = {x.dtype for x in call.tensors if x.is_floating_point()}
        if dtypes != {F32} and call.refused() is None and computes(call):
            call.matches()
            taken += 1
    assert taken


def computes(call: Call) -> bool:
    """Whether the formula takes these dtypes together, and these strides."""
    try:
        call.theirs(*call.tensors)
    except RuntimeError as error:
        assert any(word in str(error) for word in ("dtype", "scalar type", "stride")), error
        return False
    return True


@pytest.mark.parametrize("kernel", calls(4, "rounds", cheap=True))
def test_rounds_where_the_reference_rounds(kernel):
    """In float16, where the interpreter rounds as a device does."""
    for others in (F16, F32):
        call = Call(kernel, cases(kernel.op)[kernel.variant].batch, F16, others)
        if call.refused() is not None:
            continue
        for got, expected in zip(
            results(call.ours(*call.tensors)), results(call.theirs(*call.tensors)), strict=True
        ):
            assert got.dtype is expected.dtype
            # A cast at another place changes a quarter of the results, another order of a sum hardly any.
            apart = ~torch.isclose(got.float(), expected.float(), rtol=2e-6, atol=1e-6)
            assert apart.float().mean() < call.case.rounds


@pytest.mark.parametrize("kernel", calls(5, "batches"))
def test_equal_bits_from_run_to_run_and_for_a_row_in_any_batch(kernel):
    if DEVICE == "cuda" and DEVICE not in kernel.invariant:
        pytest.skip("it is not declared to be invariant on a GPU")
    Call(kernel, cases(kernel.op)[kernel.variant].batch).is_batch_invariant()


@pytest.mark.parametrize("kernel", calls(6, "operators", operators=True))
def test_operators_keep_their_contracts(kernel):
    call = Call(kernel)
    leaves = [x.requires_grad_(wanted) for x, wanted in zip(call.tensors, call.wanted, strict=True)]
    seen = {}
    with Operators(lambda operator, operands, _: seen.update({operator: operands})):
        found = [y for y in results(call.ours(*leaves)) if y.requires_grad]
        torch.autograd.backward(found, [torch.randn_like(y) for y in found])
    seen = {each: operands for each, operands in seen.items() if each.namespace == "veomni_hook"}
    assert seen
    for operator, operands in seen.items():
        torch.library.opcheck(
            operator, tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in operands)
        )


@pytest.mark.parametrize("kernel", calls(7, "graphs"))
def test_compiles_without_a_break(kernel):
    assert kernel.traceable
    call = Call(kernel)
    torch.compiler.reset()
    kernel_alone = call.ours

    def guarded(*tensors: torch.Tensor) -> Any:
        return kernel_alone(*tensors) if call.refused(*tensors) is None else tensors[0]

    call.ours = torch.compile(guarded, backend="aot_eager", fullgraph=True)
    call.matches()


@pytest.mark.parametrize("kernel", calls(8, "twice"))
def test_second_derivatives(kernel):
    call = Call(kernel)
    found = []
    for side in (call.ours, call.theirs):
        operands = [x.detach().requires_grad_(w) for x, w in zip(call.tensors, call.wanted, strict=True)]
        leaves = [x for x in operands if x.requires_grad]
        total = sum(y.double().sin().sum() for y in results(side(*operands)))
        first = torch.autograd.grad(total, leaves, create_graph=True)
        found.append((*first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)))
    for ours, truth in zip(*found, strict=True):
        close(ours.detach(), truth.detach(), 1e-4)


@pytest.mark.parametrize("kernel", calls(9, "kept"))
def test_operands_alone_are_kept_for_the_backward(kernel):
    call, kept = Call(kernel), []
    leaves = [x.requires_grad_(wanted) for x, wanted in zip(call.tensors, call.wanted, strict=True)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        found = results(call.ours(*leaves))
    known = {x.untyped_storage().data_ptr() for x in leaves}
    spared = {call.operands[name].untyped_storage().data_ptr() for name in call.case.spared}
    known |= {
        found[place].untyped_storage().data_ptr() for place in call.case.rereads.get(kernel.backend, ())
    }
    others = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    assert not spared & others.keys()
    rows = call.operands[call.case.rows[0]]
    # And a number or two a row, as a norm's scale.
    allowed = call.case.kept.get(kernel.backend, 0) * rows.nbytes + 8 * rows.numel() // rows.shape[-1]
    assert sum(size for place, size in others.items() if place not in known) <= allowed


@pytest.mark.parametrize("kernel", calls(10, "without"))
def test_calls_without_gradients(kernel):
    """They skip the dispatcher and autograd: equal results, without a node, and whoever watches sees them."""
    rows = [name for name in Call(kernel).names if name in cases(kernel.op)[kernel.variant].rows]
    for change in (None, *LAYOUTS.values()):
        call = Call(kernel, **dict.fromkeys(rows, change) if change else {})
        if call.refused() is not None or not computes(call):
            continue
        leaves = [x.requires_grad_(wanted) for x, wanted in zip(call.tensors, call.wanted, strict=True)]
        trained = results(call.ours(*leaves))
        assert all(y.requires_grad for y in trained)
        found = [results(call.ours(*(x.detach() for x in leaves)))]
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                found.append(results(call.ours(*leaves)))
        for others in found:
            for one, other in zip(trained, others, strict=True):
                assert other.grad_fn is None and not other.requires_grad
                assert torch.equal(one, other) and one.stride() == other.stride()


@pytest.mark.parametrize("kernel", calls(11, "watched", operators=True))
def test_who_watches_sees_the_operators_and_changes_nothing(kernel):
    call = Call(kernel)
    for gradients in (False, True):
        leaves = [x.requires_grad_(wanted) for x, wanted in zip(call.tensors, call.wanted, strict=True)]
        with torch.set_grad_enabled(gradients):
            before = results(call.ours(*leaves))  # also makes what later calls reuse
            seen = set()
            with Operators(lambda operator, *_, seen=seen: seen.add(operator.namespace)):
                watched = results(call.ours(*leaves))
            after = results(call.ours(*leaves))
        assert "veomni_hook" in seen
        for found in (watched, after):
            assert all(map(torch.equal, before, found))
    with torch.no_grad(), FakeTensorMode() as fake:
        found = results(call.ours(*map(fake.from_tensor, call.tensors)))
    assert [(y.shape, y.dtype, y.stride()) for y in found] == [(y.shape, y.dtype, y.stride()) for y in before]


def refused():
    return [
        pytest.param(kernel, each, id=f"{op} {kernel.backend} {kernel.variant}: {each.reason}")
        for op in OPS
        for kernel, each in refusals(op)
    ]


@pytest.mark.parametrize(("kernel", "refusal"), refused())
def test_refuses(kernel, refusal):
    call = Call(kernel)
    assert call.refused() is None
    call.operands |= refusal.change
    assert refusal.reason in call.refused()
