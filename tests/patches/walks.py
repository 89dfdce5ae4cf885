"""Counts the files of the package that run, for `test_walks`: `python -m tests.patches.walks NAME`."""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import veomni_hook
from tests.patches.upstream import source_of

_ROOT = Path(veomni_hook.__file__).parent
_MODULE = "transformers.models.qwen3.modeling_qwen3"


def entered(run: Callable[[], object]) -> list[str]:
    """Return the files of the package in which `run` enters a function or a module's text."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{_ROOT}/"):
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return sorted(str(Path(file).relative_to(_ROOT)) for file in files)


def upstream() -> str:
    """Return the text of a module of upstream."""
    return source_of("qwen3")


def norms(*, spliced: bool) -> list[str]:
    """From a module's text to the sites of its RMSNorms, or to the text in which they ask slots."""
    from veomni_hook.patches.code.document import Document
    from veomni_hook.patches.engine import Origin, patch_source
    from veomni_hook.patches.idioms import recognise
    from veomni_hook.patches.idioms import rms_norm as idiom
    from veomni_hook.patches.routes.view import ModuleView, settled

    text = upstream()
    recognise.idioms = lambda *_: (idiom,)
    if spliced:
        origin = Origin(_MODULE, "modeling_qwen3.py", "transformers", "5")
        return entered(lambda: patch_source(text, [], origin, idioms=True))

    def sites() -> object:
        view = ModuleView(Document(text, _MODULE))
        return [*settled(view, idiom.find(view))]

    return entered(sites)


def idioms() -> list[str]:
    """From a module's text to the sites of all idioms."""
    from veomni_hook.patches.code.document import Document
    from veomni_hook.patches.idioms import recognise

    recognise.every_idiom()
    text = upstream()
    return entered(lambda: recognise.recognise(Document(text, _MODULE)))


def cold() -> list[str]:
    """What an import enters that finds nothing in the cache."""
    return entered(lambda: [import_module(name) for name in ("veomni_hook.install", _MODULE)])


WALKS: dict[str, Callable[[], list[str]]] = {
    "norm": lambda: norms(spliced=False),
    "norm to splice": lambda: norms(spliced=True),
    "idioms": idioms,
    "cold import": cold,
}

if __name__ == "__main__":
    json.dump(WALKS[sys.argv[1]](), sys.stdout)
