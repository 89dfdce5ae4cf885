from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    # Before anything imports triton (`torch.compile` does): its functions are compiled or interpreted from then on.
    os.environ["TRITON_INTERPRET"] = "1"
