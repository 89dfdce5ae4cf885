"""Fails if a file of the package is too long: `python -m scripts.file_lengths`, a part of `make lint`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Lines, docstrings and blank lines included. Ruff limits functions: 50 statements, 7 arguments.
LIMIT = 450


def main() -> int:
    """Print the files over the limit; return 1 if there are any."""
    lengths = {path: len(path.read_bytes().splitlines()) for path in (ROOT / "veomni_hook").rglob("*.py")}
    over = {path: length for path, length in lengths.items() if length > LIMIT}
    for path, length in sorted(over.items()):
        print(f"{path.relative_to(ROOT)}: {length} lines, {LIMIT} are allowed: split it by concept")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
