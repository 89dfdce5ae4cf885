"""`generate`: the patched source of a module as text, as `veomni-hook dump` prints it.

A comment at the top has the command that makes the text again. Nothing in it depends on the machine or the
day.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from veomni_hook.errors import ConfigError
from veomni_hook.finders.configs import load
from veomni_hook.finders.prepare import Prepared, prepare
from veomni_hook.finders.settings_in_force import current_settings
from veomni_hook.patches.adopt import adopt
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.imports import absolute_imports
from veomni_hook.patches.render import MADE_BY, dump_text, made_by, with_header
from veomni_hook.settings import ENVIRONMENT, Settings
from veomni_hook.tools.generation.standalone import UPSTREAM, stays, without_guards

if TYPE_CHECKING:
    from veomni_hook.patches.spec import PatchConfig

__all__ = ["Recipe", "generate"]

#: The settings that decide what is in the text, with those that also do in a file without this package.
_ALONE = ("patches", "plugins", "idioms")
_SHAPING = (*_ALONE, "parallel", "speech", "kernels")
_MADE = re.compile(rf"^{re.escape(MADE_BY)}(?P<command>.+?)\r?$", re.MULTILINE)
_VARIABLE = re.compile(r"(?P<name>VEOMNI_[A-Z_]+)=")


def generate(
    what: str | PatchConfig, *, device: Literal["gpu", "npu"] | None = None, standalone: bool = False
) -> str:
    """Return the patched source of a module, as `veomni-hook dump` prints it.

    Neither the module nor torch is imported, unless a config does so.

    Args:
        what: a module's name (``transformers.models.qwen3.modeling_qwen3``), to patch it as an import would
            with the settings in force; or a config, to apply it alone to its module.
        device: apply the configs for this kind of accelerator; by default those for this machine's.
        standalone: make a text that runs where this package is not installed: without guards, with the
            formulas of kernels as functions.

    Returns:
        The text, with absolute imports. If nothing applies, it is the installed source.

    Raises:
        ConfigError: the module cannot be read, the config is for several modules, or the text cannot do
            without this package.
        PatchError: a patch does not apply.
    """
    settings = current_settings()
    if isinstance(what, str):
        return Recipe(what, device=device, standalone=standalone).made(settings)[1]
    config = adopt(what)
    if config.is_pattern:
        raise ConfigError(
            f"{config.name} is for every module that {config.source_module} matches",
            where=f"declared at {config.origin}",
            fix="name it in the settings, and generate one module after the other",
        )
    recipe = Recipe(config.source_module, config.name, device or config.device, standalone)
    return recipe.made(settings, [config])[1]


@dataclass(frozen=True)
class Recipe:
    """How a text is made.

    Attributes:
        module: the module's name.
        config: the config that is applied alone; empty: what an import would apply.
        device: whose configs are applied; None: the settings say it.
        standalone: whether it does without this package.
        variables: what the settings that count were, as environment variables; only of a text that was read.
    """

    module: str
    config: str = ""
    device: str | None = None
    standalone: bool = False
    variables: tuple[str, ...] = ()

    def command(self, settings: Settings) -> str:
        """The command that makes the text, on a machine with another device, too."""
        words = [*self.variables_of(settings), "veomni-hook", "dump", self.module]
        words += ["--config", self.config] if self.config else []
        words += ["--device", self.device or settings.device_kind()]
        words += ["--standalone"] if self.standalone else []
        return shlex.join(words)

    def variables_of(self, settings: Settings) -> tuple[str, ...]:
        """The settings that count for the text and are not the defaults, as environment variables."""
        if self.config:
            return ()
        named = _ALONE if self.standalone else _SHAPING
        values = {name: getattr(settings, name) for name in named}
        usual = Settings()
        changed = {name: value for name, value in values.items() if value != getattr(usual, name)}
        return tuple(f"{ENVIRONMENT[name]}={_said(value)}" for name, value in changed.items())

    def made(self, settings: Settings, configs: Sequence[PatchConfig] | None = None) -> tuple[Prepared, str]:
        """Patch the module, and return it with the text.

        ``configs`` are those that ``config`` names, if they are at hand.
        """
        if self.config and configs is None:
            (loaded,) = load([self.config])
            configs = loaded.configs
        left = stays if self.standalone and configs is None else None
        found = prepare(self.module, settings, configs=configs, device=self.device, left=left)
        if found.patched is None:
            return found, dump_text(found.stored_text, self.module)
        command = self.command(settings)
        if not self.standalone:
            return found, made_by(dump_text(found.stored_text, self.module), command)
        absolute = absolute_imports(Document(found.patched.text, self.module), self.module)
        text = without_guards(absolute, found.patched.report.slots, self.module)
        upstream = tuple(site for site in found.patched.report.missed if site.reason == UPSTREAM)
        report = replace(found.patched.report, missed=upstream)
        patched = replace(found.patched, text=text, report=report)
        return found, made_by(with_header(patched, found.patch_hash, standalone=True), command)

    @classmethod
    def of(cls, text: str) -> Recipe | None:
        """Read the recipe of a text; None if it has none."""
        match = _MADE.search(text)
        words = shlex.split(match["command"]) if match else []
        variables = tuple(word for word in words if _VARIABLE.match(word))
        words = words[len(variables) :]
        if words[:2] != ["veomni-hook", "dump"] or len(words) < 3:
            return None
        options = dict(zip(words, [*words[1:], ""], strict=True))
        return cls(
            words[2],
            options.get("--config", ""),
            options.get("--device"),
            "--standalone" in options,
            variables,
        )


def _said(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(int(value)) if isinstance(value, bool) else str(value)
