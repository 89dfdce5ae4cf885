"""Decays of linear attention: ``g = -exp(log_rate) * softplus(a + bias)``, in float32.

    beta = b.sigmoid()
    g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
      -> if (kernel := slot.kernel(self, a, self.A_log, self.dt_bias, b)) is not None:
             beta, g = kernel(a, self.A_log, self.dt_bias, b)

If another statement is between, or ``a`` is the result of a call, the decay alone goes to a kernel; the slot
is then asked with a tensor that the call gets.

A decay for each channel of a head: the last statements of a ``forward``, up to what it returns.

    g = (gate.float() + self.dt_bias.float().view(1, 1, -1)).view(shape)
    ...                                    -exp(log_rate) * softplus(g), or lower * sigmoid(exp(log_rate) * g)
      -> if (kernel := slot.kernel(self, gate, self.A_log, self.dt_bias, None, False, None)) is not None:
             return kernel(gate.reshape(shape), self.A_log, self.dt_bias, None, False, None)

A test of ``self`` may choose between the two. Kernels check that the parameters fit the heads and channels.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from veomni_hook.patches.code.scope import loaded
from veomni_hook.patches.code.statement_runs import Run, at_hand, simple_target
from veomni_hook.patches.code.tree import (
    blocks,
    called_attributes,
    calls_in,
    last_name,
    own_attribute,
    walk_ast,
)
from veomni_hook.patches.graph import FLOAT32, Form, Leaf, Node, branches, constant, has_source, source
from veomni_hook.patches.idioms.shared import has_receiver
from veomni_hook.patches.routes.guards import before_statement, guard
from veomni_hook.patches.routes.view import Method, ModuleView
from veomni_hook.patches.site import Code, Reason, Site, Status, slot_name

__all__ = ["CANDIDATES", "OP", "WORDS", "ChannelSearch", "find", "is_wide"]

OP = "log_decay"
WORDS = "exp("
CANDIDATES = (
    "every method with a statement that calls softplus and exp; every other forward that reads self.A_log and"
    " self.dt_bias and calls exp and one of softplus, sigmoid and log"
)

_PARAMETERS = {"A_log", "dt_bias"}
_CALLED = {"softplus", "sigmoid", "log"}
_NONE = constant(None)
_WIDE = Node("cast", (_NONE, FLOAT32))
_FLAT = constant(1), constant(1), constant(-1)
_ONES, _LIMITS = (constant(1), constant(1.0)), (constant(20), constant(20.0))
_REASON = Reason(
    "expected exp(log_rate) times softplus(x + bias), or in a bounded sigmoid, in float32, one a channel",
    Code.OTHER_FORM,
)


class ChannelSearch(Method):
    """Looks for a decay of channels at the end of one method."""

    def is_candidate(self) -> bool:
        """Whether it computes with both parameters what may be a decay."""
        methods = {*called_attributes(self.method)}
        own = {own_attribute(node) for node in walk_ast(self.method)}
        return (
            self.method.name == "forward"
            and "exp" in methods
            and bool(methods & _CALLED)
            and own >= _PARAMETERS
        )

    def site(self) -> Site:
        """The method's site."""
        body = self.method.body
        for first in reversed(range(len(body))) if isinstance(body[-1], ast.Return) else ():
            run = Run(self.method, body, first, len(body) - 1)
            form = self.form_of(run)
            decay = _of_channels(form.result) if isinstance(form, Form) and not form.effects else None
            if decay is not None and (site := self.routed(run, decay)) is not None:
                return site
        return Site(OP, self.target, Status.MISSED, reason=_REASON, lineno=self.method.lineno)

    def routed(self, run: Run, decay: Mapping[str, Node]) -> Site | None:
        """The site of a decay that begins with a run; None if its operands are not at hand there."""
        x, shape = self.expression(decay["x"]), self.expression(decay["shape"])
        if x is None or (asked := at_hand(x)) is None or not isinstance(shape, ast.Name):
            return None
        others = {name: decay[name] for name in ("log_rate", "bias", "dtype", "bounded", "lower")}
        if not all(map(has_source, (decay["heads"], *others.values()))):
            return None
        texts = {name: _source(node, self.receiver) for name, node in others.items()}
        if decay["dtype"] != _NONE:
            texts["dtype"] += ".dtype"
        question = ", ".join((self.receiver, asked, *texts.values()))
        if decay["heads"] != _NONE:
            texts["log_rate"] += f".view(1, 1, {_source(decay['heads'], self.receiver)}, 1)"
        captures = {"x": f"{ast.unparse(x)}.reshape({shape.id})", **texts}
        variant = "channels_rounded_rate" if decay["rounded"] == constant(True) else "channels"
        code = (
            f"if ({self.kernel} := {slot_name(OP, variant)}.kernel({question})) is not None:\n"
            f"    return {self.kernel}({', '.join(captures.values())})"
        )
        comment = f"{OP}/{variant}: -exp(log_rate) * softplus(x + bias), or bounded"
        first = run.statements[0]
        edits = before_statement(self.view, self.method, first, code, comment)
        return Site.asking(OP, self.target, variant, first, edits, form=self.digest(), captures=captures)


