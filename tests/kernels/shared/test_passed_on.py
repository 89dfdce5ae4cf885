from types import MethodType

import pytest
import torch
from torch import nn

from veomni_hook.kernels.shared.module_calls import call_is_seen

CALLS = []


def moves(self, *args, **kwargs):
    x = args[0]
    weight = self.weight if hasattr(self, "weight") else self.other_weight
    if weight.device != x.device:
        return self.upstreams(x.to(weight.device), *args[1:], **kwargs)
    return self.upstreams(*args, **kwargs)


def passes(self, x):
    result = self.upstreams(x)
    return result


def counts(self, x):
    CALLS.append(x)
    return self.upstreams(x)


def notes(self, x):
    self.seen = x
    return self.upstreams(x)


def writes(self, x):
    x.mul_(2)
    return self.upstreams(x)


def writes_into_a_weight(self, x):
    self.weight.data.mul_(2)
    return self.upstreams(x)


def adds(self, x):
    return self.upstreams(x) + 1


def other_input(self, x):
    return self.upstreams(x.to(torch.float64))


def twice(self, x):
    self.upstreams(x)
    return self.upstreams(x)


def not_at_all(self, x):
    return x


def calls_another(self, x):
    self.another(x)
    return self.upstreams(x)


def depends_on_the_shape(self, x):
    return self.upstreams(x) if x.shape[0] == 2 else x


def fails(self, x):
    return self.upstreams(x, x)


def of_a_kind(self, x):
    for _ in (1,):
        result = self.upstreams(x)
    return result


def has_a_default(self, x, log=CALLS):
    log.append(x)
    return self.upstreams(x)


def calls_a_module(self, x):
    self.module(x)
    return self.upstreams(x)


def in_place(self, x):
    x += 1
    return self.upstreams(x)


def fills(self, x):
    x[:] = 2
    return self.upstreams(x)


def wrapped(forward):
    module = nn.Linear(3, 4, bias=False)
    module.upstreams, module.another = module.forward, CALLS.append
    object.__setattr__(module, "module", CALLS.append)
    module.forward = MethodType(forward, module)
    return module


@pytest.mark.parametrize("forward", [moves, passes], ids=lambda each: each.__name__)
def test_what_only_passes_its_input_on_is_seen_through(forward):
    module = wrapped(forward)
    assert call_is_seen(module, torch.ones(2, 3)) is None
    assert call_is_seen(module) == "has its own forward"
    if forward is moves:
        assert call_is_seen(module, torch.ones(2, 3, device="meta")) == "has its own forward"


@pytest.mark.parametrize(
    "forward",
    [
        counts, notes, writes, writes_into_a_weight, adds, other_input, twice, not_at_all, calls_another,
        depends_on_the_shape, fails, of_a_kind, in_place,
        has_a_default, calls_a_module, fills,
    ],
    ids=lambda each: each.__name__,
)  # fmt: skip
def test_what_does_more_is_not_and_is_not_run(forward):
    module, x = wrapped(forward), torch.ones(2, 3)
    weight = module.weight.clone()
    assert call_is_seen(module, x) == "has its own forward"
    assert not CALLS and not hasattr(module, "seen")
    assert torch.equal(x, torch.ones(2, 3)) and torch.equal(module.weight, weight)


def test_what_it_calls_must_be_the_forward_of_the_class():
    module = wrapped(passes)
    module.upstreams = MethodType(adds, module)
    assert call_is_seen(module, torch.ones(2, 3)) == "has its own forward"
    module.forward = lambda x: nn.Linear.forward(module, x)  # in another form: not read
    assert call_is_seen(module, torch.ones(2, 3)) == "has its own forward"


def test_a_name_that_hides_a_builtin(monkeypatch):
    monkeypatch.setitem(globals(), "hasattr", lambda *_: True)
    assert call_is_seen(wrapped(moves), torch.ones(2, 3)) == "has its own forward"


def test_a_file_that_was_edited_since_is_not_read(tmp_path):
    file, names = tmp_path / "wrappers.py", {"__name__": "wrappers"}
    text = "def wrapper(self, x):\n    {}return self.upstreams(x)\n"
    file.write_text(text.format("x.mul_(2); "))
    exec(compile(file.read_text(), file, "exec"), names)
    file.write_text(text.format(""))
    module, x = wrapped(names["wrapper"]), torch.ones(2, 3)
    assert call_is_seen(module, x) == "has its own forward" and torch.equal(x, torch.ones(2, 3))


def test_hooks_beside_it_count():
    module = wrapped(moves)
    nn.Linear.register_forward_hook(module, lambda *_: None)
    assert call_is_seen(module, torch.ones(2, 3)) == "has hooks"
