"""Which modules are targets, judging by their names alone.

`import veomni_hook.install` loads this module, so it imports nothing.
"""

from __future__ import annotations

PREFIX = "transformers.models."
REMOTE_PREFIX = "transformers_modules."
REMOTE_LOADING = "transformers.dynamic_module_utils"
#: Holds the table of attention implementations.
INTERFACES = "transformers.modeling_utils"
#: The targets that all models share.
SHARED = frozenset(
    (
        "transformers.configuration_utils",
        "transformers.integrations.sdpa_attention",
        "transformers.masking_utils",
        "transformers.modeling_layers",
        "transformers.vision_utils",
        INTERFACES,
        REMOTE_LOADING,
    )
)
#: The targets of other packages: layers that they put into models.
LAYERS = frozenset(("peft.tuners.lora.bnb", "peft.tuners.lora.layer"))
#: The targets that divide data among processes, or move it to devices.
DATA = frozenset(("accelerate.accelerator", "accelerate.data_loader", "transformers.trainer"))

#: Modules of trainers that are targets only where a config names them.
TRAINERS = frozenset(("trl.trainer.utils", "verl.utils.experimental.torch_functional"))


def is_target(fullname: str) -> bool:
    """Whether a name is a transformers modeling module, or one of the others listed above.

    The file name does not follow from the family: eight modeling files are not `modeling_<family>`.
    """
    if fullname.startswith(PREFIX):
        return fullname.rpartition(".")[2].startswith("modeling_")
    return fullname in SHARED or fullname in LAYERS or fullname in DATA


def is_target_if_named(fullname: str) -> bool:
    """Whether a name is a target only where a config names it: beside a modeling module, or of a trainer."""
    if not fullname.startswith(PREFIX):
        return fullname in TRAINERS
    return fullname.rpartition(".")[2].startswith(("configuration_", "processing_"))


def is_remote(fullname: str) -> bool:
    """Whether a name is a module of remote code, `transformers_modules.*`."""
    return fullname.startswith(REMOTE_PREFIX)
