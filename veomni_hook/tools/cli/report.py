"""`veomni-hook report`: one HTML page with what is patched in models, why, and which kernels run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.options import (
    ConfigOption,
    DeviceOption,
    SystemOption,
    device_on,
    families_argument,
    prepared,
)
from veomni_hook.tools.cli.inputs.targets import family_of
from veomni_hook.tools.cli.usage import UsageError, write_file

if TYPE_CHECKING:
    from veomni_hook.finders.prepare import Prepared
    from veomni_hook.kernels.selection.choice import Choice
    from veomni_hook.kernels.selection.system import System
    from veomni_hook.tools.report.benchmarks import Chart
    from veomni_hook.tools.report.model import Answer, Module, Place

STDOUT = Path("-")
CPU = "cpu"


def report(
    targets: Annotated[
        list[str] | None,
        families_argument(
            "Families (qwen3), or modules (transformers.models.qwen3.modeling_qwen3).", "[TARGET]..."
        ),
    ] = None,
    file: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The page; - writes it to stdout.")
    ] = Path("report.html"),
    config: ConfigOption = None,
    device: DeviceOption = None,
    system: SystemOption = None,
    *,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write an HTML page about the patches of models: one file that needs no network.

    The page shows upstream's source beside the patched source with the reason of each patch, the kernel that
    each place gets on this machine and why, and what was not routed. Recorded benchmarks are on it when the
    command runs from a checkout. Models are not imported.

    For what really ran in a model, call `veomni_hook.explain(model).to_html("report.html")`.
    """
    from veomni_hook.settings import resolve
    from veomni_hook.tools.cli.sites.kernel import chosen, machine
    from veomni_hook.tools.report.whole import whole

    if open_ and file == STDOUT:
        raise UsageError(
            "a page on stdout cannot be opened", where="veomni-hook report", fix="name a file with --output"
        )
    choice = chosen()
    names: list[str | None] = [*dict.fromkeys(targets or ())] or [None]
    patched = [prepared(target, config, device or device_on(system)) for target in names]
    place = machine(system)
    answers = _answers(choice, place)
    idioms = config is None and resolve().settings.idioms
    modules = [_module(one, answers, idioms=idioms) for one in patched]
    labels = ", ".join(module.label for module in modules)
    lead = f"Kernels are chosen for: {place}; kernels = {choice}."
    page = whole(f"{labels}: patches and kernels", lead, modules, charts=_charts(modules, place))
    if file == STDOUT:
        output.emit(page)
        return
    write_file(file, page, "the page")
    output.note(f"wrote {file}")
    if open_:
        import webbrowser

        if not webbrowser.open(file.resolve().as_uri()):
            output.warn(f"no browser was found; open {file.resolve()} in one")


def _answers(choice: Choice, system: System) -> Callable[[Place], list[Answer]]:
    from veomni_hook.tools.cli.sites.kernel import asked
    from veomni_hook.tools.report.model import Answer

    @cache
    def answer(op: str, variant: str) -> Answer:
        first = asked(op, variant, choice, system)
        others = tuple((one.backend, one.reason) for one in first.decisions)
        return Answer(first.backend, first.reason, others=others)

    return lambda place: [answer(place.op, place.variant)]


def _module(patched: Prepared, answers: Callable[[Place], Sequence[Answer]], *, idioms: bool) -> Module:
    """The page's content for a module; ``idioms``: whether idioms ran on it."""
    from veomni_hook.patches.report import MissedSite
    from veomni_hook.tools.cli.explain import explained
    from veomni_hook.tools.report.gather import gathered, unpatched

    label = family_of(patched.module)
    if patched.report is not None:
        texts = patched.original, patched.stored_text
        return gathered(label, *texts, patched.report, patched.patch_hash, answers, examined=idioms)
    facts = explained(patched)
    unrouted = [MissedSite(**site) for site in facts["missed"]]
    version = f"{facts['distribution']} {facts['version']}"
    reason = f"Upstream's code runs unchanged: {patched.reason}."
    return unpatched(patched.module, label, version, reason, unrouted=unrouted if idioms else None)


def _charts(modules: Sequence[Module], system: System) -> list[Chart]:
    """Recorded benchmarks for the ops on the page; none outside a checkout."""
    from veomni_hook.tools.report.benchmarks import charts, results_folder

    folder = results_folder()
    if folder is None:
        return []
    ops = {place.op for module in modules for place in module.places}
    try:
        return charts(folder, ops, {module.label for module in modules}, cpu=system.device == CPU)
    except (OSError, ValueError, KeyError) as error:
        output.warn(f"the recorded benchmarks in {folder} are left out: {error}")
        return []
