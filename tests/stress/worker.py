"""``python -m tests.stress.worker PART FOLDER COUNT SEED [SPOILED [NAME ...]]``: one part about the cache, as JSON.

These parts need an interpreter of their own, with the variables of `stand.environment`: the stand-in package
takes the place of transformers there. ``SPOILED`` names a fault of `spoiled`, for the tests of the suite, and ``NAME``
the only tamperings.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.stress.dependencies import dependencies
from tests.stress.kills import kills
from tests.stress.result import Part
from tests.stress.spoiled import FAULTS
from tests.stress.tampering import tampering


def main(name: str, folder: str, count: str, seed: str, spoiled: str = "", *names: str) -> Part:
    """Run one part."""
    if spoiled:
        FAULTS[spoiled]()
    if name == "dependencies":
        return dependencies(Path(folder), int(count), int(seed))
    if name == "kills":
        return kills(Path(folder), int(count), int(seed))
    return tampering(Path(folder), int(count), int(seed), names)


if __name__ == "__main__":
    print(main(*sys.argv[1:]).to_json())
