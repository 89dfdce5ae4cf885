import pytest

from veomni_hook.errors import KernelError
from veomni_hook.kernels.selection.declaration import Kernel
from veomni_hook.kernels.selection.process_choice import STATE, set_active, set_choice
from veomni_hook.kernels.selection.registry import register_kernel, registry


def test_a_choice_is_read_back():
    set_choice("rms_norm=eager")
    assert str(STATE.choice) == "rms_norm=eager"


def test_a_wrong_choice_changes_nothing():
    set_choice("torch")
    epoch = STATE.epoch
    with pytest.raises(KernelError):
        set_choice("fast")
    assert (str(STATE.choice), STATE.epoch) == ("torch", epoch)


def test_every_other_setting_is_a_new_epoch_and_the_same_is_none():
    set_choice("auto")
    epochs = [STATE.epoch]
    for change in (lambda: set_choice("torch"), lambda: set_active(False), lambda: set_active(True)):
        change()
        epochs.append(STATE.epoch)
        change()
        assert STATE.epoch == epochs[-1]
    assert epochs == sorted(set(epochs))


def test_a_backend_that_is_registered_later_can_be_chosen_then():
    with registry.restored():
        for _ in range(2):  # that it was wrong is not remembered
            with pytest.raises(KernelError):
                set_choice("rms_norm=late")
        register_kernel(Kernel("rms_norm", "cast_before_weight", "late", load="math:sqrt"))
        set_choice("rms_norm=late")
        assert str(STATE.choice) == "rms_norm=late"


def test_a_block_restores_what_was_chosen():
    set_choice("torch")
    with STATE.restored():
        set_choice("eager")
        set_active(False)
        assert STATE.wanted["rms_norm"] == "eager"
    assert (str(STATE.choice), STATE.active, STATE.wanted["rms_norm"]) == ("torch", True, "torch")
