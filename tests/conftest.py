from __future__ import annotations

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Before anything imports triton (`torch.compile` does): its functions are compiled or interpreted from then on.
    os.environ["TRITON_INTERPRET"] = "1"

# How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Syntax trees and graphs are large and have few cycles. What is frozen below does not count, so by default every
# 70,000 new objects would start a full collection.
gc.set_threshold(100_000, 50, 100)


def pytest_collection_finish():
    """Spares the garbage collector what was imported and collected: dynamo calls it after each graph."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same numbers, alone and in any order."""
    torch.manual_seed(0)
