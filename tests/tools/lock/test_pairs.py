from __future__ import annotations

from veomni_hook.tools.lock.pairs import Placed, moved, pairs
from veomni_hook.tools.lock.records import LockedSite


def site(
    target: str, *, module: str = "m", form: str = "f", fingerprint: str = "", op: str = "norm"
) -> Placed:
    return Placed(module, LockedSite(op, target, "v", form), fingerprint)


def test_equal_sites_of_one_target_are_paired_whatever_their_order() -> None:
    first, second = site("A", form="1"), site("A", form="2")
    found, gone, fresh = pairs([first, second], [second, first])
    assert found == [(first, first), (second, second)] and gone == fresh == []


def test_the_rest_is_paired_in_order_and_what_is_too_many_is_left_over() -> None:
    first, second, third = site("A", form="1"), site("A", form="2"), site("A", form="3")
    assert pairs([first, second], [third]) == ([(first, third)], [second], [])
    assert pairs([first], [third, second]) == ([(first, third)], [], [second])


def test_two_that_are_gone_do_not_become_one() -> None:
    gone = [site("Norm"), site("Narm")]
    fresh = [site("Norma")]
    assert moved(gone, fresh) == [(gone[0], fresh[0])]


def test_the_same_module_goes_before_a_nearer_name() -> None:
    gone = [site("Norm", module="m")]
    fresh = [site("Norm", module="n"), site("SomethingElse", module="m")]
    assert moved(gone, fresh) == [(gone[0], fresh[1])]


def test_elsewhere_the_name_is_the_same_unless_the_module_is_gone() -> None:
    gone = [site("LlamaNorm", module="m"), site("LlamaMLP", module="m", op="mlp")]
    near = site("Llama2Norm", module="n")
    assert moved(gone[:1], [near]) == [(gone[0], near)]
    still_there = site("Other", module="m", op="mlp")
    assert moved(gone, [near, still_there]) == [(gone[1], still_there)]
    assert moved(gone[:1], [site("Unrelated", module="n")]) == []


def test_what_computes_something_else_has_not_moved() -> None:
    assert moved([site("A", form="1")], [site("A", module="n", form="2")]) == []
    assert moved([site("A", form="")], [site("A", module="n", form="")]) == []
    assert moved([site("A", op="norm")], [site("A", module="n", op="mlp")]) == []
    one, other = site("A", form="1", fingerprint="x"), site("A", module="n", form="2", fingerprint="x")
    assert moved([one], [other]) == [(one, other)]
