import pytest
from hypothesis import given
from hypothesis import strategies as st

from veomni_hook.patches.code.edit import Edit, apply_edits, one_line, place_edits


@st.composite
def sources_and_edits(draw):
    source = draw(st.text(max_size=40))
    marks = sorted(draw(st.lists(st.integers(0, len(source)), max_size=12)))
    ranges = list(zip(marks[::2], marks[1::2], strict=False))
    edits = [Edit(start, end, draw(st.text(max_size=5)), draw(st.integers(-1, 3))) for start, end in ranges]
    return source, edits


@given(sources_and_edits(), st.randoms())
def test_order_does_not_matter_where_offsets_differ(given, random):
    source, edits = given
    distinct = list({edit.start: edit for edit in edits}.values())
    expected = apply_edits(source, distinct)
    random.shuffle(distinct)
    assert apply_edits(source, distinct) == expected


@given(sources_and_edits())
def test_placed_ranges_hold_the_texts_and_the_rest_is_the_source(given):
    source, edits = given
    text, placed = place_edits(source, edits)
    assert sorted(map(hash, edits)) == sorted(hash(one.edit) for one in placed)
    kept_before, kept_after, position, origin = "", "", 0, 0
    for one in placed:
        assert text[one.start : one.end] == one.edit.text
        kept_after += text[position : one.start]
        kept_before += source[origin : one.edit.start]
        position, origin = one.end, one.edit.end
    assert kept_after + text[position:] == kept_before + source[origin:]


def test_insertions_at_one_offset_keep_their_order_and_precede_a_replacement():
    edits = [Edit(1, 2, "X"), Edit(1, 1, "1"), Edit(1, 1, "2"), Edit(2, 2, "3")]
    assert apply_edits("abc", edits) == "a12X3c"


def test_markers_can_be_left_out():
    edits = [Edit(0, 0, "# m\n", marker=True), Edit(0, 1, "b")]
    assert apply_edits("a\n", edits) == "# m\nb\n"
    assert apply_edits("a\n", edits, markers=False) == "b\n"


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        ([Edit(0, 2, ""), Edit(1, 3, "")], "overlaps"),
        ([Edit(0, 2, ""), Edit(1, 1, "x")], "overlaps"),
        ([Edit(3, 5, "")], "outside"),
        ([Edit(2, 1, "")], "outside"),
    ],
)
def test_ranges_that_overlap_or_are_outside_are_refused(edits, reason):
    with pytest.raises(ValueError, match=reason):
        apply_edits("abcd", edits)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("two\n  lines\t\tand more ", "two lines and more"),
        ("a\x0cb\x00c\u2028d\x1b[0m", "a b c d [0m"),
        ("drop @use_experts_implementation here", "drop use_experts_implementation here"),
    ],
)
def test_one_line(text, line):
    assert one_line(text) == line
    assert one_line(line) == line
