"""Tables of variants: what a row leaves out, and that recognisers read the same names."""

from __future__ import annotations

import pytest

from veomni_hook.errors import KernelError
from veomni_hook.kernels.selection.declaration import Kernel, Variant
from veomni_hook.kernels.selection.registry import Registry, built_in, load_attribute, registry
from veomni_hook.kernels.selection.table import RECOMPUTED, backend, op
from veomni_hook.patches.graph import variant_names

HERE = "veomni_hook.kernels.toy"


def made_by(text: str) -> str:
    return f"made of {text}"


def test_names_and_modules_are_filled_in():
    row = Variant(
        "x + 1",
        kernels=(
            backend("fast", ".fast:{variant}", refuses=".fast:refuses", loses="..shared.rows:loses"),
            backend("torch", RECOMPUTED),
            backend("theirs", "theirs:run({variant})"),
        ),
    )
    toy = op("toy", {"plus_one": row}, yields=".calls:chosen", parts=("rms_norm",))
    variant = toy.variants["plus_one"]
    assert variant.reference == f"{HERE}.reference:plus_one"
    assert (toy.yields, toy.parts, toy.offers) == (f"{HERE}.calls:chosen", ("rms_norm",), None)
    fast, recomputed, theirs = variant.kernels
    assert fast == Kernel(
        "toy",
        "plus_one",
        "fast",
        f"{HERE}.fast:plus_one",
        refuses=f"{HERE}.fast:refuses",
        loses="veomni_hook.kernels.shared.rows:loses",
    )
    assert recomputed.load == f"veomni_hook.kernels.shared.recompute:recomputed({HERE}.reference:plus_one)"
    assert recomputed.refuses is None and theirs.load == "theirs:run(plus_one)"


def test_a_registered_op_brings_its_kernels():
    fresh = Registry()
    fresh.add_op(op("toy", {"one": Variant("1", kernels=(backend("fast", ".fast:{variant}"),))}))
    assert [k.load for k in fresh.kernels("toy", "one")] == [f"{HERE}.fast:one", f"{HERE}.reference:one"]


def test_a_code_reference_with_a_text_is_what_the_function_returns():
    assert load_attribute(f"{__name__}:made_by(a.b:c)") == "made of a.b:c"
    with pytest.raises(KernelError, match=r"nothing\(a\)"):
        load_attribute(f"{__name__}:nothing(a)")


@pytest.mark.parametrize("load", ["nothing", "module:", ":run", "a:b:c", "module(run)", ":run(a:b)"])
def test_other_texts_are_no_code_references(load):
    with pytest.raises(KernelError, match="is not a code reference"):
        backend("fast", load)


@pytest.mark.parametrize("name", built_in())
def test_recognisers_read_the_names_of_the_table(name):
    assert variant_names(name) == (*registry.ops()[name].variants,)
