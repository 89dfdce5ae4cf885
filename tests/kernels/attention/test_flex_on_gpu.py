"""flex_attention as Inductor compiles it on a GPU, against the formulas in float64: outputs and every gradient.

The other tests of the backend run on a CPU, where dynamo and autograd are the same, but nothing is compiled.
"""

import pytest
import torch

from tests.kernels.attention.test_flex import Attention, upstreams_mask
from veomni_hook.kernels.attention import flex, reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
#: Lengths that are multiples of a block or not, with a window or not.
CASES = [("sinks", 1500, None), ("sinks", 640, 70), ("softcap", 1500, 70), ("softcap", 777, None)]


def gradients(run, operands, mask, module, upward, *values):
    leaves = [*operands, *module.parameters()]
    y = run(*operands, mask, module, *values)[0]
    used = [y, *torch.autograd.grad(y, leaves, upward.to(y), allow_unused=True)]
    return [torch.zeros(()) if one is None else one for one in used]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("variant", "length", "window"), CASES)
def test_gradients(variant, length, window, dtype):
    torch.manual_seed(0)
    module = Attention(16, 2, 64).to("cuda", dtype)
    made = module.operands(length, dtype=dtype)
    # As projections make them: the heads are not the outer dimension.
    operands = [one.detach().to("cuda").requires_grad_() for one in made]
    assert not operands[0].is_contiguous()
    mask = upstreams_mask(2, length, dtype=dtype, window=window)
    mask = mask.cuda()
    values = (0.125, 0.0, 3.0) if variant == "softcap" else (0.125, 0.0)
    kernel = flex.with_softcap if variant == "softcap" else flex.with_sinks
    upward = torch.randn(2, length, 16, 64, device="cuda")
    from veomni_hook.kernels.attention import masks

    masks._remember(mask)
    got = gradients(kernel, operands, mask, module, upward, *values)
    exact = Attention(16, 2, 64).to("cuda", torch.float64)
    exact.load_state_dict({name: one.double() for name, one in module.state_dict().items()})
    doubles = [one.detach().double().requires_grad_() for one in operands]
    seen = torch.zeros_like(mask, dtype=torch.float64)
    seen = seen.masked_fill_(mask != 0, torch.finfo(torch.float64).min)
    formula = getattr(reference, "sinks" if variant == "sinks" else "softcap")
    expected = gradients(formula, doubles, seen, exact, upward, *values)
    for name, one, other in zip(("output", "query", "key", "value", "sinks"), got, expected, strict=True):
        error = (one.double() - other).norm() / other.norm().clamp(min=1e-30)
        assert error < {torch.float32: 2e-3, torch.bfloat16: 8e-3}[dtype], (name, error)


@pytest.mark.parametrize("variant", ["sinks", "softcap"])
def test_derivatives_of_gradients(variant):
    torch.manual_seed(0)
    module = Attention(4, 2, 32).to("cuda")
    kernel = flex.with_softcap if variant == "softcap" else flex.with_sinks
    values = (0.125, 0.0, 3.0) if variant == "softcap" else (0.125, 0.0)
    operands = [one.detach().to("cuda").requires_grad_() for one in module.operands(640)]
    leaves = [*operands, *(() if variant == "softcap" else (module.sinks,))]
    upward = torch.randn(2, 640, 4, 32, device="cuda")

    def derivatives(run):
        first = torch.autograd.grad((run() * upward).sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum(each.square().sum() for each in first), leaves)]

    found = derivatives(lambda: kernel(*operands, None, module, *values)[0])
    expected = derivatives(lambda: getattr(reference, variant)(*operands, None, module, *values)[0])
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 1e-3 * other.norm()
