"""Random other spellings of a definition: torch's calls in other words, and the rewrites of `tests.rehearsal`.

Most mean the same, some nearly; nothing depends on it, for what is compared is the spelled text, unpatched and
patched.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator

from tests.proof.mutants import _places, bodies, find
from tests.rehearsal.kinds import KINDS, rewritten

_FUNCTIONAL = ("F", "nn.functional", "torch.nn.functional", "functional", "fn")
#: Functions of torch that are also methods of their first argument.
_METHODS = frozenset(
    "rsqrt sqrt sigmoid tanh clamp chunk softmax unsqueeze matmul square abs exp neg mean sum topk gather mul add "
    "reciprocal flatten transpose split unbind repeat_interleave".split()
)
#: Patterns of a whole expression, and what else may be written for it; ``\\1`` is a group.
_PATTERNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"(.+)\.float\(\)", (r"\1.to(torch.float32)", r"\1.to(dtype=torch.float32)", r"\1.type(torch.float32)")),
    (r"(.+)\.to\(torch\.float32\)", (r"\1.float()", r"\1.to(dtype=torch.float32)", r"\1.to(torch.float)")),
    (r"(.+)\.to\((\w+)\.dtype\)", (r"\1.type_as(\2)", r"\1.to(dtype=\2.dtype)", r"\1.type(\2.dtype)")),
    (r"(.+)\.type_as\((\w+)\)", (r"\1.to(\2.dtype)",)),
    (r"(\w+)\.pow\(2\)", (r"\1 * \1", r"\1 ** 2", r"torch.pow(\1, 2)", r"torch.square(\1)", r"\1.square()", r"\1.pow(2.0)")),
    (r"(\w+)\.square\(\)", (r"\1 * \1", r"\1 ** 2", r"\1.pow(2)", r"torch.square(\1)")),
    (r"(.+)\.mean\(-1, keepdim=True\)", (
        r"\1.mean(dim=-1, keepdim=True)", r"torch.mean(\1, dim=-1, keepdim=True)", r"\1.mean(-1, True)",
        r"\1.mean((-1,), keepdim=True)", r"torch.mean(\1, -1, keepdim=True)", r"\1.mean(axis=-1, keepdim=True)")),
    (r"(.+)\.mean\(dim=-1, keepdim=True\)", (r"\1.mean(-1, keepdim=True)", r"torch.mean(\1, -1, True)")),
    (r"torch\.rsqrt\((.+)\)", (r"(\1).rsqrt()", r"(\1) ** -0.5", r"torch.pow(\1, -0.5)", r"1 / torch.sqrt(\1)", r"torch.reciprocal(torch.sqrt(\1))")),
    (r"torch\.cat\(\((.+)\), dim=-1\)", (r"torch.cat([\1], dim=-1)", r"torch.cat((\1), -1)", r"torch.concat((\1), dim=-1)", r"torch.cat(tensors=(\1), dim=-1)", r"torch.hstack((\1))")),
    (r"torch\.stack\(\((.+)\), dim=-1\)", (r"torch.stack([\1], dim=-1)", r"torch.stack((\1), -1)")),
    (r"(\w+)\.unsqueeze\((\w+)\)", (r"torch.unsqueeze(\1, \2)", r"\1.unsqueeze(dim=\2)")),
    (r"(.+)\.chunk\(2, dim=-1\)", (r"torch.chunk(\1, 2, dim=-1)", r"\1.chunk(2, -1)", r"\1.tensor_split(2, dim=-1)")),
    (r"(.+)\.shape\[-1\]", (r"\1.size(-1)", r"\1.size()[-1]")),
    (r"(.+)\.clamp\(max=(.+)\)", (r"torch.clamp(\1, max=\2)", r"\1.clamp(None, \2)", r"\1.clip(max=\2)")),
    (r"(.+)\.clamp\(min=(.+), max=(.+)\)", (r"\1.clamp(\2, \3)", r"torch.clamp(\1, \2, \3)")),
    (r"(?:F|nn\.functional|fn)\.silu\((\w+)\)", (r"\1 * torch.sigmoid(\1)", r"torch.nn.functional.silu(\1)", r"nn.SiLU()(\1)")),
    (r"(?:F|functional)\.softmax\((.+), dim=-1\)", (r"torch.softmax(\1, dim=-1)", r"(\1).softmax(-1)", r"F.softmax(\1, -1)")),
    (r"(.+) / (.+)", (r"torch.div(\1, \2)", r"\1 * (1 / \2)")),
    (r"-([a-z]\w*)", (r"\1 * -1", r"torch.neg(\1)", r"0 - \1")),
    (r"(.+)\[\.\.\., (.+)\]", (r"\1[:, ..., \2]",)),
)  # fmt: skip
#: The rewrites that leave whoever calls the module alone, and add no other module.
_REWRITES = sorted(KINDS.keys() - {"unparsed", "helpers moved", "parameters renamed", "arguments reordered"})


def respelled(source: str, target: str, draw: random.Random, changes: int) -> str:
    """`source` with some definitions spelled anew: the target's, or one that it uses, `changes` times."""
    names = [name for name in bodies(source, target) if not name.endswith(".__init__")]
    for _ in range(changes):
        if draw.random() < 0.4:
            source = rewritten(draw.choice(_REWRITES), "generated", source, draw.random())["generated"]
            continue
        tree = ast.parse(source)
        # A rewrite may have split a method, or put a helper where it is called.
        if (function := find(tree, draw.choice(names))) is not None:
            draw.choice((_in_other_words, _in_other_words, _as_function, _commuted))(function, draw)
            source = ast.unparse(ast.fix_missing_locations(tree))
    return source


