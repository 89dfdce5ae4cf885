"""Fixtures: configs written to files, as users write them, and upstream modules given as text."""

import importlib.util
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from veomni_hook.patches.engine import Origin, PatchedSource, patch_source
from veomni_hook.patches.idioms import recognise
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site
from veomni_hook.patches.spec import PatchConfig

DATA = Path(__file__).parents[1] / "data"
ORIGIN = Origin("pkg.upstream", "/site/pkg/upstream.py", "pkg", "1.0")
HEAD = "from veomni_hook.patches.spec import *\nconfig = PatchConfig('pkg.upstream')\n"
#: A pattern for the end of a causal language model's forward.
LOSS_TAIL = """
    logits = self.lm_head({hidden})
    loss = None
    if labels is not None:
        loss = self.loss_function(logits=logits, labels=labels, **{loss_kwargs})
    return {output}(loss=loss, logits=logits, **{fields})
"""
_NUMBERS = itertools.count()


@pytest.fixture
def load(tmp_path):
    """Write code to a file and import it; it has a `config` unless the code creates its own."""
    names: list[str] = []

    def imported(code: str, *, head: str = HEAD) -> ModuleType:
        name = f"config_of_test_{next(_NUMBERS)}"
        path = tmp_path / f"{name}.py"
        path.write_text(head + textwrap.dedent(code), newline="")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        names.append(name)
        spec.loader.exec_module(module)
        return module

    yield imported
    for name in names:
        del sys.modules[name]


@pytest.fixture
def patched(load):
    """Patch upstream text with the code of a config, or with configs."""

    def patch(
        upstream: str, *configs: str | PatchConfig, device: str = "gpu", idioms: bool = False
    ) -> PatchedSource:
        made = [load(config).config if isinstance(config, str) else config for config in configs]
        return patch_source(upstream, made, ORIGIN, device=device, idioms=idioms)

    return patch


@pytest.fixture
def idioms(monkeypatch):
    """Replace the package's idioms by others, each given by its `find`."""

    def put(*finders: Callable[[ModuleView], Iterable[Site]]) -> None:
        found = tuple(SimpleNamespace(__name__=f"idiom_{find.__name__}", find=find) for find in finders)
        monkeypatch.setattr(recognise, "idioms", lambda *_: found)

    return put


@pytest.fixture
def run():
    """Execute a patched module with and without markers; return the namespace of the one with markers."""

    def execute(result: PatchedSource) -> dict[str, Any]:
        namespaces = []
        for text in (result.plain, result.text):
            namespace: dict[str, Any] = {"__name__": "pkg.upstream"}
            exec(compile(text, "upstream.py", "exec", dont_inherit=True), namespace)
            namespaces.append(namespace)
        return namespaces[-1]

    return execute


@pytest.fixture
def patchgen(monkeypatch):
    """The mock of the patchgen package, importable as `patchgen_double`."""
    monkeypatch.syspath_prepend(str(DATA))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "patchgen_double"]:
        del sys.modules[name]
