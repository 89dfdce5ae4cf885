import pytest

from veomni_hook.layout import counted, fields, paragraphs, table

HEADERS = ("name", "first", "second", "third")
ROWS = [("a" * 20, "b" * 10, "c" * 10, "1.5 ms, 20 %")]


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 modules"), (1, "1 module"), (2, "2 modules"), (12345, "12,345 modules")]
)
def test_a_count_has_the_right_noun(count, said):
    assert counted(count, "module") == said
    assert counted(1, "family", "families") == "1 family" and counted(2, "family", "families") == "2 families"


def lines(width, **options):
    return [line.text for line in table(HEADERS, ROWS, width, **options)]


def test_columns_are_left_out_from_the_last_and_only_if_that_is_enough():
    optional = ("second", "first")
    assert len(lines(58, optional=optional)) == len(lines(None)) == 2
    assert lines(50, optional=optional) == [
        "name                  second      third",
        "aaaaaaaaaaaaaaaaaaaa  cccccccccc  1.5 ms, 20 %",
        "not shown at this width: first",
    ]
    assert lines(40, optional=optional)[-1] == "not shown at this width: second, first"
    assert (
        lines(30, optional=optional)
        == lines(30)
        == [
            "name    aaaaaaaaaaaaaaaaaaaa",
            "first   bbbbbbbbbb",
            "second  cccccccccc",
            "third   1.5 ms, 20 %",
        ]
    )


def test_wide_columns_share_a_wide_terminal_and_the_headers_are_marked():
    found = table(("op", "reason", "more"), [("x", "word " * 20, "and " * 30)], 100)
    assert [line.head for line in found] == [True] + [False] * (len(found) - 1)
    assert 2 < len(found) < 5 and max(len(line.text) for line in found) <= 100
    assert "".join(line.text for line in found).count("word") == 20


def test_a_word_too_long_for_columns_makes_blocks():
    found = table(("op", "reason"), [("x", "y" * 120), ("z", "-"), ("", "w")], 110)
    assert [line.text for line in found] == [
        *("op      x", f"reason  {'y' * 120}"),
        *("", "op      z", "", "reason  w"),
    ]
    assert [line.head for line in found] == [True, False, False, True, False, True]


def test_a_figure_stays_with_its_unit():
    assert paragraphs("aaaa 1.5 ms", 9) == "aaaa\n  1.5 ms"
    assert paragraphs("  aaaa 3 modules", 9) == "  aaaa 3\n    modules"


def test_a_value_without_room_goes_below_its_name():
    assert fields({"a long name": "word " * 4}, 30) == "  a long name\n      word word word word\n"
    assert fields({"a": "word " * 8, "bc": ""}, 30) == (
        "  a   word word word word word\n      word word word\n  bc\n"
    )
    assert fields({}) == ""
