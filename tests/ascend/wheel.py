"""What a wheel of torch_npu says of its operators: schemas, and functions that tell shapes.

A wheel is read and never installed: where Ascend's libraries are missing, its entry point breaks ``import torch``.
"""

from __future__ import annotations

import ast
import math
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
#: Where wheels are kept; ignored by git.
FOLDER = ROOT / ".torch_npu"
_SCHEMAS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
_META = "torch_npu/op_plugin/meta/_meta_registrations.py"
# Wheels for the oldest Python that all releases since 2.7 were built for, whatever runs here.
_TARGET = ("--python-version", "3.11", "--implementation", "cp", "--platform", "manylinux_2_28_x86_64")


def fetch(version: str, seconds: float = 300) -> Path:
    """Return the wheel of ``version``, downloaded at the first call.

    Raises:
        OSError: it is not there and pip cannot get it.
    """
    found = next(FOLDER.glob(f"torch_npu-{version}-*.whl"), None)
    if found is not None:
        return found
    FOLDER.mkdir(exist_ok=True)
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
        *(*_TARGET, "--dest", str(FOLDER), f"torch_npu=={version}"),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"no torch_npu {version} after {seconds} s") from error
    found = next(FOLDER.glob(f"torch_npu-{version}-*.whl"), None)
    if found is None:
        raise OSError(f"no torch_npu {version}: {done.stderr.strip().splitlines()[-1:]}")
    return found


def schemas(wheel: Path) -> dict[str, str]:
    """Return the schema of every operator of a wheel, by its name with its overload's."""
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(_SCHEMAS).decode()
    found: dict[str, str] = {}
    for schema in re.findall(r"func:\s*(\w[\w.]*\(.*)$", text, re.MULTILINE):
        found.setdefault(schema.partition("(")[0], schema.strip())
    return found


def meta_functions(wheel: Path, names: list[str]) -> dict[str, Callable[..., Any]]:
    """Return the functions by which a wheel tells shapes and dtypes of results, of operators that have one.

    They are taken out of their file: the rest of it needs torch_npu.
    """
    with zipfile.ZipFile(wheel) as archive:
        module = ast.parse(archive.read(_META).decode())
    namespace: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "os": os,
        "torch_npu": SimpleNamespace(
            hifloat8=290, float4_e2m1fn_x2=296, float4_e1m2fn_x2=297, float8_e8m0fnu=293
        ),
        # Of a warning for another chip.
        "_npu_fusion_attention_warning_printed": True,
        "ErrCode": SimpleNamespace(VALUE="VALUE", PARAM="PARAM"),
        "ops_error": str,
    }
    found: dict[str, Callable[..., Any]] = {}
    for node in module.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        targets = [name for each in node.decorator_list if (name := _implemented(each)) in names]
        node.decorator_list = []
        # Helpers are defined beside them; what is not asked for is only defined.
        exec(compile(ast.Module([node], []), _META, "exec"), namespace)
        found |= dict.fromkeys(targets, namespace[node.name])
    return found


def _implemented(decorator: ast.expr) -> str:
    """The operator that ``@impl(m, "name")`` is about."""
    if isinstance(decorator, ast.Call) and len(decorator.args) == 2:
        first, second = decorator.args
        if isinstance(first, ast.Name) and first.id == "m" and isinstance(second, ast.Constant):
            return str(second.value).removesuffix(".default")
    return ""
