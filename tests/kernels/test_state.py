from __future__ import annotations

import pytest

from veomni_hook.errors import KernelError
from veomni_hook.kernels.state import STATE, get_choice, set_active, set_choice


def test_a_choice_is_read_back():
    set_choice("rms_norm=eager")
    assert get_choice() == "rms_norm=eager"


def test_a_wrong_choice_changes_nothing():
    set_choice("torch")
    epoch = STATE.epoch
    with pytest.raises(KernelError):
        set_choice("fast")
    assert (get_choice(), STATE.epoch) == ("torch", epoch)


def test_every_setting_is_a_new_epoch():
    epochs = [STATE.epoch]
    for change in (lambda: set_choice("auto"), lambda: set_active(False), lambda: set_active(True)):
        change()
        epochs.append(STATE.epoch)
    assert epochs == sorted(set(epochs))
