"""Errors: three parts each, and they survive the way out of a worker process."""

import inspect
import pickle

import pytest

from veomni_hook import errors

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.VeomniHookError)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_three_parts_and_pickling(cls):
    error = cls("it broke", where="here", fix="mend it")
    assert str(error) == "it broke\n  where: here\n  fix:   mend it"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert (again.what, again.where, again.fix, str(again)) == ("it broke", "here", "mend it", str(error))
    assert vars(again) == vars(error)


def test_every_class_is_exported():
    defined = {n for n, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__}
    assert defined == set(errors.__all__)
