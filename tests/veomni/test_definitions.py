"""Every config, with idioms off: the definitions equal those of the file that VeOmni's engine generated.

The same but for spelling: docstrings are left aside, a relative import is compared by what it names, a decorator
that stands twice counts once, and transformers' kernel hub decorator may stay on a replaced function (5.17 and
later do not work without it; VeOmni's engine drops it).
"""

import ast
import difflib
from pathlib import Path

import pytest

from tests.veomni.sides import CONFIGS, config_module
from tests.veomni.standins import stand_ins
from veomni_hook.finders import configs
from veomni_hook.finders.build import patch
from veomni_hook.finders.upstream import read_upstream
from veomni_hook.locate import locate

ASKED = {"is_eager": "{}.use_eager_impl", "kernel_of": "{}.bound_kernel()", "loss_of": "{}.loss_function"}
_HUB = "use_kernel_func_from_hub"
_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def definitions(text, module, *, replaced=frozenset()):
    """The definitions and assignments of a module by name, methods apart, in one spelling.

    ``module`` is the name of the module that relative imports are relative to; the hub's decorator is left out
    of the functions ``replaced``.
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if isinstance(value, ast.expr) and (asked := _of_runtime(value)) is not None:
                setattr(node, field, asked)
            elif isinstance(value, list):
                value[:] = [_of_runtime(one) or one for one in value]
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = module.split(".")[: -node.level]
            node.module, node.level = ".".join([*parts, *filter(None, [node.module])]), 0
        if isinstance(node, _DEFINED):
            _plain(node, replaced)
    return dict(_found(tree))


def _of_runtime(node):
    """The question to VeOmni's runtime that the hook answers (`veomni_hook.patches.verbs.runtime`), or None."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name("veomni_unbound"), attr=name), args=[asked, *_]):
            return ast.parse(ASKED[name].format(ast.unparse(asked)), mode="eval").body
    return None


def _plain(node, replaced):
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        node.body = node.body[1:] or [ast.Pass()]
    unique = {ast.unparse(decorator): decorator for decorator in node.decorator_list}
    node.decorator_list = [
        decorator
        for text, decorator in unique.items()
        if not (node.name in replaced and text.startswith(_HUB))
    ]


def _found(tree):
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            body = [each for each in statement.body if not isinstance(each, ast.Pass)]
            statement.body = [ast.Pass()]
            yield statement.name, ast.unparse(statement)
            for number, each in enumerate(body):
                name = each.name if isinstance(each, _DEFINED) else ast.unparse(each)[:60]
                yield f"{statement.name}.{name}" + (f"#{number}" if name == "_" else ""), ast.unparse(each)
        elif isinstance(statement, _DEFINED):
            yield statement.name, ast.unparse(statement)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            yield ast.unparse(statement)[:60], ast.unparse(statement)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "_".join(config))
def test_definitions_equal_those_of_the_generated_file(config):
    (loaded,) = configs.load([config_module(*config)])
    (found,) = loaded.configs
    spec = locate(found.source_module)
    assert spec is not None and found.device == config[1]
    upstream, reason = read_upstream(found.source_module, spec)
    assert upstream is not None, reason
    with stand_ins("liger_kernel"):  # an external replacement has to exist
        patched = patch(upstream, loaded.configs, config[1])
    assert patched is not None
    file = Path(str(loaded.module.__file__)).parent / "generated" / found.target_file
    package = f"{loaded.module.__name__.rpartition('.')[0]}.generated.module"
    replaced = frozenset(p.target for p in found.patches if p.patch_type.value == "function_replacement")
    theirs = definitions(file.read_text(encoding="utf-8"), package, replaced=replaced)
    ours = definitions(patched.plain, found.source_module, replaced=replaced)
    differing = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    shown = (
        "\n".join(difflib.ndiff(theirs.get(name, "").split("\n"), ours.get(name, "").split("\n")))
        for name in differing
    )
    assert not differing, "\n".join(shown)
