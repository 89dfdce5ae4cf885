"""Every patch config known in this environment, and its origin; a config that fails is a result too."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass

from veomni_hook.errors import VeomniHookError
from veomni_hook.finders.applicable import is_on
from veomni_hook.finders.configs import load, points_in_force
from veomni_hook.finders.targets import TRAINING
from veomni_hook.locate import locate
from veomni_hook.patches import models
from veomni_hook.patches.spec import PatchConfig
from veomni_hook.plugins import distribution
from veomni_hook.settings import ALL, Settings
from veomni_hook.tools.cli.inputs.sources import source_tree
from veomni_hook.tools.cli.usage import UsageError
from veomni_hook.tools.migration.written import beside

BUILT_IN = "built-in"
SETTINGS = "settings"
ENTRY_POINT = "entry point"
OPTION = "--config"


@dataclass(frozen=True)
class Source:
    """One config module.

    Attributes:
        origin: where it was named: `built-in`, `settings`, `entry point of` a distribution, or `--config`.
        name: the module's name, with `:attribute` if one was given.
        configs: its configs; empty when it cannot be loaded.
        error: why it cannot be loaded, or None.
    """

    origin: str
    name: str
    configs: tuple[PatchConfig, ...] = ()
    error: VeomniHookError | None = None


def names(settings: Settings) -> list[tuple[str, str]]:
    """Return (origin, name) of every config module that the settings want, without loading one."""
    return [
        *((BUILT_IN, name) for name in models.all_spec_modules() if is_on(name, settings)),
        *((SETTINGS, name) for name in settings.patches),
        *(
            (f"{ENTRY_POINT} of {distribution(point)}", name)
            for name, point in points_in_force(settings.plugins).items()
        ),
    ]


def load_sources(named: Sequence[tuple[str, str]]) -> list[Source]:
    """Load config modules; a failure is returned with the results of the others.

    What their packages print while they are imported goes to stderr: stdout is for the result.
    """
    sources = []
    with redirect_stdout(sys.stderr):
        for origin, name in named:
            points = points_in_force(ALL) if origin.startswith(ENTRY_POINT) else {}
            try:
                (loaded,) = load([name], points)
            except VeomniHookError as error:
                sources.append(Source(origin, name, error=_with_release(name, error)))
            else:
                sources.append(Source(origin, name, loaded.configs))
    return sources


def load_all(named: Sequence[tuple[str, str]]) -> list[Source]:
    """Load config modules; raise the error of the first that cannot be loaded."""
    sources = load_sources(named)
    for source in sources:
        if source.error is not None:
            raise source.error
    return sources


def modules_of(configs: Iterable[PatchConfig]) -> list[str]:
    """Return the modules that configs name, each once; for a pattern, the installed modules that match."""
    listed = list(configs)
    named = [config.source_module for config in listed if not config.is_pattern]
    patterns = [config for config in listed if config.is_pattern]
    if patterns:
        tree = source_tree()
        known = [*tree.files(), *tree.beside(), *TRAINING]
        named += [module for module in known if any(config.applies_to(module) for config in patterns)]
    return [*dict.fromkeys(named)]


def _with_release(name: str, error: VeomniHookError) -> VeomniHookError:
    """The error of a config that cannot be loaded, with the release it was made for if it is another one."""
    spec = locate(name.partition(":")[0])
    release = beside(spec.origin) if spec is not None and spec.origin else ""
    try:
        installed = source_tree().version
    except UsageError:
        installed = "none"
    if release and release != installed:
        error.where += f"; made for transformers {release}, and {installed} is installed"
    return error
