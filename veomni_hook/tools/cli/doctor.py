"""`veomni-hook doctor`: show the environment, the settings, and anything that blocks the hook.

A problem (the hook cannot work as requested) makes the exit status 1; a hazard is only worth knowing. The
sections are independent: a section that fails is itself a finding and does not stop the report.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from veomni_hook.errors import VeomniHookError
from veomni_hook.layout import counted
from veomni_hook.releases import SUPPORTED, installed, newer_than_tested
from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.options import JsonOption, OutputOption
from veomni_hook.tools.cli.usage import FOUND, UsageError
from veomni_hook.tools.facts import Facts

if TYPE_CHECKING:
    from veomni_hook.settings import Resolved, Settings

REQUIRED = ("transformers", "torch")
DISTRIBUTIONS = (*REQUIRED, "triton", "liger-kernel", "torch_npu", "accelerate", "kernels")
LABELS = {"beat": "instead of"}


@dataclass
class Findings:
    """What the sections report in addition to their fields."""

    problems: list[str] = field(default_factory=list)
    hazards: list[str] = field(default_factory=list)


def doctor(
    file: OutputOption = None,
    *,
    fast: Annotated[
        bool, typer.Option("--fast", help="Import neither torch nor configs; skip what needs them.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Report versions, the hook, settings, cache, configs and hardware, and problems with them.

    A problem keeps the hook from working as asked. A hazard is something to know about. Exits with 1 if there
    is a problem.
    """
    findings = Findings()
    resolved = _resolved(findings)
    sections: Facts = {
        "versions": versions(findings),
        "hook": hook(findings, resolved.settings),
        "settings": settings_fields(resolved),
        "cache": cache(findings, resolved.settings),
        "specs": specs(findings, resolved.settings, load=not fast),
    }
    if not fast:
        sections["hardware"] = hardware(findings)
    sections["plugins"] = installed_plugins(findings, resolved.settings)
    if as_json:
        output.emit_json({**sections, "problems": findings.problems, "hazards": findings.hazards})
    else:
        show(sections, findings)
    if findings.problems:
        raise typer.Exit(FOUND)


def versions(findings: Findings) -> dict[str, object]:
    """Return the versions of Python and of all relevant distributions, without importing any."""
    import platform

    from veomni_hook import __version__

    by_name: dict[str, object] = {
        "veomni-hook": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
    }
    for name in DISTRIBUTIONS:
        by_name[name] = installed(name)
        if by_name[name] is None and name in REQUIRED:
            findings.problems.append(f"{name} is not installed; fix: pip install {name}")
    transformers = by_name["transformers"]
    if isinstance(transformers, str) and not supported(transformers):
        low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
        wanted = f"transformers>={low},<{high}"
        findings.problems.append(f"transformers {transformers} is not {wanted}; fix: pip install '{wanted}'")
    elif told := newer_than_tested({name: str(by_name[name]) for name in REQUIRED if by_name[name]}):
        findings.hazards.append(told)
    return by_name


def supported(version: str) -> bool:
    """Whether a transformers version is in the supported range."""
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return SUPPORTED[0] <= parts < SUPPORTED[1]


def hook(findings: Findings, settings: Settings) -> dict[str, object]:
    """Return whether the hook is active in a Python started here, and note anything that blocks it."""
    from veomni_hook.finders.bypassed import finders_ahead
    from veomni_hook.finders.children import BOOTSTRAP
    from veomni_hook.finders.state import STATE
    from veomni_hook.finders.targets import is_target

    if not settings.enabled:
        findings.hazards.append("the hook is switched off by its settings; fix: set VEOMNI_HOOK=1")
    finders = [f.__name__ if isinstance(f, type) else type(f).__name__ for f in sys.meta_path]
    if ahead := finders_ahead():
        findings.hazards.append(
            f"import hooks ahead of ours: {', '.join(ahead)}; a modeling module that one of them loads "
            "stays unpatched. Fix: activate veomni_hook after them"
        )
    early = sorted(name for name in sys.modules if is_target(name))
    if early:
        findings.hazards.append(f"imported before a script can activate the hook: {', '.join(early)}")
    _note_unreadable(findings)
    return {
        "active here": bool(STATE.handles),
        "children activate": BOOTSTRAP in os.environ.get("PYTHONPATH", "").split(os.pathsep),
        "import hooks": finders,
    }


def _note_unreadable(findings: Findings) -> None:
    """Look at one modeling module as the hook would: can its source be found and read?"""
    from veomni_hook.finders.upstream import read_upstream
    from veomni_hook.locate import locate
    from veomni_hook.tools.cli.inputs.targets import MODELS, families, transformers_folder

    try:
        folder, known = transformers_folder(), families()
    except UsageError:
        return  # the versions section reports it as a problem
    except OSError as error:
        findings.problems.append(f"transformers' model sources cannot be listed: {error}")
        return
    family, files = next(iter(known.items()), ("", ()))
    spec = locate(f"{MODELS}.{family}.{files[0]}") if files else None
    reason = f"no modeling sources in {folder}" if spec is None else read_upstream(spec.name, spec)[1]
    if reason:
        findings.problems.append(f"{reason}; fix: install transformers from a wheel, as source files")


def settings_fields(resolved: Resolved) -> list[dict[str, object]]:
    """Return each setting with its value, the source of the value, and the values that it overrides."""
    return [
        {
            "setting": name,
            "value": origin.value,
            "from": origin.source,
            "beat": [f"{value!r} ({source})" for source, value in origin.beaten],
        }
        for name, origin in resolved.provenance.items()
    ]