def _of_channels(node: Node) -> dict[str, Node] | None:
    """The operands of a decay, by name.

    ``x``, what is cast to float32; ``shape``, which it gets before or after the sum; ``bias``; ``log_rate``;
    ``heads``, the third size of ``log_rate.view(1, 1, heads, 1)``; ``rounded``, whether the exponential has
    the dtype of ``log_rate``; ``dtype``, a tensor of the result's; ``bounded``, whether there is a bound;
    ``lower``, the bound. What does not exist is None.
    """
    dtype = _NONE
    if node.op == "cast" and node.args[1].op == "dtype":
        node, dtype = node.args[0], node.args[1].args[0]
    leaves = branches(node)
    formulas = [formula for leaf in leaves if (formula := _formula(leaf.node)) is not None]
    if len(formulas) < len(leaves) or len({(rate, z) for rate, z, _ in formulas}) != 1:
        return None
    choice = _choice(leaves, [bound for *_, bound in formulas])
    rate, z = _rate(formulas[0][0]), _sum(formulas[0][1])
    return {**rate, **z, **choice, "dtype": dtype} if choice and rate and z else None


def _choice(leaves: list[Leaf], bounds: list[Node]) -> dict[str, Node] | None:
    """Whether there is a bound, and the bound; None if not one test chooses between a bound and none."""
    if len(leaves) == 1:
        return {"bounded": constant(bounds[0] != _NONE), "lower": bounds[0]}
    if len(leaves) != 2 or bounds.count(_NONE) != 1:
        return None
    place = 1 - bounds.index(_NONE)
    ((test, outcome),) = leaves[place].tests
    return {"bounded": test if outcome else Node("not", (test,)), "lower": bounds[place]}


def _formula(node: Node) -> tuple[Node, Node, Node] | None:
    """The rate, ``x + bias``, and the bound; None as the bound of a softplus."""
    product = node.args[0] if node.op == "neg" else node
    if product.op != "mul":
        return None
    for one, other in (product.args, product.args[::-1]):
        if node.op == "neg":
            z = _softplus_of(other)
            if z is not None:
                return one, z, _NONE
        elif other.op == "sigmoid" and other.args[0].op == "mul":
            lower = one.args[0] if is_wide(one) and one.origin is None else one  # a number's promotion
            rate, z = sorted(other.args[0].args, key=lambda factor: _rate(factor) is None)
            return (rate, z, lower) if lower.op in ("attribute", "constant") else None
    return None


def _softplus_of(node: Node) -> Node | None:
    """What the softplus is taken of, also in ``where(z > 20, z, log(1 + exp(z)))``."""
    if node.op == "softplus":
        return node.args[0] if node.args[1:] == (constant(1), constant(20)) else None
    if node.op != "where":
        return None
    test, z, log = node.args
    is_log = log.op == "log" and log.args[0] in {Node("add", (one, Node("exp", (z,)))) for one in _ONES}
    return z if is_log and test in {Node("lt", (limit, z)) for limit in _LIMITS} else None


def _rate(node: Node) -> dict[str, Node] | None:
    """log_rate, its heads if it is viewed, and whether its exponential is rounded."""
    steps: dict[str, Node] = {}
    while node.op in ("exp", "cast", "reshape") and node.op not in steps:
        steps[node.op] = node
        node = node.args[0]
    if node.op != "attribute" or "exp" not in steps or not is_wide(steps.get("cast", _WIDE)):
        return None
    heads = _NONE
    if "reshape" in steps:
        sizes = steps["reshape"].args[1].args
        if len(sizes) != 4 or not all(size == constant(1) for size in (*sizes[:2], sizes[3])):
            return None
        heads = sizes[2]
    # Without a cast the product with float32 promotes it, afterwards.
    order = ["cast", *steps] if "cast" not in steps else [*steps]
    return {"log_rate": node, "heads": heads, "rounded": constant(order.index("cast") < order.index("exp"))}


def _sum(node: Node) -> dict[str, Node] | None:
    """x, the shape that it gets, and the bias, ``[1, 1, -1]`` if the sum gets the shape."""
    shape = node.args[1] if node.op == "reshape" else None
    total = node.args[0] if shape is not None else node
    if total.op != "add":
        return None
    for x, bias in (total.args, total.args[::-1]):
        sizes: tuple[Node, ...] = ()
        while bias.op in ("cast", "reshape"):
            sizes = bias.args[1].args if bias.op == "reshape" else sizes
            bias = bias.args[0]  # noqa: PLW2901
        fits = len(sizes) == 4 if shape is None else sizes in ((), _FLAT)
        if bias.op != "attribute" or not fits or (sizes and sizes[:2] != _FLAT[:2]):
            continue
        new_shape = shape
        if new_shape is None and x.op == "reshape":
            x, new_shape = x.args  # noqa: PLW2901
        if new_shape is not None and is_wide(x) and x.origin is not None:
            return {"x": x.args[0], "shape": new_shape, "bias": bias}
    return None


