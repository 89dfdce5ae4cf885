"""Models inside a model of a generated file: of its own classes, not of those that transformers lists."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.tree import calls_in

__all__ = ["made_here", "veomni_from_config"]

#: The package of transformers whose classes choose a model's class by its config, and their method.
_AUTO, _METHOD = "transformers.models.auto", "from_config"


def veomni_from_config(auto: Any, config: Any, **options: Any) -> Any:
    """Return ``auto.from_config(config)``, of this file's class if it has one of the name that auto takes."""
    if type(config) in auto._model_mapping:
        listed = auto._model_mapping[type(config)]
        classes = listed if isinstance(listed, tuple) else (listed,)
        own = tuple(globals().get(one.__name__, one) for one in classes)
        if own != classes:
            mapping = {type(config): own if isinstance(listed, tuple) else own[0]}
            auto = type(auto.__name__, (auto,), {"_model_mapping": mapping})
    return auto.from_config(config, **options)


def made_here(document: Document) -> tuple[list[Edit], str]:
    """Return the edits that let a file with absolute imports make its own classes, and their function."""
    autos = {
        alias.asname or alias.name
        for node in document.tree.body
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{_AUTO}.")
        for alias in node.names
    }
    edits: list[Edit] = []
    for call in calls_in(document.tree):
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr), args=[first, *_]):
                if attr == _METHOD and name in autos:
                    start, end = document.start(call.func), document.end(call.func)
                    edits.append(Edit(start, end, veomni_from_config.__name__))
                    edits.append(Edit(document.start(first), document.start(first), f"{name}, "))
    function = inspect.getsource(veomni_from_config).replace(": Any", "").replace(" -> Any", "")
    return edits, function.rstrip("\n") if edits else ""
