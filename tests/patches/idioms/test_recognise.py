from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.patches import doubling
from veomni_hook.errors import IdiomError
from veomni_hook.patches.idioms.recognise import IDIOMS, idioms, recognise
from veomni_hook.patches.idioms.site import Site
from veomni_hook.patches.idioms.view import ModuleView
from veomni_hook.patches.text.document import Document


def test_idioms_are_asked_in_their_order(idioms: Any) -> None:
    idioms(doubling.turn, doubling.double)
    found = [(site.op, site.target) for site in recognise(Document(doubling.UPSTREAM))]
    assert found == [
        ("turn", "Attention.forward"),
        ("double", "Double.forward"),
        ("double", "Triple.forward"),
    ]


def test_a_failing_idiom_is_named_with_the_module(idioms: Any) -> None:
    def broken(view: ModuleView) -> Iterator[Site]:
        raise KeyError("lost")
        yield

    idioms(doubling.double, broken)
    with pytest.raises(IdiomError, match=r"idiom_broken.*KeyError.*lost") as caught:
        recognise(Document("x = 1\n", "pkg.broken"))
    assert caught.value.where == "pkg.broken" and isinstance(caught.value.__cause__, KeyError)


def test_every_idiom_says_what_it_is_for() -> None:
    assert len(idioms()) == len(IDIOMS)
    for idiom in idioms():
        assert idiom.OP and idiom.CANDIDATES and callable(idiom.find), idiom.__name__
