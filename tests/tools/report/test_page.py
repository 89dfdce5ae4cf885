"""What templates make of texts: escaped once, markup never, and what HTML cannot hold is spelled out."""

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from veomni_hook.tools.report.page import page, text


def test_text_is_escaped_once_and_markup_never():
    assert text('a < b & "c"') == "a &lt; b &amp; &#34;c&#34;"
    assert text(Markup("<hr>")) == "<hr>" and text(None) == ""


def test_characters_that_html_cannot_hold_or_that_reorder_lines_are_spelled_out():
    fit = "a\\u0000b\\u001b\\ud800\\u202e\\u2066c\td\n\\u000c"
    assert text("a\x00b\x1b\ud800\u202e\u2066c\td\n\x0c") == fit
    shown = page("page.html", title="<\ud800\u202e>", lead=None, contents=())
    assert shown.count("&lt;\\ud800\\u202e&gt;") == 2
    shown.encode("utf-8")


def test_a_value_that_is_not_given_is_an_error():
    with pytest.raises(UndefinedError, match="lead"):
        page("page.html", title="a", contents=())
