"""Digests of forms that do not depend on the names of arguments and attributes."""

from __future__ import annotations

from hashlib import blake2b

from veomni_hook.patches.graph.forms import Form
from veomni_hook.patches.graph.nodes import COMMUTATIVE, Node, walk

__all__ = ["digest"]

_NAMED = ("argument", "attribute")


def digest(form: Form | Node) -> str:
    """16 hexadecimal characters, the same for forms that are equal up to names of arguments and attributes.

    Names are removed before operands are sorted, so a new name cannot change the order. Arguments are
    distinguished by their order in the signature, attributes by their first occurrence in the form.
    """
    roots = (form.result, *form.effects) if isinstance(form, Form) else (form,)
    shapes: dict[bytes, bytes] = {}
    for root in roots:
        _shape(root, shapes)
    numbers: dict[bytes, int] = {}
    if isinstance(form, Form):
        used = [
            node for node in (Node("argument", (), name) for name in form.arguments) if node.key in shapes
        ]
        numbers = {node.key: number for number, node in enumerate(used)}
    done: dict[bytes, bytes] = {}
    text = b"".join(_numbered(root, shapes, numbers, done) for root in roots)
    return blake2b(text, digest_size=8).hexdigest()


def _shape(root: Node, shapes: dict[bytes, bytes]) -> None:
    """Store a digest without names for every node under ``root``."""
    todo = [root]
    while todo:
        node = todo[-1]
        missing = [argument for argument in node.args if argument.key not in shapes]
        if missing and node.key not in shapes:
            todo.extend(missing)
            continue
        todo.pop()
        if node.key not in shapes:
            parts = [shapes[argument.key] for argument in node.args]
            shapes[node.key] = _hashed(node, sorted(parts) if node.op in COMMUTATIVE else parts)


def _numbered(
    node: Node, shapes: dict[bytes, bytes], numbers: dict[bytes, int], done: dict[bytes, bytes]
) -> bytes:
    found = done.get(node.key)
    if found is None:
        if node.op in _NAMED:
            number = numbers.setdefault(node.key, len(numbers))
            found = f"{node.op} {number}".encode()
        else:
            args = list(node.args)
            if node.op in COMMUTATIVE:
                args.sort(key=lambda argument: shapes[argument.key])
                if len({shapes[argument.key] for argument in args}) < len(args):
                    # Equal except for names: operands whose names have numbers come in that order.
                    args.sort(key=lambda argument: sorted(_known(argument, numbers)))
            found = _hashed(node, [_numbered(argument, shapes, numbers, done) for argument in args])
        done[node.key] = found
    return found


def _known(node: Node, numbers: dict[bytes, int]) -> list[int]:
    return [numbers.get(inner.key, len(numbers)) for inner in walk(node) if inner.op in _NAMED]


def _hashed(node: Node, parts: list[bytes]) -> bytes:
    value = None if node.op in _NAMED else node.value
    return blake2b(f"{node.op} {value!a} {len(parts)} ".encode() + b"|".join(parts), digest_size=16).digest()
