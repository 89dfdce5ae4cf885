import pytest

from veomni_hook.errors import KernelError
from veomni_hook.kernels.selection.choice import parse_choice


@pytest.mark.parametrize("text", ["auto", "eager", "torch"])
def test_one_word_is_for_every_op(text):
    choice = parse_choice(f" {text} ")
    assert {choice.backend(op) for op in ("rms_norm", "rotary")} == {text}
    assert str(choice) == text


def test_pairs_leave_the_rest_at_auto():
    choice = parse_choice("rms_norm=torch, rotary = eager")
    assert [choice.backend(op) for op in ("rms_norm", "rotary", "gated_mlp")] == ["torch", "eager", "auto"]
    assert parse_choice(str(choice)) == choice


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("fast", "auto, eager, triton, npu, flex"),
        ("", "auto, eager, triton, npu, flex"),
        ("rms_norm=fast", "for rms_norm: auto, eager, triton, npu, torch"),
        ("norm=torch", "ops: activation, add_layer_norm, add_rms_norm"),
        ("rms_norm=torch,rotary", "rms_norm=torch,rotary=eager"),
        ("rms_norm=torch,", "rms_norm=torch,rotary=eager"),
        ("rms_norm=torch,rms_norm=eager", "keep one"),
    ],
)
def test_mistakes_list_what_is_valid(text, listed):
    with pytest.raises(KernelError) as caught:
        parse_choice(text)
    assert listed in caught.value.fix
    assert repr(text) in caught.value.where
