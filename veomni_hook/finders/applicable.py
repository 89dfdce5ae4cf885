"""What may apply to a module, judging by its name and by the text of configs: nothing is imported."""

from __future__ import annotations

from collections.abc import Callable

from veomni_hook.finders.config_text import may_be_for
from veomni_hook.finders.state import STATE
from veomni_hook.finders.targets import REMOTE_LOADING, TRAINING, is_remote, is_target
from veomni_hook.finders.upstream import Upstream
from veomni_hook.patches.expert_release import divides_experts
from veomni_hook.patches.models import spec_modules
from veomni_hook.plugins import PATCHES, in_force
from veomni_hook.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from veomni_hook.patches.spec import PatchConfig

__all__ = [
    "asks_idioms",
    "config_names",
    "is_builtin",
    "is_on",
    "may_be_patched",
    "registered_for",
]


def _shares_sequences(settings: Settings) -> bool:
    return settings.axis("sp") > 1


def _divides_experts(settings: Settings) -> bool:
    return settings.axis("ep") > 1 and divides_experts()


#: Whether the settings want a built-in spec, by its name; they want those that are not named here.
_WANTED: dict[str, Callable[[Settings], bool]] = {
    "dynamic_module_utils": lambda settings: settings.remote_code,
    "accelerate_accelerator": _shares_sequences,
    "modeling_utils": lambda settings: _shares_sequences(settings) or bool(settings.memory),
    "modeling_utils_memory": lambda settings: bool(settings.memory),
    "modeling_utils_made": lambda settings: bool(settings.precision) or settings.axis("ep") > 1,
    "trainer": _shares_sequences,
    "trl_trainer": _shares_sequences,
    "accelerate_data_loader": lambda settings: settings.host_values or _shares_sequences(settings),
    "trainer_batches": lambda settings: settings.host_values,
    # In other releases the module that loads models is patched nevertheless, to say which divide experts.
    "modeling_utils_experts": lambda settings: settings.axis("ep") > 1,
    "accelerate_accelerator_experts": _divides_experts,
    "core_model_loading_experts": _divides_experts,
    "trainer_experts": _divides_experts,
}


def may_be_patched(fullname: str, settings: Settings) -> bool:
    """Whether a module can be patched at all."""
    if not settings.enabled:
        return False
    return (
        _holds_model_code(fullname, settings)
        or bool(config_names(fullname, settings))
        or bool(registered_for(fullname))
    )


def asks_idioms(upstream: Upstream, settings: Settings) -> bool:
    """Whether idioms run on a module: it must hold model code that computes with tensors."""
    return _holds_model_code(upstream.module, settings) and (
        upstream.uses_torch or upstream.module == "transformers.configuration_utils"
    )


def config_names(fullname: str, settings: Settings) -> tuple[str, ...]:
    """Names of the config modules to load for a target: built-in specs, settings, entry points."""
    builtin = [name for name in spec_modules(fullname) if is_on(name, settings)]
    announced = (point.value for point in in_force(PATCHES, settings.plugins))
    return (*builtin, *(name for name in (*settings.patches, *announced) if may_be_for(name, fullname)))


def is_on(spec: str, settings: Settings) -> bool:
    """Whether the settings want a built-in spec, by the name of its module."""
    wanted = _WANTED.get(spec.rpartition(".")[2])
    return wanted is None or wanted(settings)


def is_builtin(name: str) -> bool:
    """Whether a config module is a built-in spec, which the engine digest covers."""
    return name.startswith("veomni_hook.")


def registered_for(fullname: str) -> list[PatchConfig]:
    """The configs for a module that were registered in this process."""
    return [config for config in STATE.registered if config.applies_to(fullname)]


def _holds_model_code(fullname: str, settings: Settings) -> bool:
    known = is_target(fullname) and fullname != REMOTE_LOADING and fullname not in TRAINING
    return settings.idioms and (known or is_remote(fullname))
