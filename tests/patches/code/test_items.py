from __future__ import annotations

import ast

from hypothesis import given
from hypothesis import strategies as st

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import Edit, apply_edits
from veomni_hook.patches.code.items import remove_items

gaps = st.sampled_from(["", " ", "\n", "\n    ", "  # c,\n", "\n# own line\n  "])


@st.composite
def lists(draw: st.DrawFn) -> tuple[str, int]:
    count = draw(st.integers(1, 5))
    pieces = [f"{draw(gaps)}'{n}'{draw(gaps)}" for n in range(count)]
    last = draw(st.sampled_from([",", ""] if count > 1 else [","]))
    return ",".join(pieces) + last + draw(gaps), count


@given(lists(), st.sampled_from("[("), st.data())
def test_what_is_left_is_what_was_not_dropped(
    made: tuple[str, int], bracket: str, data: st.DataObject
) -> None:
    text, count = made
    source = f"x = {bracket}{text}{')' if bracket == '(' else ']'}\n"
    document = Document(source)
    value = document.tree.body[0].value  # type: ignore[attr-defined]
    dropped = data.draw(st.sets(st.integers(0, count - 1)))
    splices = remove_items(document, value.elts, dropped, lone_comma=bracket == "(")
    result = apply_edits(source, [Edit(*splice) for splice in splices] if dropped else [])
    left = [str(n) for n in range(count) if n not in dropped]
    assert list(ast.literal_eval(result.removeprefix("x = "))) == left
    assert isinstance(ast.parse(result).body[0].value, type(value))  # type: ignore[attr-defined]
    assert result.count("# own line") == source.count("# own line")
