"""Which modules are targets, judging by their names alone.

`import veomni_hook.install` loads this module, so it imports nothing.
"""

from __future__ import annotations

PREFIX = "transformers.models."
REMOTE_PREFIX = "transformers_modules."
REMOTE_LOADING = "transformers.dynamic_module_utils"
#: Holds the table of attention implementations.
INTERFACES = "transformers.modeling_utils"
_CHOICES = (
    "under `auto`, kernels for experts and for attention with sinks or softcaps (what was chosen for these "
    "is unknown)"
)
_LORA = "kernels for the layers of LoRA"
_LOG_PROBS = "the kernel for log-probabilities of tokens"
_DATA = "the handling of batches that a setting asks for"
#: The targets that all models share, and what models lose if one of them is not patched.
SHARED = {
    "transformers.configuration_utils": (_CHOICES,),
    "transformers.integrations.sdpa_attention": ("kernels for sliding windows",),
    "transformers.masking_utils": ("kernels for sliding windows", "compiled code without masks"),
    "transformers.modeling_layers": ("kernels for the heads of classifiers",),
    "transformers.vision_utils": ("sizes of images on the host",),
    INTERFACES: (_CHOICES, "the check that all experts were loaded"),
    REMOTE_LOADING: ("patches of remote code",),
}
#: The targets whose classes are layers of others' models.
LAYERS = {
    "peft.tuners.lora.bnb": (_LORA,),
    "peft.tuners.lora.layer": (_LORA,),
    "transformers.activations": ("kernels for activations of several operators",),
}
#: The targets that load or train models and hold no code of them.
TRAINING = {
    "accelerate.accelerator": (_DATA,),
    "accelerate.data_loader": (_DATA,),
    "transformers.core_model_loading": ("experts of this process alone while they are loaded",),
    "transformers.trainer": (_DATA,),
    **dict.fromkeys(
        (
            *("trl.trainer.grpo_config", "trl.trainer.grpo_trainer"),
            *("trl.trainer.rloo_config", "trl.trainer.rloo_trainer"),
        ),
        ("completions that processes share",),
    ),
    "trl.trainer.utils": (_LOG_PROBS,),
    "verl.utils.experimental.torch_functional": (_LOG_PROBS,),
}


def is_target(fullname: str) -> bool:
    """Whether a name is a transformers modeling module, or one of the others listed above.

    The file name does not follow from the family: eight modeling files are not `modeling_<family>`.
    """
    if fullname.startswith(PREFIX):
        return fullname.rpartition(".")[2].startswith("modeling_")
    return fullname in SHARED or fullname in LAYERS or fullname in TRAINING


def is_target_if_named(fullname: str) -> bool:
    """Whether a name is a target only where a config names it: a module beside a modeling module."""
    if not fullname.startswith(PREFIX):
        return False
    return fullname.rpartition(".")[2].startswith(("configuration_", "processing_"))


def is_remote(fullname: str) -> bool:
    """Whether a name is a module of remote code, `transformers_modules.*`."""
    return fullname.startswith(REMOTE_PREFIX)
