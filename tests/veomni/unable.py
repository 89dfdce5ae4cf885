"""What a CPU cannot run on VeOmni's own side, and what stands in for it. The tests assert that it still fails there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unable:
    """Why a config's models do not run on a CPU.

    Attributes:
        error: a part of the error of VeOmni's side.
        package: the package to stand in for (`standins`); empty if the registry's stand-in is enough
            (`linear_attention`).
        left_out: the hook leaves out the patches whose package is missing, so the hooked module is another one
            then, and is made with the stand-in only.
    """

    error: str
    package: str = ""
    left_out: bool = False


_NPU = Unable("No module named 'torch_npu'", "torch_npu")
_PACKED = "it can't process varlen now"

#: By folder and device.
UNABLE: dict[tuple[str, str], Unable] = {
    ("deepseek_v3", "npu"): _NPU,
    ("qwen3_5", "gpu"): Unable(_PACKED),
    ("qwen3_5", "npu"): Unable(_PACKED, "torch_npu"),
    ("qwen3_5_moe", "gpu"): Unable(_PACKED),
    ("qwen3_5_moe", "npu"): Unable(_PACKED, "torch_npu"),
    ("qwen3_omni_moe", "npu"): _NPU,
    ("seed_oss", "gpu"): Unable("No module named 'liger_kernel'", "liger_kernel", left_out=True),
    ("seed_oss", "npu"): _NPU,
}
