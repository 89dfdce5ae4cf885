"""VeOmni's configs on newer releases: `python -m scripts.veomni_releases [RELEASE...]` judges them.

It needs the package `veomni`, what VeOmni's configs import, and the release of transformers that they are
made for. A release is what `veomni-hook check --against` takes: a version, a wheel or a folder. Every
verdict goes to docs/data/veomni-releases.json, the sums between the markers in
docs/maintain/veomni-parity.md. Of VeOmni it copies names only: of configs and targets.
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

from scripts import tables
from veomni_hook.tools.cli.check.against import Judged, judged
from veomni_hook.tools.cli.inputs.configs import OPTION, Source, load_sources
from veomni_hook.tools.migration.judge import APPLIES, FAILS, GONE, MOVED, RENAMED, UNNECESSARY

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "maintain" / "veomni-parity.md"
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
    """Judge every config against the releases, and write what came of it unless it is only to be shown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", default=RELEASES, metavar="RELEASE")
    parser.add_argument("--show", action="store_true", help="print the sums, write nothing")
    chosen = parser.parse_args(arguments)
    sources = configs()
    found: dict[str, dict[str, dict[str, str]]] = {}
    for release in chosen.releases:
        print(f"judging against {release}", file=sys.stderr, flush=True)
        for one in judged(sources, release, WRITTEN_FOR):
            held = found.setdefault(short(one), {})
            held[one.release] = {each.target: each.verdict for each in one.judgements}
    lines = sums(found, version("veomni"))
    if chosen.show:
        print("\n".join(lines))
    else:
        tables.write("veomni-releases", rows(found))
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


def rows(found: Mapping[str, Verdicts]) -> Iterator[dict[str, str]]:
    """Yield a row for each target of each config, with its verdict in each release."""
    for name, held in found.items():
        for target in dict.fromkeys(target for verdicts in held.values() for target in verdicts):
            verdict_in = {release: verdicts.get(target, "") for release, verdicts in held.items()}
            yield {"config": name, "target": target, **verdict_in}


def sums(found: Mapping[str, Verdicts], veomni: str) -> list[str]:
    """Return how often each release has each verdict, as Markdown."""
    releases = dict.fromkeys(release for held in found.values() for release in held)
    lines = [
        *textwrap.wrap(
            f"The {len(found)} configs of VeOmni {veomni}, which are made for transformers {WRITTEN_FOR}. "
            "Each patch is judged on its own; a name that a config leaves out, or places a helper after, "
            "counts where it is gone.",
            WIDTH,
        ),
        "",
        f"| Release | {' | '.join(VERDICTS)} |",
        f"|---|{'---:|' * len(VERDICTS)}",
    ]
    for release in releases:
        counts = Counter(verdict for held in found.values() for verdict in held[release].values())
        lines.append(f"| {release} | {' | '.join(str(counts[verdict]) for verdict in VERDICTS)} |")
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


if __name__ == "__main__":
    sys.exit(main())