def cache(findings: Findings, settings: Settings) -> dict[str, object]:
    """Return where the cache is, how it is used, and what it holds."""
    from veomni_hook.cache.store import open_store
    from veomni_hook.tools.cli.cache.command import readable_size

    try:
        summary = open_store(settings.cache_dir).info()
    except VeomniHookError as error:
        findings.problems.append(_one_line(error))
        return {"location": settings.cache_dir}
    if summary.reason:
        findings.hazards.append(f"the cache is not used as configured: {summary.reason}")
    return {
        "location": summary.root or None,
        "mode": summary.mode,
        "writable": summary.writable,
        "size": readable_size(summary.size),
        "patched modules": len(summary.entries),
        "damaged": summary.damaged,
    }


def specs(findings: Findings, settings: Settings, *, load: bool) -> list[dict[str, object]]:
    """Return every config module with its origin and, if loaded, the modules that it patches."""
    from veomni_hook.finders.absent_modules import problem
    from veomni_hook.finders.configs import PluginError
    from veomni_hook.patches.routes.config import NAME
    from veomni_hook.plugins import note_failure
    from veomni_hook.tools.cli.inputs.configs import BUILT_IN, load_sources, names
    from veomni_hook.tools.cli.inputs.options import import_from_here

    import_from_here()
    named = names(settings)
    # Built-in specs are plain data; other configs may import torch.
    loaded = {s.name: s for s in load_sources([one for one in named if load or one[0] == BUILT_IN])}
    rows: list[dict[str, object]] = []
    for origin, name in named:
        source = loaded.get(name)
        modules = [config.source_module for config in source.configs] if source else None
        rows.append({"config": name, "from": origin, "patches": modules})
        if source is not None and source.error is not None:
            findings.problems.append(_one_line(source.error))
            if isinstance(source.error, PluginError):
                note_failure(source.error.point, source.error.what)
        for config in source.configs if source is not None and origin != BUILT_IN else ():
            if why := problem(config.source_module):
                findings.problems.append(f"the config {config.name} patches nothing: {why}")
    if settings.idioms:
        rows.insert(0, {"config": NAME, "from": BUILT_IN, "patches": ["every modeling module"]})
    return rows


def hardware(findings: Findings) -> dict[str, object]:
    """Return the system that kernels are selected for, and each op's kernels by formula."""
    from veomni_hook.kernels.selection.registry import registry
    from veomni_hook.tools.cli.sites.kernel import asked, chosen, detected

    try:
        system = detected()
    except ImportError as error:
        findings.problems.append(f"torch cannot be imported: {error}")
        return {"system": None}
    fields: dict[str, object] = {"system": str(system)}
    try:
        choice = chosen()
        for op in registry.ops().values():
            backends = Counter(asked(op.name, name, choice, system).backend for name in op.variants)
            formulas = counted(len(op.variants), "formula")
            fields[op.name] = [f"{backend} for {count} of {formulas}" for backend, count in backends.items()]
    except VeomniHookError as error:
        findings.problems.append(_one_line(error))
    return fields


def installed_plugins(findings: Findings, settings: Settings) -> list[dict[str, object]]:
    """Return what installed distributions announce, and whether it is in force or why not."""
    from veomni_hook import plugins

    for name, reason in plugins.unreadable().items():
        findings.hazards.append(f"the entry points of {name} cannot be read: {reason}")
    for name in plugins.unknown_names(settings.plugins):
        findings.problems.append(
            f"the setting `plugins` names {name}: no installed package or entry point; fix: correct the name"
        )
    return [
        {
            "plugin": point.name,
            "distribution": plugins.distribution(point),
            "announces": point.value,
            "group": group,
            "state": plugins.state_of(point, settings.plugins) or "in force",
        }
        for group in (plugins.PATCHES, plugins.KERNELS)
        for point in plugins.announced(group)
    ]


def _resolved(findings: Findings) -> Resolved:
    from veomni_hook import plugins
    from veomni_hook.settings import resolve

    try:
        resolved = resolve()
    except VeomniHookError as error:
        findings.problems.append(_one_line(error))
        resolved = resolve(environ={}, start_dir=os.sep)
    # Not strict: one that fails is a finding, and the report goes on.
    plugins.choose(resolved.settings.plugins, strict=False)
    for name in resolved.unknown_environment:
        findings.hazards.append(f"{name} is set, but no setting has that name")
    findings.hazards.extend(f"a settings file is ignored: {reason}" for reason in resolved.ignored)
    return resolved


def _one_line(error: VeomniHookError) -> str:
    return f"{error.what} ({error.where}); fix: {error.fix}"


def show(sections: Facts, findings: Findings) -> None:
    """Print the sections and findings for a reader."""
    for name, content in sections.items():
        output.emit_heading(name)
        if isinstance(content, dict):
            output.emit_fields(content)
        elif content:
            headers = [LABELS.get(name, name) for name in content[0]]
            output.emit_table(headers, [[*row.values()] for row in content])
        else:
            output.emit("  none\n")
        output.emit("\n")
    for label, lines in (("problems", findings.problems), ("hazards", findings.hazards)):
        output.emit_heading(label)
        output.emit_text("".join(f"  - {line}\n" for line in lines) or "  none\n")
