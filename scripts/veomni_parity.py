"""What serves each patch of VeOmni's configs here: `python -m scripts.veomni_parity` writes it.

It needs the package `veomni`, what VeOmni's configs import, and the release of transformers that they are
made for. It writes docs/data/veomni-parity.json, with every patch, and the counts in
docs/maintain/veomni-parity.md. Of VeOmni it copies names only: of configs, targets and its API.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from scripts import tables
from veomni_hook.finders import configs
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms.recognise import recognise
from veomni_hook.patches.plan import Origin
from veomni_hook.patches.site import Site, Status
from veomni_hook.patches.spec import PatchConfig
from veomni_hook.tools.migration.answers import HERE, NOT_NEEDED, NOT_YET, PARTLY, STATUSES, Answer, answer
from veomni_hook.tools.migration.concerns import Concern, concerns
from veomni_hook.tools.migration.served import Served, served
from veomni_hook.tools.migration.surroundings import Surrounding, surroundings
from veomni_hook.tools.migration.usage import definition, identifiers
from veomni_hook.tools.migration.vocabulary import MEANINGS, OP_SLOT

ROOT = Path(__file__).resolve().parents[1]
TABLE = tables.DATA / "veomni-parity.json"
SUMMARY = ROOT / "docs" / "maintain" / "veomni-parity.md"
BEGIN, END = "<!-- written by python -m scripts.veomni_parity -->\n", "<!-- end -->\n"

#: The release of transformers that VeOmni's configs are made for.
RELEASE = "5.9.0"
FOLDER = "models/transformers"
ENDING = "_patch_gen_config"
PATCH = "patch"


@dataclass(frozen=True)
class Entry:
    """A patch, or what surrounds patches, with what serves each of its concerns."""

    kind: str
    names: tuple[str, ...]
    answers: tuple[tuple[Concern, Answer], ...]

    @property
    def status(self) -> str:
        """``here`` if nothing more is needed, ``partly`` if something serves it, else ``not yet``."""
        held = {given.status for _, given in self.answers}
        if held <= {HERE, NOT_NEEDED}:
            return HERE
        return PARTLY if held & {HERE, PARTLY} else NOT_YET


@dataclass(frozen=True)
class Judged:
    """One of VeOmni's configs."""

    name: str
    entries: tuple[Entry, ...]

    def of(self, *, patches: bool) -> list[Entry]:
        """The patches, or what surrounds them."""
        return [entry for entry in self.entries if (entry.kind == PATCH) is patches]


def judged() -> list[Judged]:
    """Return every config of the installed VeOmni, by name.

    Raises:
        SystemExit: VeOmni or the right release of transformers is not installed.
    """
    folder = _package("veomni")
    found = _version("transformers")
    if found != RELEASE:
        raise SystemExit(f"transformers {found} is installed; VeOmni's configs are made for {RELEASE}")
    files = sorted(folder.glob(f"{FOLDER}/*/*{ENDING}.py"), key=lambda file: file.name)
    names = [".".join(("veomni", *file.relative_to(folder).with_suffix("").parts)) for file in files]
    # One after the other: a config module may extend the config of another, which is judged before.
    return [_judged(configs.load([name])[0].configs[0], name) for name in names]


def rows(held: Sequence[Judged]) -> Iterator[dict[str, Any]]:
    """Yield a row for each concern of each patch, and of what surrounds the patches."""
    for config in held:
        for entry in config.entries:
            for purpose, given in entry.answers:
                yield {
                    "config": config.name,
                    "kind": entry.kind,
                    "target": [*entry.names],
                    "concern": purpose.name,
                    "status": given.status,
                    "served by": given.by,
                    "seen in": purpose.evidence,
                }


def summary(held: Sequence[Judged]) -> str:
    """Return the counts as Markdown: patches by what serves them, and concerns by status."""
    patches = [entry for config in held for entry in config.of(patches=True)]
    around = [entry for config in held for entry in config.of(patches=False)]
    served_by = Counter(entry.status for entry in patches)
    lines = [
        *_wrapped(
            f"VeOmni {_version('veomni')} has {len(patches)} patches in {len(held)} configs, for "
            f"transformers {RELEASE}. {served_by[HERE]} of them need nothing more: everything that they "
            f"are for is here, or is not needed. {served_by[PARTLY]} are served in part, "
            f"{served_by[NOT_YET]} not yet."
        ),
        "",
        *_wrapped(
            "A patch can have several concerns, so the columns sum to more than the number of patches. A "
            f"kernel is *here* if an idiom routes the same definition of transformers {RELEASE} to kernels."
        ),
        "",
        f"| Concern | Patches | {' | '.join(one.capitalize() for one in STATUSES)} | Served by |",
        f"|---|{'---:|' * (1 + len(STATUSES))}---|",
        *_table(patches),
        "",
        *_wrapped(
            "Beside their patches, the configs leave out definitions, drop imports and add helpers. Each "
            "line of the list of a config counts once:"
        ),
        "",
        f"| Concern | Lines | {' | '.join(one.capitalize() for one in STATUSES)} |",
        f"|---|{'---:|' * (1 + len(STATUSES))}",
        *(line.rpartition(" | ")[0] + " |" for line in _table(around)),
        "",
        "What the words mean:",
        "",
        *(f"- **{name}**: {MEANINGS[name]}" for name in _counts(patches + around)),
    ]
    return "\n".join(lines) + "\n"


