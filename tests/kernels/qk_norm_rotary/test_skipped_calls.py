"""What is skipped must be the recognised code, and nothing may hang on a call of it."""

from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from veomni_hook.kernels.qk_norm_rotary.skipped_calls import chosen_apart, refuses
from veomni_hook.kernels.selection.binding import BINDING, use_kernels
from veomni_hook.kernels.selection.process_choice import set_choice


def turn(q, k, cos, sin):
    return q, k


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.weight


class Wrapped(Norm):
    pass


def asked(**changes):
    table = torch.ones(1, 3, 8)
    given = {
        "hidden_states": torch.ones(2, 3, 16),
        "q_norm": Norm(),
        "k_norm": Norm(),
        "norm_class": Norm,
        "rotary": turn,
        "tables": (table, table),
    }
    return refuses(None, *(given | changes).values())


def with_hook(kind):
    norm = Norm()
    getattr(norm, f"register_{kind}_hook")(lambda *_: None)
    return norm


def with_forward(forward):
    norm = Norm()
    norm.forward = MethodType(forward, norm)
    return norm


def compiled():
    norm = Norm()
    norm.compile()
    return norm


def test_the_recognised_code_is_skipped():
    assert asked() is None
    assert asked(tables=None) is None
    # What `kernelize` leaves behind where the hub has no kernel.
    assert asked(q_norm=with_forward(Norm.forward)) is None
    shared = Norm()
    assert asked(q_norm=shared, k_norm=shared) is None


@pytest.mark.parametrize("side", ["q_norm", "k_norm"])
@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (Wrapped(), "a Wrapped, not the recognised Norm"),
        (nn.Identity(), "an Identity"),
        (with_forward(lambda self, x: x), "has its own forward"),
        (compiled(), "compiled separately"),
        *((with_hook(kind), "has hooks") for kind in (
            "forward_pre", "forward", "full_backward_pre", "full_backward",
        )),
    ],
    ids=["subclass", "another", "forward", "compiled", "before", "after", "before backward", "after backward"],
)  # fmt: skip
def test_a_norm_that_has_to_be_called(side, norm, reason):
    assert reason.removeprefix("an ").removeprefix("a ") in asked(**{side: norm})


def test_a_hook_for_all_modules():
    with register_module_forward_hook(lambda *_: None):
        assert "global hook" in asked()
    assert asked() is None


def test_a_kernel_from_the_hub_has_to_be_called():
    assert "hub" in asked(rotary=nn.Identity())


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        (torch.ones(2, 1, 3, 8), "not a pair"),
        ((torch.ones(1, 3, 8),), "not a pair"),
        ((None, None), "NoneType"),
        ((torch.ones(3, 8), torch.ones(3, 8)), "both have the shape"),
        ((torch.ones(1, 3, 8), torch.ones(1, 3, 4)), "both have the shape"),
        ((torch.ones(1, 3, 8, requires_grad=True), torch.ones(1, 3, 8)), "requires a gradient"),
    ],
    ids=["stacked", "one", "none", "dimensions", "shapes", "gradient"],
)
def test_tables(tables, reason):
    assert reason in asked(tables=tables)


def test_tensors_that_are_none():
    class Other(torch.Tensor):
        pass

    assert "Other" in asked(hidden_states=torch.ones(2).as_subclass(Other))


@pytest.mark.parametrize(
    ("choice", "apart"),
    [
        ("auto", None),
        ("gated_mlp=eager", None),
        ("rms_norm=auto", None),
        ("rms_norm=eager", "rms_norm=eager"),
        ("rotary=torch,rms_norm=auto", "rotary=torch"),
    ],
)
def test_parts_that_were_chosen_by_name(choice, apart):
    set_choice(choice)
    found = chosen_apart(nn.Module())
    assert found is None if apart is None else apart in found


def test_parts_that_the_attention_is_bound_to():
    set_choice("auto")
    attention = nn.Module()
    vars(attention)[BINDING] = {"rms_norm": "reference"}
    assert "rms_norm=reference is chosen" in chosen_apart(attention)
    vars(attention)[BINDING] = {"rms_norm": "auto"}
    assert chosen_apart(attention) is None
    with use_kernels(rotary="eager"):
        assert "rotary=eager is chosen" in chosen_apart(attention)
