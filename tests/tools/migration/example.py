"""Two releases of a small module, and configs as VeOmni writes them for the older one."""

from __future__ import annotations

from pathlib import Path

FAMILY = "upgraded"
MODULE = f"transformers.models.{FAMILY}.modeling_{FAMILY}"
PACKAGE = "upgraded_configs"
NAME = f"{PACKAGE}.upgraded_gpu_patch_gen_config"

OLD = '''
"""Upstream."""

import torch
from torch import nn

from ...outputs import ModelOutput


class UpgradedRMSNorm(nn.Module):
    def __init__(self, size, epsilon=1e-6):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.gain * x.to(dtype)


class UpgradedModel(nn.Module):
    def forward(self, x, mask=None):
        return self.norm(x) + 1

    def angles(self, grid):
        return grid * 3

    def same(self, x):
        y = x * 2
        return y


class UpgradedHead(UpgradedModel):
    def forward(self, x, labels=None):
        return ModelOutput(self.model(x))


class UpgradedTalker(UpgradedModel):
    def talk(self, x):
        return self.same(x)
'''

#: `forward` has another parameter and body, `angles` is gone, `same` computes the same, and one class is gone.
NEW = (
    OLD.replace("def forward(self, x, mask=None):", "def forward(self, x, mask=None, cache=None):")
    .replace("return self.norm(x) + 1", "return self.norm(x) - 1")
    .replace("    def angles(self, grid):\n        return grid * 3\n\n", "")
    .replace("        y = x * 2\n        return y\n", "        return x * 2\n")
    .partition("class UpgradedTalker")[0]
)

CONFIG = f'''
"""Patches of the upgraded model."""

from patchgen_double import PatchConfig

config = PatchConfig(
    source_module="{MODULE}",
    target_file="patched_modeling_upgraded_gpu.py",
    description="upgraded, GPU",
)
config.add_import("veomni.utils.model_outputs", names=["CausalLMOutputWithLogProbs", "FusedLinearAuxOutput"])
config.add_import("veomni.distributed.sequence_parallel", names=["gather_outputs"])
config.drop_import_names("NotImportedThere")
config.exclude_from_output("UpgradedTalker")
config.add_post_import_block(
    """
    # slots
    from veomni.ops.dispatch import OpSlot
    veomni_rms_norm = OpSlot("rms_norm", "standard")
    veomni_causal_lm_loss = OpSlot("cross_entropy_loss", "causal")
    """
)


@config.add_helper
def doubled(x):
    return x * 2


@config.add_helper
def unused(x):
    return x


@config.override_method("UpgradedRMSNorm.forward", description="a kernel")
def norm_forward(self, x):
    if veomni_rms_norm.use_non_eager_impl:
        return veomni_rms_norm(x, self.gain, self.epsilon)
    dtype = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)
    return self.gain * x.to(dtype)


@config.override_method("UpgradedModel.forward", description="gather the output")
def model_forward(self, x, mask=None):
    return gather_outputs(doubled(self.norm(x)))


@config.override_method("UpgradedModel.angles")
def model_angles(self, grid):
    return grid.tolist()


@config.override_method("UpgradedModel.same")
def model_same(self, x):
    return gather_outputs(x)


@config.override_method("UpgradedModel.get_parallel_plan")
def parallel_plan(self):
    from ..parallel_plan import get_parallel_plan as made

    return made()


@config.override_method("UpgradedHead.forward")
def head_forward(self, x):
    return CausalLMOutputWithLogProbs(self.model(x))
'''


def package(folder: Path, version: str, text: str) -> Path:
    """Write a transformers package with the module; return its folder."""
    models = folder / "transformers" / "models" / FAMILY
    models.mkdir(parents=True)
    for each in (models, models.parent):
        (each / "__init__.py").write_text("")
    (models / f"modeling_{FAMILY}.py").write_text(text)
    (folder / "transformers" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    return folder / "transformers"


def config_module(folder: Path, text: str = CONFIG, *, written_for: str = "5.9.0") -> Path:
    """Write the config, and beside it the head of the file that patchgen would generate; return the file."""
    folder = folder / PACKAGE
    (folder / "generated").mkdir(parents=True, exist_ok=True)
    head = f"# ====\n#  Source: {MODULE}\n#  Based on: transformers=={written_for}\n"
    (folder / "generated" / "patched_modeling_upgraded_gpu.py").write_text(head)
    (folder / "__init__.py").write_text("")
    (folder / "parallel_plan.py").write_text("def get_parallel_plan():\n    return 7\n")
    path = folder / f"{NAME.rpartition('.')[2]}.py"
    path.write_text(text)
    return path
