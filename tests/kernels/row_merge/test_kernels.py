"""Merged and added rows against torch's own code: results, gradients, errors, and what is read on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels import declared
from tests.kernels.dispatched import Operators, without_waits
from tests.kernels.matching import DEVICE, assert_matches
from tests.kernels.row_merge.cases import MASKS, mask_of
from veomni_hook.kernels.row_merge import rules

METHOD = torch.Tensor.masked_scatter
BACKENDS = ["torch", "triton", "reference"]
#: What makes the host wait for a GPU.
READS = {
    "nonzero", "masked_select", "_local_scalar_dense", "item", "index", "index_put", "masked_scatter",
    "is_nonzero",
}  # fmt: skip


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


def kernel(backend: str, variant: str) -> Any:
    if backend == "reference":
        return declared.reference("row_merge", variant)
    return declared.kernel("row_merge", variant, backend)


def assert_merges(
    function: Any, inputs: torch.Tensor, mask: torch.Tensor, source: torch.Tensor, **options: Any
) -> None:
    assert rules.refuses(None, inputs, mask, source, METHOD) is None
    assert_matches(
        lambda x, s: function(x, mask, s, METHOD), lambda x, s: METHOD(x, mask, s), [inputs, source], exact=True,
        **options,
    )  # fmt: skip


@pytest.mark.sample(15)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("surplus", [0, 3])
def test_rows_are_those_of_masked_scatter(backend, name, dtype, surplus):
    inputs = torch.randn(2, 6, 40).to(DEVICE, dtype)
    mask = mask_of(name, 2, 6, 1)
    source = torch.randn(max(1, int(mask.sum())) + surplus, 40).to(DEVICE, dtype)
    assert_merges(kernel(backend, "rows"), inputs, mask, source)
    assert_merges(kernel(backend, "rows"), inputs, mask.expand_as(inputs), source)


@pytest.mark.parametrize(
    ("shape", "mask"),
    [((7, 5), (7, 1)), ((2, 3, 4, 9), (2, 3, 4, 1)), ((3, 4, 6), (4, 1)), ((3, 4, 6), (3, 1, 1)), ((4, 1), (4, 1)), ((2, 3, 130), (1, 3, 1))],
    ids=str,
)  # fmt: skip
def test_shapes_and_masks_that_are_broadcast(backend, shape, mask):
    inputs, mask = torch.randn(shape, device=DEVICE), mask_of("alternating", *mask)
    rows = int(mask.expand(*shape[:-1], 1).sum())
    assert_merges(kernel(backend, "rows"), inputs, mask, torch.randn(rows, shape[-1], device=DEVICE))


@pytest.mark.parametrize(
    "source", [(12, 8), (3, 4, 8), (96,), (2, 48), (6, 16)], ids=str
)  # fmt: skip
def test_the_source_is_read_in_the_order_of_its_elements(backend, source):
    inputs, mask = torch.randn(2, 10, 8, device=DEVICE), mask_of("alternating", 2, 10, 1)
    assert_merges(kernel(backend, "rows"), inputs, mask, torch.randn(source, device=DEVICE))


def test_operands_with_strides_of_their_own(backend):
    inputs = torch.randn(6, 2, 2 * 8, device=DEVICE)[..., ::2].transpose(0, 1)
    source = torch.randn(8, 6, device=DEVICE).t()
    mask = mask_of("alternating", 6, 2).t().unsqueeze(-1)
    assert not inputs.is_contiguous() and not source.is_contiguous() and not mask.is_contiguous()
    assert_merges(kernel(backend, "rows"), inputs, mask, source)
    given = inputs.detach().requires_grad_(), source.detach().requires_grad_()
    results = []
    for function in (kernel(backend, "rows"), lambda x, m, s, _: METHOD(x, m, s)):
        y = function(given[0], mask, given[1], METHOD)
        assert y.is_contiguous()
        torch.manual_seed(1)
        incoming = torch.randn(2, 8, 6, device=DEVICE).transpose(1, 2)
        results.append(torch.autograd.grad(y, given, incoming))
    assert all(map(torch.equal, *results))


def test_wide_rows(backend):
    inputs, mask = torch.randn(3, 9000, device=DEVICE), mask_of("the last", 3, 1)
    assert_merges(kernel(backend, "rows"), inputs, mask, torch.randn(2, 9000, device=DEVICE))


def upstream_added(hidden_states: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """A clone, a read, and a write in place, as models write it."""
    source = source.to(hidden_states.device, hidden_states.dtype)
    hidden_states = hidden_states.clone()
    total = hidden_states[mask, :] + source
    hidden_states[mask, :] = total
    return hidden_states


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)], ids=str
)
@pytest.mark.parametrize("name", ["all", "alternating", "a run"])
def test_added_rows(backend, name, dtypes):
    hidden = torch.randn(2, 6, 40).to(DEVICE, dtypes[0])
    mask = mask_of(name, 2, 6)
    source = torch.randn(int(mask.sum()), 40).to(DEVICE, dtypes[1])
    assert rules.refuses_added(None, hidden, mask, source) is None
    call = kernel(backend, "rows_added")
    # Triton's interpreter rounds bfloat16 in its own way.
    exact = not (backend == "triton" and DEVICE == "cpu" and dtypes[0] is torch.bfloat16)
    assert_matches(
        lambda x, s: call(x, mask, s), lambda x, s: upstream_added(x, mask, s), [hidden, source], exact=exact
    )


def operators(function: Any, inputs: torch.Tensor, source: torch.Tensor) -> set[str]:
    leaves = inputs.requires_grad_(), source.requires_grad_()
    with Operators() as mode:
        function(*leaves).sum().backward()
    return set(mode.names)


@pytest.mark.parametrize("variant", ["rows", "rows_added"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_value_is_read_on_the_host(backend, variant):
    mask = mask_of("alternating", 4, 6)
    inputs, source = torch.randn(4, 6, 8, device=DEVICE), torch.randn(12, 8, device=DEVICE)

    def ours(x, s):
        call = kernel(backend, variant)
        return call(x, mask.unsqueeze(-1), s, METHOD) if variant == "rows" else call(x, mask, s)

    def theirs(x, s):
        return METHOD(x, mask.unsqueeze(-1), s) if variant == "rows" else upstream_added(x, mask, s)

    found = operators(ours, inputs, source)
    assert "_assert_async" in found or "row_merge" in found
    assert not found & READS
    assert operators(theirs, inputs.detach(), source.detach()) & READS


def test_on_a_gpu_rules_read_nothing(monkeypatch):
    """On a CPU they count the mask's rows; meta tensors have no values to count."""
    monkeypatch.setattr(rules, "_DEVICES", ("meta",))
    inputs, source = torch.empty(2, 3, 8, device="meta"), torch.empty(4, 8, device="meta")
    mask = torch.empty(2, 3, 1, device="meta", dtype=torch.bool)
    assert rules.refuses(None, inputs, mask, source, METHOD) is None
    assert rules.refuses_added(None, inputs, mask[..., 0], source) is None


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_wrong_number_of_rows_is_an_error(backend):
    """On a CPU an assertion raises at once."""
    inputs, mask = torch.randn(4, 6), mask_of("all", 4, 1).cpu()
    with pytest.raises(RuntimeError, match="the source has fewer rows than the mask"):
        kernel(backend, "rows")(inputs, mask, torch.randn(3, 6), METHOD)
    for rows in (3, 5):
        with pytest.raises(RuntimeError, match="another number of rows than the mask"):
            kernel(backend, "rows_added")(inputs, mask[:, 0], torch.randn(rows, 6))


