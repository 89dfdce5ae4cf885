"""`veomni-hook explain`: what was patched in a module, and why; and the kernels of a module or an op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.options import (
    ConfigOption,
    DeviceOption,
    JsonOption,
    OutputOption,
    SystemOption,
    device_on,
    facts_of,
    prepared,
)
from veomni_hook.tools.cli.inputs.targets import complete_family
from veomni_hook.tools.cli.usage import UsageError

if TYPE_CHECKING:
    from veomni_hook.finders.prepare import Prepared
    from veomni_hook.kernels.selection.system import System


def complete_target(incomplete: str) -> list[str]:
    """Complete a family, a module or an op for the shell."""
    from veomni_hook.kernels.selection.registry import registry

    return complete_family(incomplete) + [op for op in registry.ops() if op.startswith(incomplete)]


def explain(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="A family (qwen3), a module, a class, a model's id (Qwen/Qwen3-0.6B) or its folder; or an op"
            " (rms_norm). Default: all ops.",
            autocompletion=complete_target,
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
    device: DeviceOption = None,
    system: SystemOption = None,
    file: OutputOption = None,
    *,
    fast: Annotated[
        bool,
        typer.Option(
            "--fast",
            help="Do not say which kernel each slot gets: to find that out, a torch for GPUs is imported.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Explain what was patched in a module, where and why, and which kernels run; or the kernels of an op.

    A slot is a place in the patched code that asks for a kernel. A patch "yields" when a config of yours
    patches the same code. Line numbers are those of the stored file, which tracebacks and `dump` show.

    Of an op, or of all without TARGET: every kernel, and which one each formula gets on this machine with the
    present settings, and why. What depends on a call (dtype, shapes, hooks) is decided at that call:
    `veomni_hook.explain(model)` shows it.
    """
    from veomni_hook.tools.cli import kernels
    from veomni_hook.tools.cli.sites.kernel import chosen, machine

    choice = chosen()  # before torch is imported, to report an invalid choice at once
    if config is None and (target is None or kernels.is_op(target)):
        if device or fast:
            fix = "name a family (qwen3); --system chooses another machine"
            raise UsageError("--device and --fast are about a module", where="veomni-hook explain", fix=fix)
        kernels.tell(target, choice, machine(system), as_json=as_json)
        return
    module = prepared(target, config, device or device_on(system))
    facts = explained(module, None if fast else lambda: machine(system))
    if as_json:
        output.emit_json(facts)
    else:
        show(facts, _place(module))


def show(facts: dict[str, Any], place: str) -> None:
    """Print what `explained` returns, and where the patched source is."""
    from veomni_hook.patches.reasons import remedies
    from veomni_hook.tools.coverage import NO_KERNEL, ROUTED

    output.emit_heading(f"{facts['module']} ({facts['distribution']} {facts['version']})")
    output.emit_fields({"source": facts["source"], "patched": place, "hash": facts["patch_hash"] or None})
    patches = [patch for patch in facts["applied"] if patch["kind"] != "slot"]
    _section("applied", ("lines", "kind", "target", "reason", "config"), patches)
    _section(
        "replaced by transformers' class mapping",
        ("class", "registered", "replacement"),
        facts["class_mapping"],
    )
    _section("yielded", ("kind", "target", "reason", "config"), facts["yielded"])
    _section("not routed", ("status", "op", "target", "code", "reason"), facts["missed"])
    known = remedies(site["code"] for site in facts["missed"])
    told = [{"code": code, "remedy": remedy} for code, remedy in known]
    _section("what can be done about a code", ("code", "remedy"), told)
    columns = ("name", "op", "variant", "kernel", "decisions")
    for title, status in (("kernel slots", ROUTED), ("slots without a kernel on any machine", NO_KERNEL)):
        _section(title, columns, [slot for slot in facts["slots"] if slot["status"] == status])
    output.emit_heading("\nleft as installed")
    output.emit_text(f"  {', '.join(facts['untouched']) or 'nothing'}\n")


def explained(module: Prepared, place: Callable[[], System] | None = None) -> dict[str, Any]:
    """Return everything that `explain` shows about a module as JSON-ready values.

    Args:
        module: the module, patched.
        place: finds the system for which the kernel of each slot is selected; None: none is.
    """
    from veomni_hook.tools.cli.sites.table import supply

    facts = facts_of(module)
    facts["class_mapping"] = _replaced(module)
    if module.report is None:
        distribution = module.module.partition(".")[0]
        facts.update(
            distribution=distribution, version=_version(distribution), untouched=_definitions(module)
        )
        return {**facts, "applied": [], "yielded": [], "slots": [], "missed": _missed(module)}
    facts.update(module.report.to_dict())
    for slot in facts["slots"]:
        slot["status"], _ = supply(slot["op"], slot["variant"])
    if place is not None and facts["slots"]:
        from veomni_hook.tools.cli.sites.kernel import asked, chosen

        system, choice = place(), chosen()
        for slot in facts["slots"]:
            answer = asked(slot["op"], slot["variant"], choice, system)
            slot["kernel"] = answer.backend
            slot["decisions"] = [f"{one.backend}: {one.reason}" for one in answer.decisions]
    return facts


def _replaced(module: Prepared) -> list[dict[str, str]]:
    """Classes of the module that transformers' own class mapping replaces, as configs have registered it."""
    from veomni_hook.tools.report.class_mapping import registered_for

    found = registered_for(_definitions(module))
    return [{"class": name, "registered": by, "replacement": new} for name, by, new in found]


def _version(distribution: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return "of unknown version"


def _definitions(module: Prepared) -> list[str]:
    import ast

    defined = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node.name for node in ast.parse(module.original).body if isinstance(node, defined)]


def _missed(module: Prepared) -> list[dict[str, str]]:
    """Code that looks like an op in a module that nothing applies to; empty if idioms are disabled."""
    from veomni_hook.settings import resolve
    from veomni_hook.tools.coverage import missed

    if not resolve().settings.idioms:
        return []
    return [asdict(site) for site in missed(module.module, module.original)]


def _place(module: Prepared) -> str:
    if module.patched is None:
        return f"no: {module.reason}"
    if module.stored_path is not None:
        return f"{module.stored_path} (cache {module.cache})"
    return f"in memory only: {module.reason}" if module.reason else "in memory only"


def _section(title: str, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    output.emit_heading(f"\n{title}")
    shown = [column for column in columns if any(column in row for row in rows)]
    output.emit_table(shown, [[_cell(row, column) for column in shown] for row in rows])


def _cell(row: dict[str, Any], column: str) -> object:
    if column == "lines":
        return "-".join(map(str, row[column]))
    return "; ".join(row[column]) if column == "decisions" else row.get(column)
