"""The comparison of definitions that a kernel skips with the recognised ones, for modules of one class.

Every comparison is by identity with a code object, one per definition. All comparisons of a class form one
expression: loops over them took over a microsecond on an H200's host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any, NamedTuple

from veomni_hook.kernels.shared.hub_functions import below, installed_for
from veomni_hook.kernels.shared.origin import written_in

__all__ = [
    "MISSING",
    "Checks",
    "Same",
    "codes_in",
    "definition",
    "difference",
    "hub_wrapped_code",
    "layers",
    "same_expression",
]

_Named = tuple[str, CodeType | None]
#: Whether everything compared is as recognised, for a module and its operands (or for a function).
Same = Callable[..., bool]
#: Equal to nothing. Not None, which stands for the code of what the text does not define exactly once.
MISSING = object()


class Checks(NamedTuple):
    """What is compared for modules of one class.

    Attributes:
        methods: methods of the module that asks.
        overridden: methods that one of `methods` reaches through ``super()``, each with its class.
        functions: functions of the modeling module.
        operands: methods of modules that are operands, each with the name of its class.
    """

    methods: tuple[_Named, ...] = ()
    overridden: tuple[tuple[type, str, CodeType | None], ...] = ()
    functions: tuple[_Named, ...] = ()
    operands: tuple[tuple[str, str, CodeType | None], ...] = ()


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of the definitions in ``code``, nested ones too."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes_in(constant)


def definition(code: CodeType | None, qualname: str) -> CodeType | None:
    """Return the code of a definition in ``code``, a module's; None if it has none or several."""
    for part in qualname.split("."):
        inner = () if code is None else code.co_consts
        named = [
            constant for constant in inner if isinstance(constant, CodeType) and constant.co_name == part
        ]
        code = named[0] if len(named) == 1 else None
    return code


def same_expression(
    checks: Checks, scope: Mapping[str, Any], kinds: Mapping[str, Any], operands: tuple[Any, ...]
) -> Same:
    """Return `difference` as an expression that is true if nothing differs.

    If something differs, it is false or raises AttributeError or KeyError; `difference` then gives the
    reason. ``operands`` show at which positions operands are modules.
    """
    from torch.nn import Module

    known: dict[str, Any] = {"scope": scope, "kinds": kinds}
    tests = ["True"]

    def compare(standing: str, code: CodeType | None) -> None:
        name = f"code_{len(known)}"
        known[name] = MISSING if code is None else code
        tests.append(f"{standing}.__code__ is {name}")

    for name, code in checks.methods:
        compare(f"owner.{name}", code)
    for base, name, code in checks.overridden:
        known[f"base_{len(known)}"] = base
        compare(f"base_{len(known) - 1}.{name}", code)
    for name, code in checks.functions:
        for wrapped, standing in layers(scope.get(name), code):
            compare(f"scope[{name!r}]{wrapped}", standing)
    for home, name, code in checks.operands:
        places = [place for place, module_ in enumerate(operands) if isinstance(module_, Module)]
        if name != "forward" and len(places) == 1:
            compare(f"operands[{places[0]}].{name}", code)  # its own, or its class's
            continue
        compare(f"kinds[{home!r}].{name}", code)
        if name != "forward":
            tests += [f"{name!r} not in operands[{place}].__dict__" for place in places]
    # The names come from definitions in a parsed module.
    return eval(f"lambda owner, operands: {' and '.join(tests)}", known)  # type: ignore[no-any-return]


def layers(standing: Any, code: CodeType | None) -> tuple[tuple[str, CodeType | None], ...]:
    """Return what is compared with which code, of a function that ought to have ``code``.

    That is the function, or the decorator's with what it has wrapped: an attribute of it, in source form.
    """
    wrapped = getattr(standing, "__wrapped__", None)
    if code is None or wrapped is None or wrapped is not below(standing) or wrapped.__code__ is not code:
        return (("", code),)
    return (("", standing.__code__), (".__wrapped__", code))


def difference(
    checks: Checks,
    scope: Mapping[str, Any],
    kinds: Mapping[str, Any],
    owner: Any,
    operands: tuple[Any, ...],
) -> str | None:
    """Return what differs, in words, or None.

    Args:
        checks: what is compared.
        scope: where functions are looked up by name.
        kinds: where classes of operands are looked up by name.
        owner: the module that asks; None if only functions are compared.
        operands: the operands of the call.
    """
    for name, code in checks.methods:
        if getattr(getattr(owner, name, None), "__code__", MISSING) is not code:
            return _replaced(f"{type(owner).__name__}.{name}", getattr(owner, name, None))
    for base, name, code in checks.overridden:
        if getattr(getattr(base, name, None), "__code__", MISSING) is not code:
            return _replaced(f"{base.__name__}.{name}", getattr(base, name, None))
    for name, code in checks.functions:
        standing = scope.get(name)
        same = getattr(standing, "__code__", MISSING) is code
        if not same and (code is None or hub_wrapped_code(standing) is not code):
            return _replaced(name, standing)
    for home, name, code in checks.operands:
        standing = getattr(kinds.get(home), name, None)
        if getattr(standing, "__code__", MISSING) is not code:
            return _replaced(f"{home}.{name}", standing)
        if name != "forward" and (own := _own_of_operands(kinds[home], name, operands)) is not None:
            return _replaced(f"{home}.{name}", own)
    return None


def _own_of_operands(kind: type, name: str, operands: tuple[Any, ...]) -> Any:
    """Return the instance attribute ``name`` of an operand of a class; ``forward`` is checked elsewhere."""
    for operand in operands:
        if type(operand) is kind and name in operand.__dict__:
            return operand.__dict__[name]
    return None


def _replaced(name: str, standing: Any) -> str:
    return f"{name}, which a kernel would not call, was replaced by {'.'.join(written_in(standing))}"


def hub_wrapped_code(standing: Any) -> CodeType | None:
    """Return the code of the function that transformers' decorators have wrapped; else None.

    Of one that the package ``kernels`` has replaced since, there is none.
    """
    if installed_for(standing) is not None:
        return None
    function = below(standing)
    return None if function is standing else getattr(function, "__code__", None)
