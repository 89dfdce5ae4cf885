"""Pages from the templates of this package, by Jinja2, which torch brings.

Everything that is not markup is text: escaped, with the characters that HTML does not allow, or that reorder
others, spelled out.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.ext import Extension
from markupsafe import Markup, escape

from veomni_hook import __version__
from veomni_hook.layout import counted
from veomni_hook.printable import printable

__all__ = ["Entry", "page", "style", "text"]

#: One line of the contents: the id of a section, its name, and its subsections.
Entry = tuple[str, str, tuple["Entry", ...]]


def page(template: str, **values: object) -> str:
    """Return the page of a template that extends ``page.html``.

    Args:
        template: its name.
        values: what it shows: ``title``, ``lead``, ``contents`` (a sequence of `Entry`), and its own.
    """
    return _environment().get_template(template).render(values) + "\n"


def text(value: object) -> Markup:
    """Return text as markup."""
    return escape(_fit(value))


def style(name: str) -> Markup:
    """Return a style sheet of this package."""
    return Markup(files(__package__).joinpath(f"{name}.css").read_text(encoding="utf-8"))


def _fit(value: object) -> object:
    if isinstance(value, Markup):
        return value
    return "" if value is None else printable(str(value))


class _WithoutBreaks(Extension):
    """Removes line breaks and indentation from templates, not from what they show."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return re.sub(r"\n\s*", "", source)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_fit,
        extensions=[_WithoutBreaks],
    )
    environment.globals.update(style=style, version=__version__, counted=counted)
    return environment