def is_wide(node: Node) -> bool:
    """Whether a value is cast to float32."""
    return node.op == "cast" and node.args[1] == FLOAT32


def _source(node: Node, receiver: str) -> str:
    if node.op == "not" and node.args[0].op == "is":
        return " is not ".join(source(argument, receiver) for argument in node.args[0].args)
    return source(node, receiver)


_ALONE, _BOTH = "softplus", "softplus_and_sigmoid"
_OPERANDS = ("a", "log_rate", "bias")


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for _, owner, method in view.every_method():
        if not has_receiver(method) or "exp(" not in (text := view.text(method)):
            continue
        sites = [*_Search(view, owner, method).sites()] if "softplus(" in text else []
        channels = ChannelSearch(view, owner, method)
        yield from sites or ([channels.site()] if channels.is_candidate() else [])


class _Search(Method):
    """Looks for decays in one method."""

    reason = Reason("")

    def sites(self) -> Iterator[Site]:
        """The statements that look like a decay."""
        for block in blocks(self.method):
            for index, statement in enumerate(block):
                called = {last_name(call.func) for call in calls_in(statement)}
                if simple_target(statement) is not None and called >= {"softplus", "exp"}:
                    yield self.site(block, index)

    def site(self, block: list[ast.stmt], index: int) -> Site:
        lineno = block[index].lineno
        operands = self.operands(block, index)
        if operands is None:
            return Site(OP, self.target, Status.MISSED, reason=self.reason, lineno=lineno)
        b = self.sigmoid_before(block, index, operands)
        variant, taken = (_ALONE, operands) if b is None else (_BOTH, {**operands, "b": b})
        run = Run(self.method, block, index if b is None else index - 1, index)
        asked, edits = at_hand(taken["a"]), None
        if asked is not None:
            names = ", ".join(simple_target(statement) or "" for statement in run.statements)
            rest = ", ".join(ast.unparse(operand) for name, operand in taken.items() if name != "a")
            answer = ast.parse(f"{names} = {self.kernel}({ast.unparse(taken['a'])}, {rest})").body
            asks, slot = [self.receiver, asked, rest], slot_name(OP, variant)
            comment = f"{OP}/{variant}: -exp(log_rate) * softplus(a + bias)"
            edits = guard(self.view, run, slot, asks, answer, comment, returns=False)
        if edits is None:
            reason = Reason("the code around it cannot be reordered", Code.NO_ROOM)
            return Site(OP, self.target, Status.MISSED, reason=reason, lineno=lineno)
        captures = {name: ast.unparse(operand) for name, operand in taken.items()}
        return Site.asking(
            OP, self.target, variant, block[index], edits, form=self.digest(), captures=captures
        )

    def operands(self, block: list[ast.stmt], index: int) -> dict[str, ast.expr] | None:
        """The decay's operands, if the statement computes one."""
        form = self.form_of(Run(self.method, block, index, index))
        if not isinstance(form, Form):
            self.reason = form
            return None
        nodes = _of_heads(form.result)
        if nodes is None:
            text = "expected -exp(log_rate) * softplus(a + bias), with float32 inside"
            self.reason = Reason(text, Code.OTHER_FORM)
            return None
        said = {name: self.expression(node) for name, node in nodes.items()}
        known = {name: operand for name, operand in said.items() if operand is not None}
        if len(known) < len(said) or any(call for name in _OPERANDS[1:] for call in calls_in(known[name])):
            self.reason = Reason("an operand of the decay is not an expression of this method", Code.NO_ROOM)
            return None
        return known

    def sigmoid_before(
        self, block: list[ast.stmt], index: int, operands: Mapping[str, ast.expr]
    ) -> ast.expr | None:
        """What the statement before takes the sigmoid of, if it does only that; the decay must not use it."""
        name = simple_target(block[index - 1]) if index else None
        if name is None or any(calls_in(operands["a"])) or name in loaded([block[index]]):
            return None
        form = self.form_of(Run(self.method, block, index - 1, index - 1))
        if not isinstance(form, Form) or form.result.op != "sigmoid":
            return None
        b = self.expression(form.result.args[0])
        return b if isinstance(b, ast.Name) and b.id != simple_target(block[index]) else None


def _of_heads(node: Node) -> dict[str, Node] | None:
    """The operands of ``-exp(float32(log_rate)) * softplus(float32(a) + bias)``."""
    product = node.args[0] if node.op == "neg" else node
    factors = (
        {argument.op: argument for argument in product.args}
        if node.op == "neg" and product.op == "mul"
        else {}
    )
    if factors.keys() != {"exp", "softplus"}:
        return None
    rate, (z, *constants) = factors["exp"].args[0], factors["softplus"].args
    if (
        constants != [constant(1), constant(20)]
        or z.op != "add"
        or not (is_wide(rate) and is_wide(z.args[0]))
    ):
        return None
    return {"a": z.args[0].args[0], "log_rate": rate.args[0], "bias": z.args[1]}
