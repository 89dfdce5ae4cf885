"""What a CPU cannot run on VeOmni's own side. The tests assert that it still fails there."""

from __future__ import annotations

__all__ = ["ABSENT", "FAILS"]

#: Packages that a config's models import and that need a device; the comparison uses stand-ins for them.
ABSENT: dict[tuple[str, str], str] = {
    ("deepseek_v3", "npu"): "torch_npu",
    ("qwen3_5", "npu"): "torch_npu",
    ("qwen3_5_moe", "npu"): "torch_npu",
    ("qwen3_omni_moe", "npu"): "torch_npu",
    ("seed_oss", "gpu"): "liger_kernel",
    ("seed_oss", "npu"): "torch_npu",
}

#: Inputs that VeOmni's models refuse without a device, with a part of the error.
FAILS: dict[tuple[str, str], str] = {}
