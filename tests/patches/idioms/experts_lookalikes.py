"""Experts classes in the style of transformers, one for each variant, with the formula of their experts."""

from dataclasses import dataclass

HEAD = """
import torch
import torch.nn.functional as fn
from torch import nn


class Twist(nn.Module):
    def forward(self, gate, up):
        return torch.tanh(gate) * up


"""

LOOP = """
class BankExperts(nn.Module):
    def __init__(self, count, width, inner):
        super().__init__()
        self.count = count
{parameters}

    def forward(self, rows, chosen, shares):
        total = torch.zeros_like(rows)
        with torch.no_grad():
            places = fn.one_hot(chosen, num_classes=self.count + 1)
            places = places.permute(2, 1, 0)
            used = torch.greater(places.sum(dim=(-1, -2)), 0).nonzero()
        for bank in used:
            bank = bank[0]
            if bank == self.count:
                continue
            slot, row = torch.where(places[bank])
{formula}
            out = out * shares[row, slot, None]
            total.index_add_(0, row, out.to(total.dtype))
        return total
{methods}
"""

_ROWS = """
self.first = nn.Parameter(torch.randn(self.count, 2 * inner, width))
self.second = nn.Parameter(torch.randn(self.count, width, inner))
"""
_COLUMNS = """
self.first = nn.Parameter(torch.randn(self.count, width, 2 * inner))
self.second = nn.Parameter(torch.randn((count, inner, width)))
"""
_BIASES = """
self.first_bias = nn.Parameter(torch.randn(self.count, 2 * inner))
self.second_bias = nn.Parameter(torch.randn(self.count, width))
"""
_ACT = "self.act = nn.SiLU()"
_LIMIT = "self.bound = 0.4"
_ALPHA = "self.slope = 1.3"
_HALVES = "gate, up = fn.linear(rows[row], self.first[bank]).chunk(2, dim=-1)"
_DOWN = "out = fn.linear(out, self.second[bank])"
_BEND = """
gate = gate.clamp(min=None, max=self.bound)
up = up.clamp(min=-self.bound, max=self.bound)
out = (up + 1) * (gate * torch.sigmoid(gate * self.slope))
"""
_FLOAT32 = "torch.zeros_like(rows, dtype=torch.float32)"


@dataclass(frozen=True)
class Lookalike:
    """The parameters and formula of a variant; ``total`` and ``end`` begin and end the code of its result."""

    parameters: str
    formula: str
    operands: tuple[str, ...]
    total: str = "torch.zeros_like(rows)"
    end: str = "return total"
    methods: str = ""

    @property
    def source(self) -> str:
        """The module."""
        text = LOOP.format(
            parameters=_indented(self.parameters, 8),
            formula=_indented(self.formula, 12),
            methods=_indented(self.methods, 4),
        )
        return HEAD + text.replace("torch.zeros_like(rows)", self.total).replace("return total", self.end)


def _indented(text: str, by: int) -> str:
    return "\n".join(" " * by + line for line in text.splitlines() if line)


