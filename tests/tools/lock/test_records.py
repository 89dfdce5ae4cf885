from __future__ import annotations

import pytest

from veomni_hook.errors import LockError
from veomni_hook.tools.lock import dumps, loads

from .conftest import NORM, lock_of


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
