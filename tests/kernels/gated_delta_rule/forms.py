"""Both forms of the rule: a decay for each head, and one for each channel; with operands and the truth."""

from types import SimpleNamespace

import pytest
import torch

from veomni_hook.kernels.gated_delta_rule import operand_checks, reference
from veomni_hook.kernels.gated_delta_rule import torch as chunked

OWNER = SimpleNamespace()


class Form:
    """A variant, and the heads for each key head that its operands have unless told otherwise."""

    def __init__(self, variant, groups, upstream, refuses):
        self.variant, self.groups, self.refuses = variant, groups, refuses
        self.channels = variant == "channel_decay"
        self.chunked, self.truth = getattr(chunked, variant), getattr(reference, variant)
        self._upstream = upstream

    def __repr__(self):
        return self.variant

    @property
    def upstream(self):
        """Transformers' function, of the releases that have it."""
        module, name = self._upstream
        return getattr(pytest.importorskip(f"transformers.models.{module}"), name)

    def operands(
        self, rows, positions, *, dtype=torch.float32, samples=None, keys=2, groups=None, widths=(8, 6)
    ):
        """Query, key, value, g, beta and the initial state."""
        torch.manual_seed(0)
        heads = keys * (groups or self.groups)
        query, key = (torch.randn(rows, positions, keys, widths[0]) for _ in range(2))
        value = torch.randn(rows, positions, heads, widths[1])
        decays = query.shape if self.channels else value.shape[:3]
        g, beta = -2 * torch.rand(decays) ** 2, torch.rand(rows, positions, heads)
        state = torch.randn(samples or rows, heads, *widths)
        return [each.to(dtype) for each in (query, key, value, g, beta)] + [state]

    def exact(self, *tensors, normalise=True, cu_seqlens=None):
        """The recurrence in float64, in the dtypes of the operands."""
        output, state = self.truth(*(each.double() for each in tensors), True, normalise, cu_seqlens)
        return output.to(tensors[0].dtype), state.float()

    def at_limits(self, tensors, g, beta):
        """Set some of the decays and betas, so that few positions still read others."""
        tensors[3][:, ::5] = g
        if self.channels:
            tensors[3][:, 1::7, :, :4] = g
        tensors[4][:, ::3] = beta
        return tensors


FORMS = [
    Form(
        "scalar_decay",
        2,
        ("qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule"),
        operand_checks.refuses,
    ),
    Form(
        "channel_decay",
        1,
        ("kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention"),
        operand_checks.refuses_channels,
    ),
]


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def results(leaves, output, state):
    """Output, state, and the gradients of a sum over both."""
    torch.manual_seed(2)
    (output * torch.randn_like(output)).sum().add((state * torch.randn_like(state)).sum()).backward()
    return [output.detach(), state.detach(), *(each.grad for each in leaves)]


def whole(rule, tensors, cu_seqlens=None):
    """The results of one call."""
    leaves = [each.clone().requires_grad_() for each in tensors]
    return results(leaves, *rule(*leaves, True, True, cu_seqlens))


def carried(rule, tensors, cut):
    """Those of two calls, the second with the state of the first."""
    leaves = [each.clone().requires_grad_() for each in tensors]
    first, state = rule(*(each[:, :cut] for each in leaves[:5]), leaves[5], True, True)
    second, state = rule(*(each[:, cut:] for each in leaves[:5]), state, True, True)
    return results(leaves, torch.cat((first, second), 1), state)


def apart(rule, tensors, length):
    """Those of a call for each sample of one row."""
    leaves = [each.clone().requires_grad_() for each in tensors]
    count = tensors[0].shape[1] // length
    outputs, states = [], []
    for number in range(count):
        row = (each[:, number * length : (number + 1) * length] for each in leaves[:5])
        output, state = rule(*row, leaves[5][number : number + 1], True, True)
        outputs.append(output)
        states.append(state)
    return results(leaves, torch.cat(outputs, 1), torch.cat(states))