def _expressions(function: ast.FunctionDef) -> Iterator[tuple[ast.expr, Callable[[ast.AST], None]]]:
    """Expressions that are read, and how to put others into their places."""
    for node, put, is_callee in _places(function):
        if is_callee or not isinstance(
            node, ast.Call | ast.BinOp | ast.UnaryOp | ast.Subscript | ast.Attribute
        ):
            continue
        if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            continue
        yield node, put


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None


def _in_other_words(function: ast.FunctionDef, draw: random.Random) -> None:
    options = []
    for node, put in _expressions(function):
        text = ast.unparse(node)
        for pattern, others in _PATTERNS:
            # A whole operand only: `a * b.float()` is not `(a * b).float()`.
            if (match := re.fullmatch(pattern, text)) and all(_parsed(group) for group in match.groups()):
                made = _parsed(match.expand(draw.choice(others)))
                if made is not None and type(node) is type(_parsed(text)) and _whole(match, node):
                    options.append((put, made))
    if options:
        put, made = draw.choice(options)
        put(made)


def _whole(match: re.Match[str], node: ast.expr) -> bool:
    """Whether the first group is an operand of the node itself and not a part of one."""
    first = match.group(1)
    return any(ast.unparse(one) == first for one in ast.walk(node)) or "," in first


def _commuted(function: ast.FunctionDef, draw: random.Random) -> None:
    found = [
        n
        for n, _ in _expressions(function)
        if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult | ast.Add)
    ]
    if found:
        node = draw.choice(found)
        node.left, node.right = node.right, node.left


def _as_function(function: ast.FunctionDef, draw: random.Random) -> None:
    """``a * b`` as ``torch.mul(a, b)``, ``x.f(...)`` as ``torch.f(x, ...)``, and the other way round."""
    options = []
    for node, put in _expressions(function):
        if isinstance(node, ast.BinOp) and type(node.op) in (ast.Mult, ast.Add, ast.Sub):
            if not isinstance(node.left, ast.Constant) and not isinstance(node.right, ast.Constant):
                name = {ast.Mult: "mul", ast.Add: "add", ast.Sub: "sub"}[type(node.op)]
                left, right = ast.unparse(node.left), ast.unparse(node.right)
                options.append(
                    (put, draw.choice((f"torch.{name}({left}, {right})", f"({left}).{name}({right})")))
                )
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS
        ):
            home = ast.unparse(node.func.value)
            rest = [ast.unparse(one) for one in (*node.args, *node.keywords)]
            if home == "torch" and node.args:
                options.append((put, f"({rest[0]}).{node.func.attr}({', '.join(rest[1:])})"))
            elif home not in ("torch", *_FUNCTIONAL):
                options.append((put, f"torch.{node.func.attr}({', '.join([home, *rest])})"))
    if options:
        put, text = draw.choice(options)
        if (made := _parsed(text)) is not None:
            put(made)
