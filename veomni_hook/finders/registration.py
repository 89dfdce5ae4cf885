"""`register`: patch configs that are added to this process."""

from __future__ import annotations

from types import ModuleType

from veomni_hook.finders import absent_modules, already_imported, late
from veomni_hook.finders.configs import as_configs
from veomni_hook.finders.state import STATE
from veomni_hook.finders.targets import is_target
from veomni_hook.patches.spec import PatchConfig

__all__ = ["register"]


def register(config: PatchConfig | ModuleType | object) -> PatchConfig:
    """Add a patch config to this process; it applies to modules imported from now on.

    Args:
        config: a `PatchConfig` (ours or patchgen's), or a module that holds one as `config`.

    Returns:
        The config as the engine uses it.

    Raises:
        ConfigError: the object is not a patch config and holds none. Under `VEOMNI_STRICT=1` also if the
            config's source module is not installed, which is otherwise a warning.
        AlreadyImportedError: under `VEOMNI_STRICT=1`, a module that the config is for is already imported, a
            warning otherwise. Verbs of a registered config raise or warn, too, if they come too late.
    """
    configs = as_configs(config, where=repr(config))
    absent_modules.report([(added.name, added.source_module) for added in configs], registered=True)
    for added in configs:
        late.report(added)
        late.watch(added)
    STATE.registered = [*STATE.registered, *configs]
    others = [added for added in configs if not is_target(added.source_module)]
    STATE.registered_names |= {added.source_module for added in others if not added.is_pattern}
    STATE.registered_patterns += tuple(added.applies_to for added in others if added.is_pattern)
    already_imported.report(already_imported.modules_of(configs))
    return configs[0]