def written(document: str, text: str) -> str:
    """Return a document with ``text`` between the marks."""
    head, _, rest = document.partition(BEGIN)
    return f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


def counted(held: Iterable[Mapping[str, Any]]) -> dict[bool, Counter[tuple[str, str]]]:
    """Return how often each concern has each status in the rows: among patches (True), and beside them."""
    found: dict[bool, Counter[tuple[str, str]]] = {True: Counter(), False: Counter()}
    for row in held:
        found[row["kind"] == PATCH][row["concern"], row["status"]] += 1
    return found


def tabled(document: str) -> dict[bool, Counter[tuple[str, str]]]:
    """Return the same counts as `counted`, from the tables of the page."""
    block = document.partition(BEGIN)[2].partition(END)[0]
    tables = re.split(r"(?m)^\|---\|.*$", block)[1:]
    found = {}
    for patches, table in zip((True, False), tables, strict=True):
        rows = re.findall(rf"(?m)^\| ([\w\- ]+) \| \d+ \|((?: \d+ \|){{{len(STATUSES)}}})", table)
        counts = {(name, status): int(n) for name, cells in rows for status, n in _cells(cells)}
        found[patches] = Counter({one: number for one, number in counts.items() if number})
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both documents, or with ``--check`` return 1 if they are not what would be written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a document is out of date"
    )
    chosen = parser.parse_args(arguments)
    held = judged()
    page = written(SUMMARY.read_text(encoding="utf-8"), summary(held))
    texts = {TABLE: tables.text(rows(held)), SUMMARY: page}
    changed = [file for file, text in texts.items() if not file.exists() or file.read_text("utf-8") != text]
    for file in changed:
        print(f"{'out of date' if chosen.check else 'written'}: {file.relative_to(ROOT)}", file=sys.stderr)
        if not chosen.check:
            file.write_text(texts[file], encoding="utf-8")
    return int(chosen.check and bool(changed))


def _judged(config: PatchConfig, module: str) -> Judged:
    file = _package("transformers").joinpath(*config.source_module.split(".")[1:]).with_suffix(".py")
    source = file.read_text(encoding="utf-8")
    origin = Origin(config.source_module, str(file), version=RELEASE, distribution="transformers")
    results = served(config, source, origin)
    sites = [site for site in recognise(Document(source)) if site.status is Status.ROUTED]
    routes = {one.patch.target: _reached(one, source, sites) for one in results}
    entries = [_patch(one, config, source, routes[one.patch.target]) for one in results]
    entries += [_around(one, routes) for one in surroundings(config, source)]
    return Judged(module.rpartition(".")[2].removesuffix(ENDING), tuple(entries))


def _patch(one: Served, config: PatchConfig, source: str, reached: tuple[str, ...]) -> Entry:
    answers = []
    for each in concerns(one.patch, config, source):
        # A slot's kernel may be in a module that the class holds, an imported one is in the target's code.
        answers.append((each, answer(each, reached if OP_SLOT in each.evidence else one.ops)))
    return Entry(PATCH, (one.patch.target,), tuple(answers))


def _reached(one: Served, source: str, sites: Sequence[Site]) -> tuple[str, ...]:
    """The routes in the target, and in the classes that the ``__init__`` of its class names."""
    owner = one.patch.target.rpartition(".")[0]
    body = definition(source, f"{owner}.__init__") if owner else None
    named = identifiers(body) if body is not None else set()
    built = (f"{site.op}/{site.variant}" for site in sites if site.target.partition(".")[0] in named)
    return (*one.ops, *built)


def _around(one: Surrounding, routes: dict[str, tuple[str, ...]]) -> Entry:
    reached = [route for target in one.targets for route in routes.get(target, ())]
    return Entry(one.kind, one.names, tuple((purpose, answer(purpose, reached)) for purpose in one.concerns))


def _table(entries: Sequence[Entry]) -> Iterator[str]:
    served_by: dict[str, list[Answer]] = defaultdict(list)
    for entry in entries:
        for purpose, given in entry.answers:
            served_by[purpose.name].append(given)
    for name, counts in _counts(entries).items():
        numbers = " | ".join(str(counts[status]) for status in STATUSES)
        yield f"| {name} | {sum(counts.values())} | {numbers} | {_by(served_by[name])} |"


def _counts(entries: Sequence[Entry]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for entry in entries:
        for purpose, given in entry.answers:
            found[purpose.name][given.status] += 1
    return {name: found[name] for name in MEANINGS if name in found}


def _by(answers: Sequence[Answer]) -> str:
    """What serves a concern in short: ops instead of routes, each thing once."""
    parts = dict.fromkeys(part for given in answers for part in given.by.split("; "))
    ops = dict.fromkeys(op for part in parts for op in re.findall(r"(?:^|, )(\w+)/\w+(?=,|$)", part))
    plans = dict.fromkeys(text for part in parts for text in re.findall(r"planned: ([^;]+)", part))
    rest = [part for part in parts if not re.search(r"planned: |^\w+/\w+", part)]
    texts = [", ".join(f"`{op}`" for op in ops), *rest, f"planned: {', '.join(plans)}" if plans else ""]
    return "; ".join(filter(None, texts))


def _cells(text: str) -> Iterator[tuple[str, str]]:
    return zip(STATUSES, re.findall(r"\d+", text), strict=True)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{name} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        raise SystemExit(f"{name} is not installed") from None


if __name__ == "__main__":
    sys.exit(main())
