from __future__ import annotations

import json

import pytest

from veomni_hook.errors import LockError
from veomni_hook.tools.lock import dumps, loads

from .conftest import NORM, lock_of


def test_a_lock_survives_its_file() -> None:
    lock = lock_of({"m": NORM, "n": NORM})
    assert loads(dumps(lock), "here") == lock


def test_the_file_has_the_upstream_text_line_by_line_and_no_order_of_chance() -> None:
    text = dumps(lock_of({"n": NORM, "m": NORM}))
    assert text == dumps(lock_of({"m": NORM, "n": NORM}))
    lines = [line.strip() for line in text.splitlines()]
    assert '"def forward(self, x):",' in lines and '"    y = double(x)",' in lines
    assert json.loads(text)["schema"] == 1


def test_what_only_the_installed_state_has_is_not_written() -> None:
    assert "unrouted" not in dumps(lock_of({"m": NORM.replace("*", "/")}))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no lock"),
        ("[]", "no lock"),
        ("{}", "no lock"),
        ('{"schema": 2}', "schema 2; this release of veomni-hook reads schema 1"),
        ('{"schema": 1}', "damaged"),
        (
            '{"schema": 1, "transformers": "5", "engine": "e", "families": [], "modules": {"m": {}}}',
            "damaged",
        ),
        ('{"schema": 1, "transformers": "5", "engine": "e", "families": [], "modules": []}', "damaged"),
    ],
)
def test_another_file_is_refused_with_what_to_do(text: str, said: str) -> None:
    with pytest.raises(LockError) as caught:
        loads(text, "some.lock")
    assert said in caught.value.what and caught.value.where == "some.lock"
    assert "--write-lock" in caught.value.fix