LOOKALIKES = {
    "gated": Lookalike(_ROWS + _ACT, f"{_HALVES}\nout = self.act(gate) * up\n{_DOWN}", ("self.first", "self.second", "self.act")),
    "gated_clamped": Lookalike(
        f"{_ROWS}{_ACT}\n{_LIMIT}",
        f"out = self.joined(fn.linear(rows[row], self.first[bank]))\n{_DOWN}",
        ("self.first", "self.second", "self.act", "self.bound"),
        methods="def joined(self, both):\n    gate, up = both.chunk(2, dim=-1)\n    gate = gate.clamp(max=self.bound)\n"
        "    return self.act(gate) * up.clamp(min=-self.bound, max=self.bound)",
    ),
    "gated_clamped_after": Lookalike(
        f"{_ROWS}{_LIMIT}",
        f"{_HALVES}\ngate = fn.silu(gate).clamp(max=self.bound)\n"
        f"out = gate * up.clamp(-self.bound, self.bound)\n{_DOWN}",
        ("self.first", "self.second", "fn.silu", "self.bound"),
    ),
    "gated_float32_product": Lookalike(
        _ROWS + _ACT,
        f"{_HALVES}\nout = (self.act(gate.float()) * up.to(torch.float32)).to(gate.dtype)\n{_DOWN}",
        ("self.first", "self.second", "self.act"),
    ),
    "gated_jointly": Lookalike(
        _ROWS + "self.act = Twist()",
        f"{_HALVES}\nout = self.act(gate, up)\n{_DOWN}",
        ("self.first", "self.second", "self.act"),
        _FLOAT32,
        "return total.to(rows.dtype)",
    ),
    "gated_normalised": Lookalike(
        f"{_ROWS}{_ACT}\nself.norm = nn.LayerNorm(width)",
        f"{_HALVES}\nout = self.act(gate) * up\n{_DOWN}\nout = self.norm(out)",
        ("self.first", "self.second", "self.act", "self.norm"),
    ),
    "gated_transposed": Lookalike(
        _COLUMNS + _ACT,
        "gate, up = (rows[row] @ self.first[bank]).chunk(2, dim=-1)\n"
        "out = torch.matmul(self.act(gate) * up, self.second[bank])",
        ("self.first", "self.second", "self.act"),
    ),
    "alpha_gated": Lookalike(
        f"{_ROWS}{_LIMIT}\n{_ALPHA}",
        f"{_HALVES}{_BEND}{_DOWN}".replace("+ 1", "+ 1.0"),
        ("self.first", "self.second", "self.slope", "self.bound"),
    ),
    "biased_interleaved_alpha_gated": Lookalike(
        f"{_COLUMNS}{_BIASES}{_LIMIT}\n{_ALPHA}",
        "both = rows[row] @ self.first[bank] + self.first_bias[bank]\n"
        f"gate, up = both[..., ::2], both[..., 1::2]\n{_BEND}"
        "out = out @ self.second[bank] + self.second_bias[bank]",
        ("self.first", "self.first_bias", "self.second", "self.second_bias", "self.slope", "self.bound"),
    ),
    "biased_alpha_gated_float32": Lookalike(
        f"{_COLUMNS}{_BIASES}{_LIMIT}\n{_ALPHA}",
        "both = rows[row].float() @ self.first[bank].float() + self.first_bias[bank].float()\n"
        f"gate, up = both.chunk(2, dim=-1)\n{_BEND}"
        "out = out.float() @ self.second[bank].float() + self.second_bias[bank].float()",
        ("self.first", "self.first_bias", "self.second", "self.second_bias", "self.slope", "self.bound"),
        _FLOAT32,
        "return total.to(rows.dtype)",
    ),
    "ungated": Lookalike(
        _ROWS.replace("2 * ", "") + _ACT,
        f"out = self.act(fn.linear(rows[row], self.first[bank]))\n{_DOWN}",
        ("self.first", "self.second", "self.act"),
        "torch.zeros_like(rows, dtype=shares.dtype)",
        "return total.to(rows.dtype)",
    ),
}  # fmt: skip

#: Combinations of axes that no release of transformers has.
COMBINED = {
    "biased_gated_clamped_not_transposed": Lookalike(
        f"{_ROWS}{_BIASES}{_ACT}\n{_LIMIT}",
        "gate, up = fn.linear(rows[row], self.first[bank], self.first_bias[bank]).chunk(2, dim=-1)\n"
        "out = self.act(gate.clamp(max=self.bound)) * up.clamp(min=-self.bound, max=self.bound)\n"
        "out = fn.linear(out, self.second[bank], self.second_bias[bank])",
        ("self.first", "self.first_bias", "self.second", "self.second_bias", "self.act", "self.bound"),
    ),
    "interleaved_gated_transposed": Lookalike(
        _COLUMNS + _ACT,
        "both = rows[row] @ self.first[bank]\n"
        "out = (self.act(both[..., ::2]) * both[..., 1::2]) @ self.second[bank]",
        ("self.first", "self.second", "self.act"),
    ),
    "gated_clamped_normalised_transposed": Lookalike(
        f"{_COLUMNS}{_ACT}\n{_LIMIT}\nself.norm = nn.LayerNorm(width)",
        "gate, up = (rows[row] @ self.first[bank]).chunk(2, dim=-1)\n"
        "out = self.act(gate.clamp(max=self.bound)) * up.clamp(min=-self.bound, max=self.bound)\n"
        "out = self.norm(out @ self.second[bank])",
        ("self.first", "self.second", "self.act", "self.bound", "self.norm"),
    ),
}  # fmt: skip

