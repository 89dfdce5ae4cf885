"""Remote code: transformers makes the spec of an entry module itself, past ``sys.meta_path``.

Applies only where the setting ``remote_code`` is on.
"""

from __future__ import annotations

from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="transformers.dynamic_module_utils",
    description="modules of remote code are loaded through veomni_hook",
)

config.add_import("veomni_hook.finders.remote", ["spec_from_file_location as veomni_spec_from_file_location"])
config.rewrite(
    "get_class_in_module",
    pattern="importlib.util.spec_from_file_location({name}, location={path})",
    replacement="veomni_spec_from_file_location({name}, location={path})",
    description="the spec of a remote module loads its patched form",
)
