"""A reduced config as the text of a Python file.

Replacements are imported from the original config module: the file stays short, and shows what is kept and
why. Only a function with relative imports is copied, with these made absolute, because they are relative to
the folder for which patchgen generates files.
"""

from __future__ import annotations

import ast
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from veomni_hook.patches.code.imports import absolute_imports
from veomni_hook.patches.code.snippet import read_snippet
from veomni_hook.patches.spec import ImportSpec, Patch, PatchType
from veomni_hook.tools.facts import Facts
from veomni_hook.tools.migration.reduce import COVERED, KEPT, LEFT_OUT, Explained, Reduced

__all__ = ["emit"]

_VERBS = {
    PatchType.CLASS_REPLACEMENT: "replace_class",
    PatchType.FUNCTION_REPLACEMENT: "replace_function",
    PatchType.METHOD_OVERRIDE: "override_method",
    PatchType.METHOD_ADDITION: "add_method",
    PatchType.INIT_MODIFICATION: "modify_init",
}
#: A module in the folder for which patchgen generates files, as relative imports see it.
_GENERATED = "generated.module"
_WIDTH = 110


def emit(reduced: Reduced, *, release: str, written_for: str) -> str:
    """Return the text of a config module with the kept patches.

    Args:
        reduced: the reduced config.
        release: the release that it was reduced for.
        written_for: the release that the original was made for.

    Raises:
        ReplacementError: the source of a replacement cannot be read.
    """
    names = _Names()
    body = [*_head(reduced, written_for), *_surroundings(reduced, names)]
    kept = [one for one in reduced.explained if one.outcome == KEPT]
    for patch, explained in zip(reduced.patches, kept, strict=True):
        lines = list(_patch(patch, explained, reduced, names))
        body += ["", *([""] if lines[-1].endswith("\n") else []), *lines]
    future = ["from __future__ import annotations", ""] if names.copied else []
    external = [patch for patch in reduced.patches if patch.replacement is None]
    ours = "PatchConfig, create_patch_from_external" if external else "PatchConfig"
    kinds = any(patch.patch_type is not PatchType.CLASS_REPLACEMENT for patch in external)
    parts = [
        *_docstring(reduced, release, written_for),
        "",
        *future,
        *names.lines(),
        f"from veomni_hook import {ours}",
        *(["from veomni_hook.patches.spec import PatchType"] if kinds else []),
        "",
        *body,
    ]
    return "\n".join(parts) + "\n"


class _Names:
    """The names under which the file imports objects of the original's modules."""

    def __init__(self) -> None:
        self._taken: Facts = {"config": None, "PatchConfig": None}
        self._imports: dict[str, list[str]] = {}
        self.copied = False

    def of(self, definition: Any) -> str:
        """Import an object, and return the name that it has in the file."""
        module, name = str(definition.__module__), str(definition.__qualname__)
        alias, number = name, 2
        while self._taken.get(alias, definition) is not definition:
            alias, number = f"{name}_{number}", number + 1
        if alias not in self._taken:
            self._taken[alias] = definition
            self._imports.setdefault(module, []).append(name if alias == name else f"{name} as {alias}")
        return alias

    def lines(self) -> Iterator[str]:
        for module, names in sorted(self._imports.items()):
            yield f"from {module} import ("
            yield from (f"    {name}," for name in sorted(names))
            yield ")"
        if self._imports:
            yield ""


def _docstring(reduced: Reduced, release: str, written_for: str) -> Iterator[str]:
    yield f'"""What transformers {release} still needs of {reduced.config.name.partition(":")[0]}.'
    yield ""
    yield f"Written by `veomni-hook migrate` from a config for transformers {written_for}."
    for outcome, title in (
        (COVERED, "Left out, because veomni-hook or upstream does the same without a patch:"),
        (LEFT_OUT, "Needed, but not here, because it does not apply: write it anew."),
    ):
        judged = [one for one in reduced.explained if one.outcome == outcome]
        if judged:
            yield ""
            yield title
            yield from (f"    {one.judgement.target}: {_plain(one.reason)}" for one in judged)
    yield '"""'