OR_IDENTITY = (
    HEAD
    + """
class BankExperts(nn.Module):
    def __init__(self, count, width, inner):
        super().__init__()
        self.real = count - 2
        self.all = self.real + 2
        self.act = nn.SiLU()
        self.same = nn.Identity()
        if self.real > 0:
            self.first = nn.Parameter(torch.randn(self.all, 2 * inner, width))
            self.second = nn.Parameter(torch.randn(self.real, width, inner))

    def forward(self, rows, chosen, shares):
        total = torch.zeros_like(rows)
        if chosen.numel() == 0:
            return total
        places = fn.one_hot(chosen, num_classes=self.all).permute(2, 1, 0)
        used = torch.greater(places.sum(dim=(-1, -2)), 0).nonzero(as_tuple=False)
        for bank in used:
            number = int(bank.item())
            slot, row = torch.where(places[number].squeeze(0))
            state = rows[row]
            if number >= self.real or self.first is None:
                out = self.same(state)
            else:
                gate, up = fn.linear(state, self.first[number]).chunk(2, dim=-1)
                out = fn.linear(self.act(gate) * up, self.second[number])
            out = out * shares[row, slot, None]
            total.index_add_(0, row, out.to(rows.dtype))
        return total
"""
)

MODULES = (
    HEAD
    + """
class BankExperts(nn.ModuleDict):
    def __init__(self, count, width, inner):
        super().__init__()
        self.count = count
        for number in range(count):
            self[f"bank_{number}"] = nn.Linear(width, width)

    def forward(self, rows, places, shares):
        total = torch.zeros_like(rows)
        mask = places.permute(2, 1, 0)
        used = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for bank in used:
            slot, row = torch.where(mask[bank].squeeze(0))
            out = self[f"bank_{bank[0]}"](rows[row]) * shares[row, slot, None]
            total.index_add_(0, row, out.to(rows.dtype))
        return total
"""
)

BATCHED = (
    HEAD
    + """
class BankExperts(nn.Module):
    def __init__(self, count, width, inner):
        super().__init__()
        self.width = width
        self.first = nn.Parameter(torch.randn(count, width, 2 * inner))
        self.second = nn.Parameter(torch.randn(count, inner, width))
        self.act = nn.SiLU()

    def forward(self, rows):
        rows = rows.view(self.first.shape[0], -1, self.width)
        both = torch.bmm(rows, self.first)
        gate, up = both.chunk(2, dim=-1)
        rows = torch.bmm((up * self.act(gate)), self.second)
        return rows.view(-1, self.width)
"""
)

SHARED = (
    HEAD
    + """
class BankExperts(nn.Module):
    def __init__(self, count, width, inner):
        super().__init__()
        self.count = count
        self.gate = nn.Parameter(torch.randn(count, inner, width))
        self.up = nn.Parameter(torch.randn(count, inner, width))
        self.down = nn.Parameter(torch.randn(count, width, inner))
        self.act = nn.SiLU()

    def forward(self, rows, shares):
        shape = rows.shape
        rows = rows.reshape(1, -1, shape[-1]).expand(self.count, -1, -1)
        shares = shares.reshape(-1, self.count, 1).transpose(0, 1)
        gate = torch.bmm(rows, self.gate.transpose(1, 2))
        up = torch.bmm(rows, self.up.transpose(1, 2))
        down = torch.bmm(self.act(gate) * up * shares, self.down.transpose(1, 2))
        return down.float().sum(dim=0).to(rows.dtype).view(shape)
"""
)

GROUPED = (
    HEAD
    + """
class BankExperts(nn.Module):
    def __init__(self, num_banks, width, inner):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_banks, inner, width))
        self.num_banks = num_banks

    def forward(self, rows, sizes):
        shares = rows.split(sizes, dim=0)
        found = []
        for number in range(self.num_banks):
            found.append(fn.linear(shares[number], self.weight[number]))
        joined = torch.cat(found, dim=0)
        return joined
"""
)
