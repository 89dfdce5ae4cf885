"""The text of a loss guard: asks the slot and, if it has a kernel, ends the ``forward`` as upstream does."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit, reindent
from veomni_hook.patches.code.scope import bound_names, free_name
from veomni_hook.patches.code.wrap import WIDTH
from veomni_hook.patches.idioms.linear_cross_entropy.read import Tail
from veomni_hook.patches.routes.view import ModuleView

__all__ = ["guard", "operands"]

#: What needs brackets beside ``and``.
_LOOSE = (ast.BoolOp, ast.IfExp)


def operands(view: ModuleView, function: FunctionNode, tail: Tail) -> dict[str, str]:
    """The kernel's arguments, as source text by operand name.

    Keywords of ``function`` that the loss does not get are an option: they may ask for more than a loss.
    """
    texts = {name: _text(view, operand) for name, operand in tail.operands.items()}
    texts["loss_kwargs"] = _keywords(view, tail.keywords)
    options = [f"{name}={_text(view, value)}" for name, value in tail.transform.items()]
    if tail.before_head is not None:
        options.append(f"before_head={_text(view, tail.before_head)}")
    rest, passed = function.args.kwarg, any(keyword.arg is None for keyword in tail.keywords)
    if rest is not None and not passed and rest.arg not in bound_names(function.body):
        options.append(f"keywords={rest.arg}")
    if options:
        texts["options"] = f"dict({', '.join(options)})"
    return texts


def guard(view: ModuleView, function: FunctionNode, tail: Tail, slot: str, inside: Sequence[Edit]) -> str:
    """The statements of the guard, without indentation.

    Args:
        view: the module.
        function: the ``forward``.
        tail: what the reader found in it.
        slot: the name of the slot.
        inside: edits of other sites; they also apply to statements that the guard repeats.
    """
    asked, kernel, finish = (free_name(function, name) for name in ("asked", "kernel", "finish"))
    inner = [
        f"{tail.loss}, {tail.logits}, {finish} = {kernel}(*{asked})",
        *(_spliced(view, statement, inside) for statement in tail.copied),
        f"return {finish}({_spliced(view, tail.output, inside)})",
    ]
    lines = [
        f"{asked} = ({', '.join(['self', *operands(view, function, tail).values()])})",
        f"if ({kernel} := {slot}.kernel(*{asked})) is not None:",
        *(reindent(one, "", "    ") for one in inner),
    ]
    tests = [*tail.conditions, *tail.numbers]
    texts = [_text(view, test) for test in tests]
    if len(tests) > 1:
        texts = [
            f"({text})" if isinstance(test, _LOOSE) else text for test, text in zip(tests, texts, strict=True)
        ]
        # Brackets allow a long line to be wrapped.
        text = " and ".join(texts)
        texts = [f"({text})" if len(text) > WIDTH - 20 else text]
    if texts:
        lines = [f"if {texts[0]}:", *(reindent(one, "", "    ") for one in lines)]
    return "\n".join(lines)


def _keywords(view: ModuleView, keywords: Sequence[ast.keyword]) -> str:
    if not keywords:
        return "{}"
    if len(keywords) == 1 and keywords[0].arg is None:
        return _text(view, keywords[0].value)
    # A keyword added here is overridden by the caller's; one of upstream's together with the caller's raises.
    is_added = any(not hasattr(keyword, "lineno") for keyword in keywords)
    items = []
    for keyword in keywords:
        name = "**" if keyword.arg is None else f'"{keyword.arg}": ' if is_added else f"{keyword.arg}="
        items.append(name + _text(view, keyword.value))
    return f"{{{', '.join(items)}}}" if is_added else f"dict({', '.join(items)})"


def _text(view: ModuleView, node: ast.expr) -> str:
    """The text of an expression on one line: upstream's text, unless this package built the expression."""
    text = view.text(node) if hasattr(node, "lineno") else "\n"
    return ast.unparse(node) if "\n" in text else text


def _spliced(view: ModuleView, node: ast.stmt | ast.expr, inside: Sequence[Edit]) -> str:
    return reindent(view.edited(node, inside), view.document.indent(node), "")
