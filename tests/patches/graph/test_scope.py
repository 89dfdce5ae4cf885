"""The meaning of a module's names, from its text."""

import ast

import pytest

from veomni_hook.patches.graph import Scope


def scope(text):
    return Scope(ast.parse(text))


@pytest.mark.parametrize(
    ("text", "name", "meaning"),
    [
        ("import torch.nn.functional as F", "F", "torch.nn.functional"),
        ("from torch import nn", "nn", "torch.nn"),
        ("from ...activations import ACT2FN", "ACT2FN", "...activations.ACT2FN"),
        ("if True:\n    import torch", "torch", "torch"),
        ("try:\n    import torch\nexcept ImportError:\n    import torch", "torch", "torch"),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None", "torch", ":torch"),
        ("import torch\ntorch = None", "torch", ":torch"),
        ("import torch\nwith x as torch:\n    pass", "torch", ":torch"),
        ("import torch\nif (torch := None):\n    pass", "torch", ":torch"),
        ("import torch\ntry:\n    pass\nexcept ValueError as torch:\n    pass", "torch", ":torch"),
        ("import torch\nmatch x:\n    case torch:\n        pass", "torch", ":torch"),
        ("import torch\ndef f():\n    global torch\n    torch = None", "torch", ":torch"),
        ("", "len", "builtins.len"),
        ("len = 3", "len", ":len"),
        ("from somewhere import *", "len", ":len"),
        ("", "unheard", ":unheard"),
    ],
)
def test_meanings(text, name, meaning):
    assert scope(text).resolve(name) == meaning


def test_definitions_are_those_bound_once():
    found = scope(
        "def f(): ...\ndef g(): ...\nclass A: ...\nclass B: ...\nB = wrap(B)\ng = 1\nif f:\n    def h(): ...\n"
    )
    assert set(found.functions) == {"f"}
    assert set(found.classes) == {"A"}


def test_lineage():
    found = scope(
        "import torch.nn as nn\nclass A(nn.Module): ...\nclass B(A): ...\nclass C(B, Mixin): ...\nclass D(Other): ...\nclass E(E): ..."
    )
    names = {
        name: [base.name if base else None for base in found.lineage(node)]
        for name, node in found.classes.items()
    }
    assert names == {"A": ["A"], "B": ["B", "A"], "C": ["C", None], "D": ["D", None], "E": ["E", None]}
