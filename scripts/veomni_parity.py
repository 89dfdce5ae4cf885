"""What serves each patch of VeOmni's configs here: `python -m scripts.veomni_parity` writes it.

It needs the package `veomni`, what VeOmni's configs import, and the release of transformers that they are
made for. What each patch is for is told from its code; whether it has the same effect here was measured
(`scripts.veomni_effects`). It writes docs/data/veomni-parity.json, with every patch, and the counts in
docs/maintain/veomni-parity.md. Of VeOmni it copies names only: of configs, targets and its API.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from scripts import tables
from scripts.veomni_common import PAGE, ROOT, WRITTEN_FOR, config_names, package, short, wrapped
from scripts.veomni_surroundings import Surrounding, surroundings
from veomni_hook.finders import configs
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms.recognise import recognise
from veomni_hook.patches.plan import Origin
from veomni_hook.patches.site import Site, Status
from veomni_hook.patches.spec import PatchConfig
from veomni_hook.tools.migration.answers import (
    BY_DESIGN,
    MISSING,
    SAME,
    STATUSES,
    Answer,
    answer,
    measured,
    releases_measured,
)
from veomni_hook.tools.migration.concerns import Concern, concerns
from veomni_hook.tools.migration.served import Served, served
from veomni_hook.tools.migration.usage import definition, identifiers
from veomni_hook.tools.migration.vocabulary import MEANINGS, OP_SLOT

TABLE = tables.DATA / "veomni-parity.json"
BEGIN = "<!-- written by python -m scripts.veomni_parity -->\n"
PATCH = "patch"


#: An answer for each release that was measured.
Answers = Mapping[str, Answer]


@dataclass(frozen=True)
class Entry:
    """A patch, or what surrounds patches, with what serves each of its concerns."""

    kind: str
    names: tuple[str, ...]
    answers: tuple[tuple[Concern, Answers], ...]

    def status(self, release: str) -> str:
        """`SAME` if everything has the same effect, `MISSING` if something is missing, else `BY_DESIGN`."""
        statuses = {answers[release].status for _, answers in self.answers}
        return next(status for status in (MISSING, BY_DESIGN, SAME) if status in statuses)


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
    names = config_names()
    found = version("transformers")
    if found != WRITTEN_FOR:
        raise SystemExit(f"transformers {found} is installed; VeOmni's configs are made for {WRITTEN_FOR}")
    # One after the other: a config module may extend the config of another, which is judged before.
    return [_judged(configs.load([name])[0].configs[0], name) for name in names]


def rows(configs_judged: Sequence[Judged]) -> Iterator[dict[str, Any]]:
    """Yield a row for each concern of each patch, and of what surrounds the patches."""
    for config in configs_judged:
        for entry in config.entries:
            for purpose, answers in entry.answers:
                served_by = dict.fromkeys(one.by for one in answers.values() if one.status == SAME)
                yield {
                    "config": config.name,
                    "kind": entry.kind,
                    "target": [*entry.names],
                    "concern": purpose.name,
                    **{
                        release: one.status if one.status == SAME else f"{one.status}: {one.by}"
                        for release, one in answers.items()
                    },
                    "served by": "; ".join(served_by),
                    "seen in": purpose.evidence,
                }


def summary(configs_judged: Sequence[Judged], releases: Sequence[str]) -> list[str]:
    """Return the counts as Markdown: patches by release and status, and the same for each concern."""
    patches = [entry for config in configs_judged for entry in config.of(patches=True)]
    around = [entry for config in configs_judged for entry in config.of(patches=False)]
    head = " | ".join(f"{release} {status}" for release in releases for status in STATUSES)
    return [
        *wrapped(
            f"VeOmni {version('veomni')} has {len(patches)} patches in {len(configs_judged)} configs,",
            f"for transformers {WRITTEN_FOR}.",
            "A patch has the *same effect* here if everything that it is for has.",
        ),
        "",
        f"| Release | {' | '.join(STATUSES)} |",
        f"|---|{'---:|' * len(STATUSES)}",
        *(_by_status(patches, release) for release in releases),
        "",
        *wrapped(
            "A patch can have several concerns, so the columns sum to more than the number of patches."
        ),
        "",
        f"| Concern | Patches | {head} | Served by |",
        f"|---|{'---:|' * (1 + len(releases) * len(STATUSES))}---|",
        *_table(patches, releases),
        "",
        *wrapped(
            "Beside their patches, the configs leave out definitions, drop imports and add helpers. Each "
            "line of the list of a config counts once:"
        ),
        "",
        f"| Concern | Lines | {head} |",
        f"|---|{'---:|' * (1 + len(releases) * len(STATUSES))}",
        *(line.rpartition(" | ")[0] + " |" for line in _table(around, releases)),
        "",
        "What the words mean:",
        "",
        *(f"- **{name}**: {MEANINGS[name]}" for name in MEANINGS if name in _counts(patches + around)),
        "",
        "What is missing, or not the same by design, on the newest of these releases:",
        "",
        *_lacking(patches, releases[-1]),
    ]  # fmt: skip


def _by_status(patches: Sequence[Entry], release: str) -> str:
    counts = Counter(entry.status(release) for entry in patches)
    return f"| {release} | {' | '.join(str(counts[status]) for status in STATUSES)} |"


def counted(table: Iterable[Mapping[str, Any]], release: str) -> dict[bool, Counter[tuple[str, str]]]:
    """Return how often each concern has each status in the rows: among patches (True), and beside them."""
    found: dict[bool, Counter[tuple[str, str]]] = {True: Counter(), False: Counter()}
    for row in table:
        found[row["kind"] == PATCH][row["concern"], row[release].partition(":")[0]] += 1
    return found


def tabled(document: str, releases: Sequence[str]) -> dict[str, dict[bool, Counter[tuple[str, str]]]]:
    """Return the same counts as `counted` for each release, from the tables of the page."""
    block = document.partition(BEGIN)[2].partition(tables.END)[0]
    texts = re.split(r"(?m)^\|---\|.*$", block)[2:]
    columns = [(release, status) for release in releases for status in STATUSES]
    result: dict[str, dict[bool, Counter[tuple[str, str]]]] = {
        release: {True: Counter(), False: Counter()} for release in releases
    }
    for patches, text in zip((True, False), texts, strict=True):
        for name, cells in re.findall(rf"(?m)^\| ([\w\- ]+) \| \d+ \|((?: \d+ \|){{{len(columns)}}})", text):
            for (release, status), number in zip(columns, re.findall(r"\d+", cells), strict=True):
                if int(number):
                    result[release][patches][name, status] = int(number)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both documents, or with ``--check`` return 1 if they are not what would be written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a document is out of date"
    )
    chosen = parser.parse_args(arguments)
    configs_judged = judged()
    lines = summary(configs_judged, releases_measured())
    page = tables.placed(PAGE.read_text(encoding="utf-8"), BEGIN, lines)
    texts = {TABLE: tables.text(rows(configs_judged)), PAGE: page}
    changed = [file for file, text in texts.items() if not file.exists() or file.read_text("utf-8") != text]
    for file in changed:
        print(f"{'out of date' if chosen.check else 'written'}: {file.relative_to(ROOT)}", file=sys.stderr)
        if not chosen.check:
            file.write_text(texts[file], encoding="utf-8")
    return int(chosen.check and bool(changed))


def _judged(config: PatchConfig, module: str) -> Judged:
    file = package("transformers").joinpath(*config.source_module.split(".")[1:]).with_suffix(".py")
    source = file.read_text(encoding="utf-8")
    origin = Origin(config.source_module, str(file), version=WRITTEN_FOR, distribution="transformers")
    results = served(config, source, origin)
    sites = [site for site in recognise(Document(source)) if site.status is Status.ROUTED]
    routes = {one.patch.target: _reached(one, source, sites) for one in results}
    entries = [_patch(one, config, source, routes[one.patch.target]) for one in results]
    entries += [_around(one, routes, config) for one in surroundings(config, source)]
    return Judged(short(module), tuple(entries))


def _patch(one: Served, config: PatchConfig, source: str, reached: tuple[str, ...]) -> Entry:
    answers = []
    for purpose in concerns(one.patch, config, source):
        # A slot's kernel may be in a module that the class holds, an imported one is in the target's code.
        routes = reached if OP_SLOT in purpose.evidence else one.ops
        answers.append((purpose, _answers(purpose, routes, config, one.patch.target)))
    return Entry(PATCH, (one.patch.target,), tuple(answers))


def _answers(purpose: Concern, routes: Sequence[str], config: PatchConfig, target: str) -> Answers:
    return {
        release: answer(purpose, routes, measured(config.source_module, release), target)
        for release in releases_measured()
    }


def _reached(one: Served, source: str, sites: Sequence[Site]) -> tuple[str, ...]:
    """The routes in the target, and in the classes that the ``__init__`` of its class names.

    An ``__init__`` holds what the other methods of its class call.
    """
    owner, _, method = one.patch.target.rpartition(".")
    body = definition(source, f"{owner}.__init__") if owner else None
    named = identifiers(body) if body is not None else set()
    named |= {owner} if method == "__init__" else set()
    built = (f"{site.op}/{site.variant}" for site in sites if site.target.partition(".")[0] in named)
    return (*one.ops, *built)


def _around(one: Surrounding, routes: dict[str, tuple[str, ...]], config: PatchConfig) -> Entry:
    reached = [route for target in one.targets for route in routes.get(target, ())]
    target = next(iter(one.targets), "")
    return Entry(
        one.kind,
        one.names,
        tuple((purpose, _answers(purpose, reached, config, target)) for purpose in one.concerns),
    )


def _table(entries: Sequence[Entry], releases: Sequence[str]) -> Iterator[str]:
    served_by: dict[str, list[Answer]] = defaultdict(list)
    for entry in entries:
        for purpose, answers in entry.answers:
            served_by[purpose.name] += answers.values()
    for name, counts in _counts(entries).items():
        numbers = [counts[release, status] for release in releases for status in STATUSES]
        total = sum(numbers) // len(releases)
        yield f"| {name} | {total} | {' | '.join(map(str, numbers))} | {_by(served_by[name])} |"


def _counts(entries: Sequence[Entry]) -> dict[str, Counter[tuple[str, str]]]:
    found: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for entry in entries:
        for purpose, answers in entry.answers:
            for release, one in answers.items():
                found[purpose.name][release, one.status] += 1
    return {name: found[name] for name in MEANINGS if name in found}


def _by(answers: Sequence[Answer]) -> str:
    """What serves a concern in short: ops instead of routes, each thing once."""
    parts = dict.fromkeys(part for one in answers if one.status == SAME for part in one.by.split("; "))
    ops = dict.fromkeys(op for part in parts for op in re.findall(r"(?:^|, )(\w+)/\w+(?=,|$)", part))
    rest = [part for part in parts if not re.search(r"^\w+/\w+", part)]
    return "; ".join(filter(None, (", ".join(f"`{op}`" for op in ops), *rest)))


def _lacking(patches: Sequence[Entry], release: str) -> Iterator[str]:
    """A line for each reason, with the patches that have it."""
    reasons: dict[str, dict[str, None]] = defaultdict(dict)
    for entry in patches:
        for purpose, answers in entry.answers:
            if answers[release].status != SAME:
                one = answers[release]
                reasons[f"**{purpose.name}**, {one.status}: {one.by}"][f"`{entry.names[0]}`"] = None
    for reason, targets in reasons.items():
        yield f"- {reason} ({', '.join(targets)})"


if __name__ == "__main__":
    sys.exit(main())
