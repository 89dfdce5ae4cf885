"""Made for patchgen, with four mistakes that patchgen accepts."""

from patchgen.patch_spec import PatchConfig, create_patch_from_external

config = PatchConfig(
    source_module="transformers.models.tiny.modeling_tiny", target_file="patched_modeling_tiny_gpu.py"
)
config.drop_import_names("nowhere_imported")
config.add_import("..plan", names=["plan as imported_plan"])
config.add_post_import_block(
    """
    from ..plan import plan as block_plan
    """
)
config.patches.append(create_patch_from_external("TinyModel", "not_installed.models", "Model"))


@config.override_method("TinyNorm.forward", name_map={"Nothing": "Else"})
def forward(self, x, *, scale=None):
    from ..plan import plan

    return [x + 200, plan(), block_plan(), imported_plan()]  # noqa: F821


@config.modify_init("TinyNorm", "a description, as patchgen takes it")
def init(original_init, self, *args, **kwargs):
    original_init(self, *args, **kwargs)
    self.modified = True
