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
    unnamed: dict[bytes, bytes] = {}
    for root in roots:
        _digest_without_names(root, unnamed)
    numbers: dict[bytes, int] = {}
    if isinstance(form, Form):
        keys = (Node("argument", (), name).key for name in form.arguments)
        numbers = {key: number for number, key in enumerate(key for key in keys if key in unnamed)}
    done: dict[bytes, bytes] = {}
    text = b"".join(_numbered(root, unnamed, numbers, done) for root in roots)
    return blake2b(text, digest_size=8).hexdigest()


def _digest_without_names(root: Node, unnamed: dict[bytes, bytes]) -> None:
    """Store a digest without names for every node under ``root``."""
    todo = [root]
    while todo:
        node = todo[-1]
        missing = [argument for argument in node.args if argument.key not in unnamed]
        if missing and node.key not in unnamed:
            todo.extend(missing)
            continue
        todo.pop()
        if node.key not in unnamed:
            parts = [unnamed[argument.key] for argument in node.args]
            unnamed[node.key] = _hashed(node, sorted(parts) if node.op in COMMUTATIVE else parts)


def _numbered(
    node: Node, unnamed: dict[bytes, bytes], numbers: dict[bytes, int], done: dict[bytes, bytes]
) -> bytes:
    """The digest of a node with numbers instead of names; ``numbers`` gets those of new names."""
    result = done.get(node.key)
    if result is None:
        if node.op in _NAMED:
            number = numbers.setdefault(node.key, len(numbers))
            result = f"{node.op} {number}".encode()
        else:
            args = list(node.args)
            if node.op in COMMUTATIVE:
                args.sort(key=lambda argument: unnamed[argument.key])
                if len({unnamed[argument.key] for argument in args}) < len(args):
                    # Equal except for names: operands whose names have numbers come in that order.
                    args.sort(key=lambda argument: sorted(_numbers_in(argument, numbers)))
            result = _hashed(node, [_numbered(argument, unnamed, numbers, done) for argument in args])
        done[node.key] = result
    return result


def _numbers_in(node: Node, numbers: dict[bytes, int]) -> list[int]:
    return [numbers.get(inner.key, len(numbers)) for inner in walk(node) if inner.op in _NAMED]


def _hashed(node: Node, parts: list[bytes]) -> bytes:
    value = None if node.op in _NAMED else node.value
    return blake2b(f"{node.op} {value!a} {len(parts)} ".encode() + b"|".join(parts), digest_size=16).digest()
