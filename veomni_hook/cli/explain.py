"""`veomni-hook explain`: what was patched in a module, why and where, and what was left unchanged."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veomni_hook.cli import output
from veomni_hook.cli.inputs.options import (
    ConfigOption,
    DeviceOption,
    JsonOption,
    TargetArgument,
    facts_of,
    prepared,
)

if TYPE_CHECKING:
    from veomni_hook.finders.prepare import Prepared


def explain(
    target: TargetArgument = None,
    config: ConfigOption = None,
    device: DeviceOption = None,
    *,
    fast: Annotated[
        bool,
        typer.Option(
            "--fast", help="Do not say which kernel each slot gets: finding that out imports torch."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Explain what was patched in a module, where and why, and what was left as it is.

    A slot is a place in the patched code that asks for a kernel. A patch "yields" when a config of yours
    patches the same code. Line numbers are those of the stored file, which tracebacks and `dump` show.
    """
    module = prepared(target, config, device)
    facts = explained(module, select=not fast)
    if as_json:
        output.emit_json(facts)
    else:
        show(facts, _place(module))


def show(facts: dict[str, Any], place: str) -> None:
    """Print what `explained` returns, and where the patched source is."""
    from veomni_hook.patches.coverage import NO_KERNEL, ROUTED

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
    _section("not routed", ("status", "op", "target", "reason"), facts["missed"])
    columns = ("name", "op", "variant", "kernel", "decisions")
    for title, status in (("kernel slots", ROUTED), ("slots without a kernel on any machine", NO_KERNEL)):
        _section(title, columns, [slot for slot in facts["slots"] if slot["status"] == status])
    output.emit_heading("\nleft as installed")
    output.emit_text(f"  {', '.join(facts['untouched']) or 'nothing'}\n")


def explained(module: Prepared, *, select: bool) -> dict[str, Any]:
    """Return everything that `explain` shows about a module as JSON-ready values.

    Args:
        module: the module, patched.
        select: also select the kernel of each slot for this machine, which imports torch.
    """
    from veomni_hook.cli.sites.table import supply

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
    if select and facts["slots"]:
        from veomni_hook.cli.sites.kernel import asked, chosen, detected

        machine, choice = detected(None), chosen()
        for slot in facts["slots"]:
            answer = asked(slot["op"], slot["variant"], choice, machine)
            slot["kernel"] = answer.backend
            slot["decisions"] = [f"{one.backend}: {one.reason}" for one in answer.decisions]
    return facts


def _replaced(module: Prepared) -> list[dict[str, str]]:
    """Classes of the module that transformers' own class mapping replaces, as configs have registered it."""
    from veomni_hook.report.class_mapping import registered_for

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
    from veomni_hook.patches.coverage import missed
    from veomni_hook.settings import resolve

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
