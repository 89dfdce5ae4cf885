"""docs/stress.md: made from the result of a run."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version

from tests.stress.result import Line, Part, markdown
from tests.stress.tamperings import HARMLESS, REFUSED, REPAIRED, TAMPERINGS

__all__ = ["tamperings", "written"]

_TEXT = """# The stress suite

`make stress` tries what this project promises very often, on two cores in at most half an hour. It prints the seed
of everything random; `make stress ARGS='--seed 5'` repeats a run, `make stress ARGS='kills tampering'` runs some of
its parts, and `ARGS=--help` lists the options. It exits with 1 if anything was lost, wrong or failed. The tables here
were written by `make stress ARGS='--document docs/stress.md'` on a machine of {cores} cores, with Python {python}, torch {torch} and
transformers {transformers}.

{summary}
An entry is lost when it was complete and a later start cannot use it. A result is wrong when a start, or a module,
computes something else than the original.

## Starts

Processes wait until all of them are ready, and then import the same modules from one empty cache. Each has to get
the same text and code and the right results, without a warning; afterwards the cache is whole, one more start finds
everything in it, and no temporary file is left.

{starts}
## Kills

A start is killed with SIGKILL before each of its file operations (which is after the one before it), halfway through
each write, and at random times, also beside another start. After each kill all entries that were complete are
there and nothing is half an entry; the next start is right and makes the cache whole; `cache clear` then leaves
nothing. What the system has not yet written to the disk when the power fails is another matter: the suite does not
switch the power off.

{kills}
## Tampering

Each tampering is done to each of its pieces in a complete cache. Two starts follow. What was tampered with is never
executed: whatever a start executes is compared with what was stored, code object by code object. Then one of three
things holds:

- repaired: {repaired}.
- refused: {refused}.
- harmless: {harmless}.

Of a bit flipped in every byte, each is looked up, and every tenth is followed by two starts. Whoever can write as the
user can write what the seals accept; this is no tampering that the cache could notice.

{tampering}
## Generated modules

One module has one class or function under test. It is drawn in steps: a formula of an op, plain or with one of the
named perturbations in `tests/stress/perturbing.py` (another axis, no cast, eps outside, another activation, a helper
that a subclass overrides, ...); another spelling of it (names, operands, methods and functions, temporaries, helpers,
keywords); and a random change of `tests/proof`. A text that was drawn before does not count, nor does a module whose
original raises. Each module is patched as an import patches it. Those in which an idiom routes something are executed
as they are, without a line of ours, and as patched, with `VEOMNI_KERNELS=torch` and with `reference`: on several calls in
float32 and bfloat16, of odd shapes and of views. Outputs, changed inputs and the gradients of inputs and parameters are
compared within rounding: 1e-5 of the largest value in float32 and 3e-2 in bfloat16, or eight times what rounding the
inputs otherwise does to the original. A difference below 3e-2, where one value may have been rounded to the other side,
counts if it comes again with others of four sets of inputs. So does any difference of a router, which may choose
another expert where two probabilities are equal in float32. Modules that no idiom routes run as they are, and count as
not routed. A module may change in place what a kernel keeps for its backward and the original does not: autograd
refuses with an error then, which is counted apart.

{generated}"""


def written(parts: Sequence[Part]) -> str:
    """The document for the result of a run of all parts."""
    by_name = {part.name: part for part in parts}
    names = {
        name: markdown(_COLUMNS, map(_row, by_name[name].lines)) for name in ("starts", "kills", "generated")
    }
    totals = [
        (
            part.name,
            f"{line.count:,}",
            f"{line.lost:,}",
            f"{line.wrong:,}",
            f"{line.failed:,}",
            f"{part.seconds:.0f} s",
            str(part.seed),
        )
        for part in parts
        for line in (part.total(),)
    ]
    columns = ("part", "how many", "entries lost", "wrong results", "other failures", "time", "seed")
    return _TEXT.format(
        cores=os.cpu_count(),
        python=platform.python_version(),
        torch=version("torch").partition("+")[0],
        transformers=version("transformers"),
        summary=markdown(columns, totals),
        repaired=REPAIRED,
        refused=REFUSED,
        harmless=HARMLESS,
        tampering=tamperings(by_name["tampering"].lines),
        **names,
    )


_COLUMNS = ("what", "how many", "entries lost", "wrong results", "other failures", "note")


def _row(line: Line) -> tuple[str, ...]:
    return (line.what, f"{line.count:,}", f"{line.lost:,}", f"{line.wrong:,}", f"{line.failed:,}", line.note)


def tamperings(lines: Sequence[Line]) -> str:
    """The table of all tamperings: what, to which pieces, what comes of it, how often, and what went wrong."""
    words = {REPAIRED: "repaired", REFUSED: "refused", HARMLESS: "harmless"}
    rows = []
    for one, line in zip(TAMPERINGS, lines, strict=True):
        comes_to = words[one.outcome]
        for piece, other in one.outcomes:
            comes_to += f"; {piece}: {words[other]}"
        rows.append(
            (one.name, one.description, ", ".join(one.pieces), comes_to, f"{line.count:,}", f"{line.bad:,}")
        )
    return markdown(
        ("tampering", "what is done", "to which pieces", "what comes of it", "how many", "failures"), rows
    )
