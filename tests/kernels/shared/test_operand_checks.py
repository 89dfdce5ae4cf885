import torch
from torch._subclasses import FakeTensorMode
from torch.fx import symbolic_trace

from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable, wants_grad


def test_tensors_and_parameters_are_plain():
    assert not_plain(torch.ones(2), torch.nn.Parameter(torch.ones(2))) is None


def test_others_are_named():
    with FakeTensorMode():
        assert "FakeTensor" in not_plain(torch.ones(2))
    seen = []
    symbolic_trace(Look(seen))
    assert "Proxy" in seen[0]
    assert "int" in not_plain(torch.ones(2), 3)


class Look(torch.nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def forward(self, x):
        self.seen.append(not_plain(x))
        return x


def test_transforms_are_seen_only_while_they_last():
    seen = []
    torch.func.grad(lambda x: seen.append(untraceable()) or x.sum())(torch.ones(2))
    assert "torch.func" in seen[0] and untraceable() is None


def test_gradients_are_wanted_where_autograd_records():
    leaf = torch.ones(2, requires_grad=True)
    assert wants_grad(torch.ones(2), leaf) and not wants_grad(torch.ones(2))
    with torch.no_grad():
        assert not wants_grad(leaf)