def _head(reduced: Reduced, written_for: str) -> Iterator[str]:
    config = reduced.config
    yield "config = PatchConfig("
    yield f"    {_text(config.source_module)},"
    if config.device is not None:
        yield f"    device={_text(config.device)},"
    if config.description:
        yield f"    description={_text(config.description)},"
    yield f"    transformers_version={_text(written_for)},"
    yield ")"


def _surroundings(reduced: Reduced, names: _Names) -> Iterator[str]:
    needs = reduced.needs
    if needs.imports or needs.drops or needs.excluded:
        yield ""
    yield from (_import(spec) for spec in needs.imports)
    if needs.drops:
        yield f"config.drop_import_names({', '.join(map(_text, needs.drops))})"
    if needs.excluded:
        yield f"config.exclude_from_output({', '.join(map(_text, needs.excluded))})"
    for block in needs.blocks:
        quotes = "'''" if '"""' in block else '"""'
        raw = "r" if "\\" in block else ""
        yield from ("", "config.add_post_import_block(", f"    {raw}{quotes}", block, f"{quotes}", ")")
    if needs.helpers or needs.placed:
        yield ""
    yield from (f"config.add_helper({names.of(helper)})" for helper in needs.helpers)
    for placed in needs.placed:
        yield f"config.add_helper_after({_text(placed.target)}, {names.of(placed.helper)})"


def _import(spec: ImportSpec) -> str:
    if not spec.is_from_import:
        alias = f", alias={_text(spec.alias)}" if spec.alias else ""
        return f"config.add_import({_text(spec.module)}{alias}, is_from_import=False)"
    if not spec.names:
        return f"config.add_import({_text(spec.module)})"
    return f"config.add_import({_text(spec.module)}, names=[{', '.join(map(_text, spec.names))}])"


def _patch(patch: Patch, explained: Explained, reduced: Reduced, names: _Names) -> Iterator[str]:
    yield textwrap.fill(
        _plain(explained.reason), _WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False
    )
    if patch.replacement is None:
        yield from _external(patch)
        return
    arguments = [_text(patch.target)]
    options = []
    if patch.name_map:
        options.append(f"name_map={json.dumps(dict(patch.name_map), ensure_ascii=False)}")
    if patch.description:
        options.append(f"description={_text(patch.description)}")
    if patch.allow_signature_change:
        options.append("allow_signature_change=True")
    verb = f"config.{_VERBS[patch.patch_type]}"
    copied = _copied(patch, reduced)
    if copied:
        names.copied = True
        yield from _call(f"@{verb}", [*arguments, *options])
        yield f"{copied}\n"
    else:
        yield from _call(verb, [*arguments, names.of(patch.replacement), *options])


def _call(head: str, arguments: Sequence[str]) -> Iterator[str]:
    yield f"{head}("
    yield from (f"    {one}," for one in arguments)
    yield ")"


def _external(patch: Patch) -> Iterator[str]:
    module, _, name = (patch.replacement_source or "").rpartition(".")
    arguments = [_text(patch.target), _text(module), _text(name)]
    if patch.patch_type is not PatchType.CLASS_REPLACEMENT:
        arguments.append(f"PatchType.{patch.patch_type.name}")
    if patch.description:
        arguments.append(f"description={_text(patch.description)}")
    yield "config.add_patch("
    yield from (f"    {line}" for line in _call("create_patch_from_external", arguments))
    yield ")"


def _copied(patch: Patch, reduced: Reduced) -> str:
    """The text of a replacement that cannot be imported as it is; empty if it can."""
    snippet = read_snippet(patch.replacement, where=f"config {reduced.config.name}", target=patch.target)
    relative = any(
        isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(snippet.document.tree)
    )
    module = sys.modules.get(patch.replacement.__module__)
    importable = getattr(module, patch.replacement.__qualname__, None) is patch.replacement
    if importable and not relative:
        return ""
    home = reduced.config.name.partition(":")[0].rpartition(".")[0]
    return absolute_imports(snippet.document, f"{home}.{_GENERATED}".removeprefix("."))


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(text: str) -> str:
    """One line for a comment or a docstring."""
    return " ".join(text.replace('"""', "'''").replace("\\", "/").split())
