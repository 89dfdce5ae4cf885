from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Before anything imports triton (`torch.compile` does): its functions are compiled or interpreted from then on.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same numbers, alone and in any order."""
    torch.manual_seed(0)
