"""docs/stress.md: made from the result of a run."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version

from tests.stress.result import Line, Part, markdown
from tests.stress.tamperings import HARMLESS, REFUSED, REPAIRED, TAMPERINGS

_TEXT = """# The stress suite

`make stress` tests the promises of this project many times, on two cores in at most half an hour. It prints its random
seed; `make stress ARGS='--seed 5'` repeats a run, `make stress ARGS='kills tampering'` runs some of
its parts, and `ARGS=--help` lists the options. It exits with 1 if anything was lost, wrong or failed. The tables here
were written by `make stress ARGS='--document docs/stress.md'` on a machine of {cores} cores, with Python {python}, torch {torch} and
transformers {transformers}.

{summary}
A start is a new Python process that imports patched modules; an entry is one patched module in the cache
([architecture](architecture.md)). An entry is lost if it was complete and a later start cannot use it. A result is wrong
if a start, or a module, computes something else than the original.

## Starts

Processes wait until all of them are ready, and then import the same modules with one empty cache. Each must get
the same text and code and the right results, without a warning. Afterwards the cache must be complete, another start must
find everything in it, and no temporary file may be left.

{starts}
## Kills

A start is killed with SIGKILL before each of its file operations (that is, after the previous one), halfway through
each write, and at random times, also while another start runs. After each kill, all complete entries must still be there
and no entry may be partial; the next start must be right and complete the cache; `cache clear` must then leave nothing.
The suite does not test power failures, where data that the system has not yet written to the disk is lost.

{kills}
## Tampering

Each kind of tampering is applied to each of its pieces (files or folders) in a complete cache. Two starts follow. Code
that was tampered with must never run: all code that a start executes is compared with what was stored, code object by code
object. The outcome is one of three:

- repaired: {repaired}.
- refused: {refused}.
- harmless: {harmless}.

For one flipped bit in every byte, each case is looked up in the cache, and every tenth is followed by two starts. Anyone
who can write files as the user can write what the seals accept; the cache cannot notice this ([security](security.md)).

{tampering}
## Configs' dependencies

A world is a folder with six modules and two configs that patch a module each with what their modules say. The modules
import each other in eleven ways, to any depth, and read files, folders, the working directory and variables; one statement
in a hundred cannot be recorded. Then something changes at random, 25 times in each world, and two programs start: one
with the world's cache, one with none. Both must execute the same text. A config that is loaded although nothing has changed
since the last start is another failure.

{dependencies}
## Generated modules

Each module has one class or function under test. It is generated at random in steps: a formula of an op, plain or with
one of the named perturbations in `tests/stress/perturbing.py` (another axis, no cast, eps outside, another activation, a
helper that a subclass overrides, ...); another spelling of it (names, operands, methods and functions, temporaries,
helpers, keywords); and a random change from `tests/proof`. Duplicate texts do not count, nor do modules whose original
raises. Each module is patched as an import patches it. If an idiom (a recogniser of one op) routes something in it, the
module is executed unpatched, and patched with `VEOMNI_KERNELS=torch` and with `reference`: on several calls in
float32 and bfloat16, with odd shapes and with views. Outputs, changed inputs and the gradients of inputs and parameters are
compared within rounding: 1e-5 of the largest value in float32 and 3e-2 in bfloat16, or eight times the effect that
rounding the inputs differently has on the original. A difference below 3e-2, which one value rounded the other way can
cause, counts only if it recurs with others of four sets of inputs. The same holds for any difference of a router, which may
choose another expert if two probabilities are equal in float32. Modules that no idiom routes run unchanged and count as
not routed. A module may change in place a tensor that a kernel keeps for its backward and the original does not keep.
Autograd then raises an error, which is counted separately.

{generated}"""


def written(parts: Sequence[Part]) -> str:
    """The document for the result of a run of all parts."""
    by_name = {part.name: part for part in parts}
    names = {
        name: markdown(_COLUMNS, map(_row, by_name[name].lines))
        for name in ("starts", "kills", "dependencies", "generated")
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
