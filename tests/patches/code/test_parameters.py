"""Parameter lists with the kernel's names."""

from __future__ import annotations

import ast

import pytest

from veomni_hook.patches.code.parameters import parameters_as


def said(signature: str, operands: dict[str, str], **fixed: object) -> str | None:
    (function,) = ast.parse(f"def f({signature}): pass").body
    assert isinstance(function, ast.FunctionDef)
    return parameters_as(function, operands, fixed)


@pytest.mark.parametrize(
    ("signature", "operands", "expected"),
    [
        ("q, k", {"q": "q", "k": "k"}, "q, k"),
        ("query, k, dim=1", {"query": "q", "k": "k"}, "query->q, k, dim=1"),
        ("q, /, *, k=None", {"q": "q", "k": "k"}, "q, /, *, k=None"),
        ("q, *rest, k, **more", {"q": "q", "k": "k"}, "q, *rest, k, **more"),
        ("q, scale=(1, 2)", {"q": "q"}, "q, scale=(1, 2)"),
    ],
)
def test_names_defaults_and_kinds_are_kept(signature, operands, expected) -> None:
    assert said(signature, operands) == expected


def test_a_fixed_operand_is_a_keyword_with_its_value() -> None:
    assert said("q", {"q": "q"}, unsqueeze_dim=2) == "q, *, unsqueeze_dim=2"
    assert said("q, *, k", {"q": "q", "k": "k"}, dim="x") == "q, *, k, dim='x'"


@pytest.mark.parametrize(
    ("signature", "operands"),
    [
        ("q, scale=SCALE", {"q": "q"}),  # the default is not known here
        ("q", {"q": "q", "k": "k"}),  # k is missing
        ("states, q", {"states": "q"}),  # another parameter has the name q
    ],
)
def test_what_does_not_say_the_operands(signature, operands) -> None:
    assert said(signature, operands) is None


def test_a_parameter_with_the_name_of_a_fixed_operand() -> None:
    assert said("q, dim=1", {"q": "q"}, dim=2) is None
