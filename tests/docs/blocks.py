"""Runs the Python blocks of documents: `python -m tests.docs.blocks FILE...`; prints what failed, exits with 1.

The blocks of one document run from top to bottom in one namespace, which holds `tests.docs.names` to begin with. A
block that cannot run here says so on the line above it: `<!-- not run: it needs a GPU -->`.
"""

from __future__ import annotations

import linecache
import re
import sys
import traceback
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

#: What `dump` prints is no script of its own; tests/test_readme.py compares it.
LISTING = "# [MODIFIED "

_BLOCK = re.compile(r"(?ms)^(?P<marker><!-- not run:(?P<reason>.*?)-->\s*?\n)?```python\n(?P<code>.*?)^```$")


def blocks(document: str) -> Iterator[tuple[int, str, str | None]]:
    """Yield the first line's number, the code, and why it is not run, of each block at the left margin."""
    for found in _BLOCK.finditer(document):
        reason = None if found["reason"] is None else found["reason"].strip()
        yield document.count("\n", 0, found.start("code")) + 1, found["code"], reason


def failures(path: Path, scope: dict[str, object]) -> Iterator[str]:
    """Run the blocks of a document, and yield a message for each that fails or is left out without a reason."""
    module = types.ModuleType(f"document_{path.stem.replace('-', '_')}")
    module.__dict__.update(scope)
    sys.modules[module.__name__] = module
    for line, code, reason in blocks(path.read_text(encoding="utf-8")):
        if reason is not None or LISTING in code:
            if reason == "":
                yield f"{path}:{line}: `not run` has no reason"
            continue
        # The code's lines have the numbers that they have in the document, and `inspect.getsource` finds them.
        name, text = f"{path}:{line}", "\n" * (line - 1) + code
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        module.__file__ = name
        try:
            exec(compile(text, name, "exec", dont_inherit=True), module.__dict__)
        except Exception:
            yield f"{path}:{line}:\n{traceback.format_exc(limit=-3)}"


def main() -> int:
    """Run the documents in the arguments, in the working directory, with the hook on."""
    from veomni_hook import VeomniHookWarning, activate

    activate()
    warnings.simplefilter("error", VeomniHookWarning)
    from tests.docs.names import names, save_checkpoint

    save_checkpoint()
    found = [message for path in sys.argv[1:] for message in failures(Path(path), names())]
    print("\n".join(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
