"""VeOmni's configs on newer releases: `python -m scripts.veomni_releases [RELEASE...]` judges them.

It needs the package `veomni`, what VeOmni's configs import, and the release of transformers that they are
made for. A release is what `veomni-hook check --against` takes: a version, a wheel or a folder. Every
verdict goes to docs/data/veomni-releases.json, the sums between the markers in
docs/maintain/veomni-parity.md. Of VeOmni it copies names only: of configs and targets.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version

from scripts import tables
from scripts.veomni_common import PAGE, ROOT, WRITTEN_FOR, config_names, short, wrapped
from veomni_hook.tools.cli.check.against import judged
from veomni_hook.tools.cli.inputs.configs import OPTION, load_sources
from veomni_hook.tools.migration.judge import APPLIES, FAILS, GONE, MOVED, RENAMED, UNNECESSARY

BEGIN = "<!-- written by python -m scripts.veomni_releases -->\n"

#: Those that the configs are judged against.
RELEASES = ("5.17.0", "5.23.0", "5.24.0")
VERDICTS = (APPLIES, RENAMED, UNNECESSARY, MOVED, GONE, FAILS)

#: The verdicts of a config by release, and in these by target.
Verdicts = Mapping[str, Mapping[str, str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge every config against the releases, and write what came of it unless it is only to be shown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", default=RELEASES, metavar="RELEASE")
    parser.add_argument("--show", action="store_true", help="print the sums, write nothing")
    chosen = parser.parse_args(arguments)
    sources = load_sources([(OPTION, name) for name in config_names()])
    for source in sources:
        if source.error is not None:
            raise SystemExit(str(source.error))
    found: dict[str, dict[str, dict[str, str]]] = {}
    for release in chosen.releases:
        print(f"judging against {release}", file=sys.stderr, flush=True)
        for one in judged(sources, release, WRITTEN_FOR):
            held = found.setdefault(short(one.config.name), {})
            held[one.release] = {each.target: each.verdict for each in one.judgements}
    lines = sums(found, version("veomni"))
    if chosen.show:
        print("\n".join(lines))
    else:
        tables.write("veomni-releases", rows(found))
        PAGE.write_text(tables.placed(PAGE.read_text("utf-8"), BEGIN, lines), encoding="utf-8")
        print(f"written: {PAGE.relative_to(ROOT)}", file=sys.stderr)
    return 0


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
        *wrapped(
            f"The {len(found)} configs of VeOmni {veomni}, which are made for transformers {WRITTEN_FOR}.",
            "Each patch is judged on its own; a name that a config leaves out, or places a helper after, "
            "counts where it is gone.",
        ),
        "",
        f"| Release | {' | '.join(VERDICTS)} |",
        f"|---|{'---:|' * len(VERDICTS)}",
    ]
    for release in releases:
        counts = Counter(verdict for held in found.values() for verdict in held[release].values())
        lines.append(f"| {release} | {' | '.join(str(counts[verdict]) for verdict in VERDICTS)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
