"""Every tampering that docs/security.md lists is a miss with a reason, and never code that runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.cache.tampering import FORGERIES, OF_ANOTHER_USER, TAMPERINGS, Stored
from veomni_hook.cache.store import Hit, Miss

from .conftest import KEY, MODULE, inputs_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"


@pytest.mark.parametrize("name", [*TAMPERINGS, *OF_ANOTHER_USER])
def test_it_is_noticed(store, root, publish, name):
    if name in OF_ANOTHER_USER and os.geteuid() != 0:
        pytest.skip("only the superuser can give files away")
    stored = Stored.of(root, publish.hit(store).path, KEY)
    assert isinstance(store.lookup(KEY, MODULE), Hit)
    {**TAMPERINGS, **OF_ANOTHER_USER}[name](stored)
    found = store.lookup(KEY, MODULE)
    assert isinstance(found, Miss)
    assert str(root) in found.reason


def test_a_changed_or_missing_config_is_noticed(store, publish, tmp_path):
    config = tmp_path / "config.py"
    config.write_text("one\n")
    publish.hit(store, inputs=inputs_of(config))
    config.write_text("two\n")
    found = store.lookup(KEY, MODULE)
    assert isinstance(found, Miss) and "has changed" in found.reason
    config.unlink()
    found = store.lookup(KEY, MODULE)
    assert isinstance(found, Miss) and "is gone" in found.reason


def test_a_forger_is_not_noticed(store, root, publish):
    """The document says so; if this fails one day, the document is to be corrected."""
    stored = Stored.of(root, publish.hit(store).path, KEY)
    FORGERIES["bytecode-forged"](stored)
    found = store.lookup(KEY, MODULE)
    assert isinstance(found, Hit)
    names: dict[str, object] = {}
    exec(found.code, names)
    assert names["FORGED"] is True


def test_the_document_lists_them_all():
    text = DOCUMENT.read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE)
    assert listed == list(dict.fromkeys(listed))
    inputs = {
        "config-changed",
        "config-removed",
    }  # of the files that configs were read from, not of the cache
    assert {*listed} == {*TAMPERINGS, *OF_ANOTHER_USER, *inputs, *FORGERIES}
