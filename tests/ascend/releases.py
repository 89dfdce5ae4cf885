"""Which releases of torch_npu have operators that take the calls of which kernels: a table in `docs/maintain/ascend.md`.

``python -m tests.ascend.releases`` runs every kernel of the backend `npu` once on the double, forward and backward,
notes its calls, compares each with the schema of every release in `schemas.json`, and writes the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from tests.ascend import double
from tests.ascend.extract import RELEASES, schema_of
from tests.ascend.wheel import ROOT
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.shared import ascend

DOCUMENT = ROOT / "docs" / "maintain" / "ascend.md"
BEGIN, END = "<!-- written by python -m tests.ascend.releases -->\n", "<!-- end -->\n"


class Call(NamedTuple):
    """A call of an operator, as a kernel writes it."""

    operator: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def noted() -> Iterator[list[Call]]:
    """Note the calls of operators."""
    found: list[Call] = []
    call = ascend.call

    def note(operator: str, *args: Any, **kwargs: Any) -> Any:
        found.append(Call(operator, args, kwargs))
        return call(operator, *args, **kwargs)

    ascend.call = note
    try:
        yield found
    finally:
        ascend.call = call


def calls() -> dict[str, list[Call]]:
    """Return the calls of every op's kernels, both ways; of those that call no operator, nothing."""
    from tests.ascend.samples import SAMPLES

    double.install()
    found: dict[str, list[Call]] = {}
    for op, run in SAMPLES.items():
        with noted() as made:
            run()
        found[op] = made
    return found


def fits(call: Call, schema: str | None) -> str | None:
    """Return why an operator of this schema does not take a call, or None."""
    if schema is None:
        return f"no {call.operator}"
    parsed = torch._C.parse_schema(f"npu::{schema}")
    positional = [each for each in parsed.arguments if not each.kwarg_only]
    if len(call.args) > len(positional):
        return f"{call.operator} takes {len(positional)} arguments by position, not {len(call.args)}"
    given = {each.name: value for each, value in zip(positional, call.args, strict=False)}
    known = {each.name: each for each in parsed.arguments}
    for name, value in call.kwargs.items():
        if name not in known or name in given:
            return f"{call.operator} takes no {name}"
        given[name] = value
    for argument in parsed.arguments:
        if argument.name not in given:
            if not argument.has_default_value():
                return f"{call.operator} needs {argument.name}"
        elif not _is(given[argument.name], str(argument.type)):
            return f"{call.operator}: {argument.name} is {argument.type}, not {type(given[argument.name]).__name__}"
    return None


def _is(value: Any, kind: str) -> bool:
    """Whether a value is of the kind that TorchScript names so."""
    if kind.startswith("Optional["):
        return value is None or _is(value, kind[len("Optional[") : -1])
    if kind.startswith("List["):
        return isinstance(value, (list, tuple)) and all(_is(each, kind[5:-1]) for each in value)
    known = {"Tensor": torch.Tensor, "int": int, "float": (float, int), "bool": bool, "str": str}
    if isinstance(value, bool):
        return kind == "bool"
    return kind in known and isinstance(value, known[kind])


def supported(release: str) -> dict[str, list[str]]:
    """Return, by op, why a release does not take its kernels' calls; nothing: it does."""
    return {
        op: sorted({why for call in made if (why := fits(call, schema_of(call.operator, release)))})
        for op, made in calls().items()
    }


def table() -> str:
    """Return the table as Markdown."""
    made = calls()
    lines = ["| op | operators | " + " | ".join(RELEASES) + " |", "|---" * (len(RELEASES) + 2) + "|"]
    for op, notes in made.items():
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(call.operator for call in notes))
        cells = []
        for release in RELEASES:
            reasons = {why for call in notes if (why := fits(call, schema_of(call.operator, release)))}
            cells.append("; ".join(sorted(reasons)) or "yes")
        lines.append(f"| `{op}` | {names or 'none: PyTorch'} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def written(document: str) -> str:
    """Return the document with the table anew."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


def main() -> None:
    assert set(calls()) == set(registry.preset("npu")), "an op of the backend has no sample"
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
