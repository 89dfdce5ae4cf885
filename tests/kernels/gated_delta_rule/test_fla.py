"""flash-linear-attention by name: what its functions are called with; on a GPU, the functions themselves."""

import sys
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

from tests.kernels.matching import close, gradients
from veomni_hook.errors import KernelError
from veomni_hook.kernels.gated_delta_rule import fla, reference
from veomni_hook.kernels.selection.declaration import System
from veomni_hook.kernels.selection.registry import registry

VARIANTS = ("scalar_decay", "channel_decay")
BOUNDS = torch.tensor([0, 3, 3, 8, 14], dtype=torch.int32)


def strict(variant):
    """What flash-linear-attention 0.6.0 takes, computed by the formula."""

    def function(q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens):
        assert q.shape == k.shape and q.shape[:3] == v.shape[:3] == g.shape[:3] == beta.shape
        assert all(x.is_contiguous() for x in (q, k, v, g, beta))
        assert type(output_final_state) is type(use_qk_l2norm_in_kernel) is bool
        if cu_seqlens is not None:
            assert q.shape[0] == 1 and cu_seqlens.dtype is torch.int64
            assert initial_state is None or len(initial_state) == len(cu_seqlens) - 1
        assert initial_state is None or initial_state.dtype is torch.float32
        rest = initial_state, True, use_qk_l2norm_in_kernel, cu_seqlens
        return getattr(reference, variant)(q, k, v, g, beta, *rest)

    return function


@pytest.fixture
def package(monkeypatch):
    homes = {"fla": {}, "fla.ops": {}}
    homes["fla.ops.gated_delta_rule"] = {"chunk_gated_delta_rule": strict("scalar_decay")}
    homes["fla.ops.kda"] = {"chunk_kda": strict("channel_decay")}
    for name, content in homes.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def operands(variant, heads=4, device="cpu", dtype=torch.float32, positions=7, width=6):
    torch.manual_seed(2)
    q, k = (torch.randn(2, positions, 2, width, device=device) for _ in range(2))
    v, beta = (
        torch.randn(2, positions, heads, width, device=device),
        torch.rand(2, positions, heads, device=device),
    )
    if variant == "channel_decay":
        q, k = (x.repeat_interleave(heads // 2, dim=2) for x in (q, k))
    g = -torch.rand(*(q.shape if variant == "channel_decay" else beta.shape), device=device)
    return [x.to(dtype) for x in (q, k, v)] + [g, beta.to(dtype)]


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["rows", "samples"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_the_functions_get(variant, bounds, normalised, package):
    samples = 2 if bounds is None else 4
    state = torch.randn(samples, 4, 6, 6)
    for given, final in ((None, False), (state, True)):
        tensors = [*operands(variant), *([] if given is None else [given])]

        def run(home, *x, final=final):
            rest = x[5] if len(x) > 5 else None, final, normalised, bounds
            output, last = getattr(home, variant)(*x[:5], *rest)
            assert (last is not None) is final
            return (output, last) if final else output

        found, expected = (
            gradients(lambda *x, home=home: run(home, *x), tensors, [True] * len(tensors))
            for home in (fla, reference)
        )
        for one, other in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
            assert one.shape == other.shape
            close(one, other, 1e-5)


@pytest.mark.parametrize(
    ("capability", "triton", "wrong"),
    [((9, 0), (3, 6, 0), True), ((9, 0), (3, 7, 0), True), ((9, 0), (3, 7, 1), False),
     ((9, 0), (3, 3, 1), False), ((8, 0), (3, 6, 0), False), ((10, 0), (3, 6, 0), False)],
)  # fmt: skip
def test_a_wrong_backward_is_an_error_before_the_forward(capability, triton, wrong, package, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(fla, "_triton", lambda: triton)
    assert (fla._wrong(torch.device("cuda")) is not None) is wrong
    monkeypatch.setattr(fla, "_wrong", lambda device: "Triton 3.6.0 on Hopper" if wrong else None)
    tensors = operands("scalar_decay")
    fla.scalar_decay(*tensors)  # nothing needs a gradient
    tensors[0].requires_grad_()
    if wrong:
        with pytest.raises(KernelError, match=r"backward is wrong with Triton 3\.6\.0 on Hopper") as caught:
            fla.scalar_decay(*tensors)
        assert "gated_delta_rule=triton" in str(caught.value)
    else:
        fla.scalar_decay(*tensors)


def test_what_is_refused():
    tensors = operands("scalar_decay", dtype=torch.bfloat16)
    assert "float32" in fla.refuses(None, *(x.float() for x in tensors[:3]))
    assert fla.refuses(None, *tensors[:3]) is None
    wide = torch.empty(1, 1, 1, 300, dtype=torch.bfloat16)
    assert "wider" in fla.refuses(None, wide, wide, wide)


def test_it_runs_by_name_only_and_where_it_is_installed():
    for variant in VARIANTS:
        (kernel,) = [k for k in registry.kernels("gated_delta_rule", variant) if k.backend == "fla"]
        assert not kernel.automatic
        bare = System("cuda", (9, 0), triton="3.6.0")
        assert "fla_core" in str(kernel.requires.unmet(bare))


@pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("fla") is None, reason="needs a GPU and fla-core"
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_package_itself(variant):
    tensors = operands(variant, device="cuda", dtype=torch.bfloat16, positions=100, width=64)
    bounds = torch.tensor([0, 30, 100, 200], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        for ends in (None, bounds):
            found, expected = (
                getattr(home, variant)(*tensors, None, True, True, ends) for home in (fla, reference)
            )
            for one, other in zip(found, expected, strict=True):
                close(one.float(), other.float(), 2e-2)
