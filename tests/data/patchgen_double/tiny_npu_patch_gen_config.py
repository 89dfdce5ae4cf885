"""NPU patches of the tiny model: the GPU ones' pieces, put together again."""

from patchgen_double import PatchConfig
from patchgen_double.tiny_gpu_patch_gen_config import config as gpu_config
from patchgen_double.tiny_gpu_patch_gen_config import tiny_attention_forward, tiny_dummy_forward

config = PatchConfig(
    source_module="patchgen_double.modeling_tiny",
    target_file="patched_modeling_tiny_npu.py",
)

config.additional_imports.extend(gpu_config.additional_imports)
config.post_import_blocks.extend(gpu_config.post_import_blocks)
config.helpers.extend(gpu_config.helpers)
config.positioned_helpers.extend(gpu_config.positioned_helpers)
config.drop_imported_names.update(gpu_config.drop_imported_names)
config.exclude.extend(gpu_config.exclude)
config.adopt_init_modifications(gpu_config)

config.override_method("TinyAttention.forward", replacement=tiny_attention_forward, description="as on GPU")
config.override_method("TinyModel.dummy_forward", replacement=tiny_dummy_forward)


@config.replace_function("rotate")
def npu_rotate(q, k):
    return "npu", q, k
