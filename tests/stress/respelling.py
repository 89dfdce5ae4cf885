"""Random other spellings of a definition: names, methods and functions, operands, temporaries, helpers, keywords.

Most mean the same, some nearly; nothing depends on it, for what is compared is the spelled text, unpatched and
patched.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator

from tests.proof.mutants import _places, bodies, find

__all__ = ["respelled"]

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
_WORDS = "a b c d e g h m n p r s t u v w y z inner state values left right part result total factor scaled".split()


def respelled(source: str, target: str, draw: random.Random, changes: int) -> str:
    """`source` with some definitions spelled anew: the target's, or one that it uses, `changes` times."""
    names = [name for name in bodies(source, target) if not name.endswith(".__init__")]
    tree = ast.parse(source)
    for _ in range(changes):
        function = find(tree, draw.choice(names))
        assert function is not None
        draw.choice(_KINDS)(tree, function, draw)
    return ast.unparse(ast.fix_missing_locations(tree))


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


def _in_other_words(tree: ast.Module, function: ast.FunctionDef, draw: random.Random) -> None:
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


def _commuted(tree: ast.Module, function: ast.FunctionDef, draw: random.Random) -> None:
    found = [
        n
        for n, _ in _expressions(function)
        if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult | ast.Add)
    ]
    if found:
        node = draw.choice(found)
        node.left, node.right = node.right, node.left


def _as_function(tree: ast.Module, function: ast.FunctionDef, draw: random.Random) -> None:
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


def _renamed(tree: ast.Module, function: ast.FunctionDef, draw: random.Random) -> None:
    """Another name for a local; of parameters only where nobody gives them by name."""
    stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    parameters = {a.arg for a in function.args.args} - {"self"}
    by_name = {k.arg for n in ast.walk(tree) if isinstance(n, ast.Call) for k in n.keywords}
    mine = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)} | parameters
    names = sorted((stored | parameters) - by_name)
    free = [word for word in _WORDS if word not in mine]
    if names and free:
        old, new = draw.choice(names), draw.choice(free)
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id == old:
                node.id = new
            elif isinstance(node, ast.arg) and node.arg == old:
                node.arg = new


def _blocks(function: ast.FunctionDef) -> list[list[ast.stmt]]:
    found = [getattr(n, field, None) for n in ast.walk(function) for field in ("body", "orelse")]
    return [block for block in found if isinstance(block, list) and block and isinstance(block[0], ast.stmt)]


def _temporary(tree: ast.Module, function: ast.FunctionDef, draw: random.Random) -> None:
    """A part of a statement, computed before it under a name."""
    block = draw.choice(_blocks(function))
    index = draw.randrange(len(block))
    statement = block[index]
    if not isinstance(statement, ast.Assign | ast.Return | ast.AugAssign):
        return
    holder = ast.FunctionDef("holder", ast.arguments([], [], None, [], [], None, []), [statement], [])
    parts = list(_expressions(holder))
    free = [
        word for word in _WORDS if word not in {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
    ]
    if parts and free:
        node, put = draw.choice(parts)
        name = draw.choice(free)
        put(ast.Name(name, ast.Load()))
        block.insert(index, ast.Assign([ast.Name(name, ast.Store())], node))


def _inlined(tree: ast.Module, function: ast.FunctionDef, draw: random.Random) -> None:
    """A name's value in its place, where the name is bound once and read once, in the next statement."""
    for block in _blocks(function):
        for index, statement in enumerate(block[:-1]):
            if not (isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)):
                continue
            name = statement.targets[0].id
            uses = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == name]
            there = [n for n in ast.walk(block[index + 1]) if isinstance(n, ast.Name) and n.id == name]
            if len(uses) == 2 and len(there) == 1 and isinstance(block[index + 1], ast.Assign | ast.Return):
                holder = ast.FunctionDef(
                    "holder", ast.arguments([], [], None, [], [], None, []), [block[index + 1]], []
                )
                for node, put, _ in _places(holder):
                    if node is there[0]:
                        put(statement.value)
                        del block[index]
                        return


def _helper(tree: ast.Module, function: ast.FunctionDef, draw: random.Random) -> None:
    """A part of a statement as a function of the module, or as a method where it reads ``self``."""
    parts = [(node, put) for node, put in _expressions(function) if not isinstance(node, ast.Attribute)]
    if not parts:
        return
    node, put = draw.choice(parts)
    if any(
        isinstance(n, ast.Lambda | ast.GeneratorExp | ast.ListComp | ast.NamedExpr) for n in ast.walk(node)
    ):
        return
    bound = {a.arg for a in (*function.args.args, *function.args.kwonlyargs)}
    bound |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    read = dict.fromkeys(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in bound)
    name = f"_helper{sum(1 for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))}"
    owner = next((c for c in tree.body if isinstance(c, ast.ClassDef) and function in c.body), None)
    given = [one for one in read if one != "self"]
    text = ast.unparse(node)
    if "self" in read and owner is not None:
        owner.body.append(ast.parse(f"def {name}(self, {', '.join(given)}):\n    return {text}").body[0])
        put(ast.parse(f"self.{name}({', '.join(given)})", mode="eval").body)
    elif "self" not in read:
        at = tree.body.index(owner if owner is not None else function)
        tree.body.insert(at, ast.parse(f"def {name}({', '.join(given)}):\n    return {text}").body[0])
        put(ast.parse(f"{name}({', '.join(given)})", mode="eval").body)


def _noise(tree: ast.Module, function: ast.FunctionDef, draw: random.Random) -> None:
    """A statement that changes nothing: a text, an annotation, a name for a parameter."""
    names = [a.arg for a in function.args.args if a.arg != "self"]
    texts = ["'''What it computes.'''", "pass", "if torch.jit.is_scripting():\n    pass"]
    if names:
        one = draw.choice(names)
        texts += [
            f"{one} = {one}",
            f"{one}: torch.Tensor",
            f"device = {one}.device",
            f"assert {one} is not NotImplemented",
        ]
    function.body.insert(0, ast.parse(draw.choice(texts)).body[0])


def _returned(tree: ast.Module, function: ast.FunctionDef, draw: random.Random) -> None:
    """What is returned gets a name first."""
    last = function.body[-1]
    if isinstance(last, ast.Return) and last.value is not None:
        name = draw.choice(_WORDS)
        function.body[-1:] = [
            ast.Assign([ast.Name(name, ast.Store())], last.value),
            ast.Return(ast.Name(name, ast.Load())),
        ]


def _without_autocast(tree: ast.Module, function: ast.FunctionDef, draw: random.Random) -> None:
    """Some statements under a context that switches autocast off."""
    ends = [i for i, s in enumerate(function.body) if isinstance(s, ast.Return)]
    stop = ends[0] if ends else len(function.body)
    if stop:
        first = draw.randrange(stop)
        context = ast.parse("with torch.autocast(device_type='cpu', enabled=False):\n    pass").body[0]
        assert isinstance(context, ast.With)
        context.body = function.body[first:stop]
        function.body[first:stop] = [context]


#: Which changes are drawn, and how often; the last ones make most forms unknown to the idioms.
_KINDS = (
    *[_in_other_words] * 8, *[_commuted] * 5, *[_as_function] * 5, *[_renamed] * 5, *[_temporary] * 5, *[_inlined] * 3,
    *[_helper] * 3, *[_returned] * 2, _noise, _without_autocast,
)  # fmt: skip