def scattered(*operands: Any) -> Any:
    return METHOD(*operands)


X, S, M = torch.randn(2, 3, 4), torch.randn(6, 4), torch.ones(2, 3, 1, dtype=torch.bool)
REFUSED = {
    "replaced": (X, M, S, scattered, "was replaced"),
    "too few rows": (X, M, S[:5], METHOD, "fewer rows than the mask"),
    "part of a row": (X, M, torch.randn(26), METHOD, "does not consist of whole rows"),
    "a mask of elements": (X, M.expand_as(X).clone(), S, METHOD, "not of whole rows"),
    "a mask of bytes": (X, M.to(torch.uint8), S, METHOD, "the mask has dtype torch.uint8"),
    "a larger mask": (X[:1], M, S, METHOD, "the mask is larger"),
    "more dimensions": (X[0], M, S, METHOD, "another number of dimensions"),
    "another dtype": (X, M, S.bfloat16(), METHOD, "the source torch.bfloat16"),
    "another device": (X, M, torch.empty(6, 4, device="meta"), METHOD, "different devices"),
    "no rows": (X, M, torch.randn(0, 4), METHOD, "there are no rows"),
    "one dimension": (X[0, 0], M[0, 0], S, METHOD, "there are no rows"),
    "a device without assertions": (X.to("meta"), M.to("meta"), S.to("meta"), METHOD, "checked on meta"),
    "no tensor": (X, M, 1.0, METHOD, "an operand is a float"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    *operands, reason = REFUSED[name]
    assert reason in rules.refuses(None, *operands)


REFUSED_ADDED = {
    "one row for all": (X, M[..., 0], S[:1], "a row for each row of the mask"),
    "no matrix": (X, M[..., 0], S.view(2, 3, 4), "a row for each row of the mask"),
    "fewer rows": (X, M[..., 0], S[:5], "another number of rows than the mask"),
    "another mask": (X, M[0, :, 0], S[:3], "the shape of the hidden states' rows"),
    "integers": (X.int(), M[..., 0], S, "not floating-point numbers"),
}


@pytest.mark.parametrize("name", REFUSED_ADDED)
def test_refuses_added(name):
    *operands, reason = REFUSED_ADDED[name]
    assert reason in rules.refuses_added(None, *operands)


def test_refuses_in_transforms_and_replaced_methods(monkeypatch):
    reasons = []
    torch.func.vmap(lambda x: reasons.append(rules.refuses(None, x, M, S, METHOD)) or x)(torch.stack([X, X]))
    assert "torch.func transform" in reasons[0]
    monkeypatch.setattr(torch.Tensor, "masked_scatter", scattered)
    assert "was replaced" in rules.refuses(None, X, M, S, torch.Tensor.masked_scatter)


def test_upstreams_code_is_preferred_on_a_cpu():
    assert "on a CPU" in rules.loses(None, X, M, S, METHOD)
    assert rules.loses(None, SimpleNamespace(device=torch.device("cuda")), M, S, METHOD) is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_compiles_without_a_break(backend):
    call, added = kernel(backend, "rows"), kernel(backend, "rows_added")
    mask = mask_of("alternating", 4, 6)

    def ours(x, s):
        if rules.refuses(None, x, mask.unsqueeze(-1), s, torch.Tensor.masked_scatter) is None:
            x = call(x * 2, mask.unsqueeze(-1), s, torch.Tensor.masked_scatter)
        if rules.refuses_added(None, x, mask, s) is None:
            return added(x, mask, s)
        return x * 0

    def theirs(x, s):
        return upstream_added(METHOD(x * 2, mask.unsqueeze(-1), s), mask, s)

    torch.compiler.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert_matches(compiled, theirs, [torch.randn(4, 6, 8, device=DEVICE), torch.randn(12, 8, device=DEVICE)])
    if DEVICE == "cpu":  # a GPU's assertion ends the process's use of it
        with pytest.raises(RuntimeError, match="fewer rows"):
            compiled(torch.randn(4, 6, 8), torch.randn(11, 8))


@pytest.mark.skipif(DEVICE == "cpu", reason="a GPU's synchronisations")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_synchronisation_on_a_gpu(backend):
    mask = mask_of("alternating", 4, 6)
    x, s = torch.randn(4, 6, 8, device=DEVICE, requires_grad=True), torch.randn(12, 8, device=DEVICE)
    call, added = kernel(backend, "rows"), kernel(backend, "rows_added")
    with without_waits():
        assert rules.refuses(None, x, mask.unsqueeze(-1), s, METHOD) is None
        added(call(x, mask.unsqueeze(-1), s, METHOD), mask, s).sum().backward()
