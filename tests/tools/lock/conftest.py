"""Fixtures: locks of small modules, made with the idiom of `tests.patches.fake_idiom`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.patches import fake_idiom
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms import recognise
from veomni_hook.patches.spec import PatchConfig
from veomni_hook.tools.lock import Change, Lock, compare, dumps, loads, overrides_of, snapshot

NORM = """
def double(x):
    return 2 * x


class Norm:
    def forward(self, x):
        # a comment
        y = double(x)
        return self.scale * y
"""


@pytest.fixture(autouse=True)
def idiom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognise, "idioms", lambda *_: (fake_idiom.module(),))


def lock_of(
    sources: dict[str, str],
    *configs: PatchConfig,
    release: str = "5.1.0",
    engine: str = "e",
    old: Lock | None = None,
) -> Lock:
    """The lock of modules given as text; ``old`` is the state to compare it with."""
    modules = {}
    for name, text in sources.items():
        held = old.modules.get(name) if old is not None else None
        known = {target: body.fingerprint for target, body in held.bodies.items()} if held else {}
        modules[name] = snapshot(
            name, text, overrides=overrides_of(configs, Document(text, name)), known=known
        )
    return Lock(release, engine, (), modules)


Compare = Callable[..., list[Change]]


@pytest.fixture
def after() -> Compare:
    """Compare module `m` with text ``NORM`` (or ``before``) and a changed text, through the file format."""

    def changes(
        text: str | dict[str, str],
        *configs: PatchConfig,
        before: str | dict[str, str] = NORM,
        engine: str = "e",
    ) -> list[Change]:
        first = {"m": before} if isinstance(before, str) else before
        second = {"m": text} if isinstance(text, str) else text
        old = loads(dumps(lock_of(first, *configs)), "the test")
        new = lock_of(second, *configs, release="5.2.0", engine=engine, old=old)
        return compare(old, replace(new, modules={k: v for k, v in new.modules.items()}))

    return changes
