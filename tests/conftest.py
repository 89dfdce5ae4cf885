import gc
import os
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

KERNELS = Path(__file__).parent / "kernels"

# How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Syntax trees and graphs are large and have few cycles. What is frozen below does not count, so by default every
# 70,000 new objects would start a full collection.
gc.set_threshold(100_000, 50, 100)


def pytest_addoption(pluginmanager):
    """Lets tests see a GPU, and Triton compile for it, under ``-m gpu`` alone: elsewhere they are those of any machine.

    Pytest calls this before it reads the conftest of a folder that the command line names, which may import triton.
    """
    asked = pluginmanager.get_plugin("pytestconfig").known_args_namespace.markexpr
    if "gpu" in asked and "not gpu" not in asked:
        # As torch's products; the oracle of a convolution would have fewer digits than the kernel.
        torch.backends.cudnn.allow_tf32 = False
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not torch.cuda.is_available():
        # Before anything imports triton (`torch.compile` does): its functions are compiled or interpreted from then on.
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks as slow what ``sample`` leaves out of the default suite, and what runs on a GPU, too."""
    cases = defaultdict(list)
    for item in items:
        if item.path.is_relative_to(KERNELS):
            item.add_marker(pytest.mark.gpu)
        if (sample := item.get_closest_marker("sample")) and not item.get_closest_marker("slow"):
            cases[item.parent.nodeid, item.originalname, sample.args].append(item)
    for (_, _, (count,)), tests in cases.items():
        taken = {index * len(tests) // count for index in range(count)}
        for index, item in enumerate(tests):
            if index not in taken:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Spares the garbage collector what was imported and collected: dynamo calls it after each graph."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same numbers, alone and in any order."""
    torch.manual_seed(0)


@pytest.fixture
def give_away(monkeypatch):
    """Make a path another user's; without the right to, make this process another user to itself."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, 4242, 4242, follow_symlinks=False)
        else:
            user = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: user + 1)

    return give
