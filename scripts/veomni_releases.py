"""VeOmni's configs on newer releases: `python -m scripts.veomni_releases [RELEASE...]` writes the table.

It needs the package `veomni`, what VeOmni's configs import, and the release of transformers that they are
made for. A release is what `veomni-hook check --against` takes: a version, a wheel or a folder. The table
goes between the markers in docs/veomni.md. Of VeOmni it copies names only: of configs and targets.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from veomni_hook.tools.cli.check.against import Judged, judged
from veomni_hook.tools.cli.inputs.configs import OPTION, Source, load_sources
from veomni_hook.tools.migration.judge import APPLIES, FAILS, GONE, MOVED, RENAMED, UNNECESSARY

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "veomni.md"
BEGIN, END = "<!-- written by python -m scripts.veomni_releases -->\n", "<!-- end -->\n"

#: The release that the configs are made for, and those that they are judged against.
WRITTEN_FOR = "5.9.0"
RELEASES = ("5.17.0", "5.23.0", "5.24.0")
VERDICTS = (APPLIES, RENAMED, UNNECESSARY, MOVED, GONE, FAILS)
FOLDER, ENDING = "models/transformers", "_patch_gen_config"
WIDTH = 120

#: The verdicts of a config by release, and in these by target.
Verdicts = Mapping[str, Mapping[str, str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge every config against the releases, and write the table unless it is only to be shown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", default=RELEASES, metavar="RELEASE")
    parser.add_argument("--show", action="store_true", help="print the table, write nothing")
    chosen = parser.parse_args(arguments)
    sources = configs()
    found: dict[str, dict[str, dict[str, str]]] = {}
    for release in chosen.releases:
        print(f"judging against {release}", file=sys.stderr, flush=True)
        for one in judged(sources, release, WRITTEN_FOR):
            held = found.setdefault(short(one), {})
            held[one.release] = {each.target: each.verdict for each in one.judgements}
    lines = table(found, version("veomni"))
    if chosen.show:
        print("\n".join(lines))
    else:
        PAGE.write_text(placed(PAGE.read_text(encoding="utf-8"), lines), encoding="utf-8")
        print(f"written: {PAGE.relative_to(ROOT)}", file=sys.stderr)
    return 0


def configs() -> list[Source]:
    """Return every config of the installed VeOmni, by name.

    Raises:
        SystemExit: VeOmni is not installed, or a config cannot be loaded.
    """
    spec = importlib.util.find_spec("veomni")
    if spec is None or spec.origin is None:
        raise SystemExit("veomni is not installed: pip install --no-deps veomni")
    folder = Path(spec.origin).parent
    files = sorted(folder.glob(f"{FOLDER}/*/*{ENDING}.py"), key=lambda file: file.name)
    names = [".".join(("veomni", *file.relative_to(folder).with_suffix("").parts)) for file in files]
    sources = load_sources([(OPTION, name) for name in names])
    for source in sources:
        if source.error is not None:
            raise SystemExit(str(source.error))
    return sources


def short(one: Judged) -> str:
    """The name of a config's module without what all of them have."""
    return one.config.name.partition(":")[0].rpartition(".")[2].removesuffix(ENDING)


def table(found: Mapping[str, Verdicts], veomni: str) -> list[str]:
    """Return the counts by config and release, and the list of what moved or is gone, as Markdown."""
    releases = list(dict.fromkeys(release for held in found.values() for release in held))
    verdicts = [
        v for v in VERDICTS if any(v in held.values() for one in found.values() for held in one.values())
    ]
    head = [f"{verdict} {release}" for release in releases for verdict in verdicts]
    sums = {
        release: Counter(v for one in found.values() for v in one[release].values()) for release in releases
    }
    lines = [
        *textwrap.wrap(
            f"The {len(found)} configs of VeOmni {veomni}, which are made for transformers {WRITTEN_FOR}. "
            "Each patch is judged on its own; a name that a config leaves out, or places a helper after, "
            "counts where it is gone.",
            WIDTH,
        ),
        "",
        f"| Config | {' | '.join(head)} |",
        f"|---|{'---:|' * len(head)}",
        *(
            _row(name, [Counter(held[release].values()) for release in releases], verdicts)
            for name, held in found.items()
        ),
        _row("all", list(sums.values()), verdicts),
        "",
        "What moved or is gone, by config:",
        "",
    ]
    for name, held in found.items():
        lines += _list(name, held, releases)
    return lines


def placed(text: str, lines: Iterable[str], first: str = BEGIN) -> str:
    """Return the page with the lines between the marker `first` and the next `END`.

    Raises:
        SystemExit: the page has no markers.
    """
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} has no markers for the table")
    return before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after


def _row(name: str, counts: Sequence[Counter[str]], verdicts: Sequence[str]) -> str:
    cells = [str(count[verdict] or "") for count in counts for verdict in verdicts]
    return f"| {name} | {' | '.join(cells)} |"


def _list(name: str, held: Verdicts, releases: Sequence[str]) -> Iterator[str]:
    """Lines for one config: by verdict, and within it by the releases that share it."""
    parts = []
    for verdict in (MOVED, GONE, FAILS):
        shared: dict[tuple[str, ...], list[str]] = {}
        for target in dict.fromkeys(target for release in releases for target in held[release]):
            where = tuple(release for release in releases if held[release].get(target) == verdict)
            if where:
                shared.setdefault(where, []).append(f"`{target}`")
        parts += [
            f"{verdict} in {' and '.join(where)}: {', '.join(t)}"
            for where, t in sorted(shared.items(), key=_first)
        ]
    if parts:
        text = f"- {name}: {'; '.join(parts)}."
        yield from textwrap.wrap(
            text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )


def _first(entry: tuple[tuple[str, ...], list[str]]) -> tuple[int, tuple[str, ...]]:
    """What several releases share comes first."""
    return -len(entry[0]), entry[0]


if __name__ == "__main__":
    sys.exit(main())
