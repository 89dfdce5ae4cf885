from __future__ import annotations

from veomni_hook.tools.report.html import Html, code, join, link, tag, text


def test_text_is_escaped_once_and_markup_never():
    inner = code('a < b & "c"')
    assert inner == "<code>a &lt; b &amp; &quot;c&quot;</code>"
    assert tag("p", inner, " <", None, 3) == f"<p>{inner} &lt;3</p>"
    assert join(["<", Html("<hr>"), None], ", ") == "&lt;, <hr>"


def test_attributes():
    assert tag("td", class_="a", aria_label='"<', hidden=True, id=None, open=False, colspan=4) == (
        '<td class="a" aria-label="&quot;&lt;" hidden colspan="4"></td>'
    )
    assert tag("meta", http_equiv="x") == '<meta http-equiv="x">'
    assert link("there", "go") == '<a href="#there">go</a>'


def test_characters_that_html_cannot_hold_or_that_reorder_lines_are_spelled_out():
    assert (
        text("a\x00b\x1b\ud800\u202e\u2066c\td\n\x0c") == "a\\u0000b\\u001b\\ud800\\u202e\\u2066c\td\n\\u000c"
    )
    text("\ud800 \u202e").encode("utf-8")
