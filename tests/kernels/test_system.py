from __future__ import annotations

import torch

from veomni_hook.kernels.system import System


def test_detect_reads_this_machine():
    system = System.detect("cpu")
    assert (system.device, system.capability) == ("cpu", None)
    assert system.torch == torch.__version__


def test_a_system_is_printed_in_words():
    assert str(System("cuda", (9, 0), "2.13", "3.5")) == "cuda, SM90, torch 2.13, triton 3.5"
    assert str(System("cpu")) == "cpu, torch unknown, no triton"
