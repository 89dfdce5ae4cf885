"""Towers that compute positions and boundaries themselves, as those of transformers 5.2 do, on the pretended device.

    python -m tests.multimodal.facts_of_towers

Prints JSON: by kind of tower and side (`theirs`, `ours`) the waits, and whether outputs and gradients are equal.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import nn

from tests.multimodal.pretended import Waits, on_device
from tests.patches.idioms.applied import spliced
from veomni_hook.multimodal import host
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms.host_metadata import find as idiom
from veomni_hook.patches.routes.view import ModuleView

SOURCE = """
class Embeddings(nn.Module):
    def forward(self, states, lengths, shapes):
        if isinstance(lengths, list):
            lengths = torch.tensor(lengths, device=states.device, dtype=torch.long)
        heights = torch.cat([shapes[at, 1].repeat(lengths[at]) for at in range(len(lengths))])
        return states + heights[:, None].to(states.dtype)


class Tower(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.merge_size = config.merge_size
        self.window_size = 3
        self.table = nn.Parameter(torch.linspace(-1, 1, 40).reshape(20, 2))
        self.places = nn.Embedding(9, 2)
        self.embeddings = Embeddings()

    def rot_pos_emb(self, grid_thw):
        pos_ids = []
        for t, h, w in grid_thw:
            rows = torch.arange(h).unsqueeze(1).expand(-1, w).flatten()
            pos_ids.append(rows.repeat(t))
        pos_ids = torch.cat(pos_ids, dim=0)
        largest = grid_thw[:, 1:].max()
        return (self.table[:largest] * 2)[pos_ids]

    def get_window_index(self, grid_thw):
        index, lengths, start = [], [0], 0
        for t, h, w in grid_thw.tolist():
            whole = torch.arange(t * h * w)
            index.append(whole.flip(0) + start)
            start += t * h * w
            lengths.extend([start - self.window_size, start])
        return torch.cat(index), lengths

    def interpolated(self, grid_thw):
        sizes = grid_thw.tolist()
        device = self.places.weight.device
        indices = [at % 9 for t, h, w in sizes for at in range(t * h * w)]
        weights = [1.0 / (1 + at) for at in indices]
        weights = torch.tensor(weights, dtype=self.places.weight.dtype, device=device)
        indices = torch.tensor(indices, dtype=torch.long, device=device)
        return self.places(indices) * weights[:, None]

    def forward(self, states, grid_thw, **kwargs):
        emb = self.rot_pos_emb(grid_thw)
        window, inner = self.get_window_index(grid_thw)
        inner = torch.tensor(inner, device=states.device, dtype=grid_thw.dtype)
        inner = torch.unique_consecutive(inner)
        states = (states + emb + self.interpolated(grid_thw))[window, :]
        borders = torch.repeat_interleave(grid_thw[:, 1] * grid_thw[:, 2], grid_thw[:, 0]).cumsum(
            dim=0, dtype=torch.int32  # a comment
        )
        borders = F.pad(borders, (1, 0), value=0)
        lengths = (borders[1:] - borders[:-1]).tolist()
        shapes = torch.stack([grid_thw[0]] * len(lengths))
        states = self.embeddings(states, lengths, shapes)
        parts = states.split(lengths)
        states = torch.cat([part * (1 + at) for at, part in enumerate(parts)])
        steps = torch.diff(inner).tolist()
        total = sum(state.square().sum() * (1 + at) for at, state in enumerate(states.split(steps)))
        return states[torch.argsort(window)], total
"""

SOUNDS = """
def _get_feat_extract_output_lengths(lengths):
    return (lengths - 1) // 2 + 1


class Tower(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.window = config.merge_size
        self.scale = nn.Parameter(torch.linspace(-1, 1, 2))

    def padded(self, parts, part_lens, fill=0.5):
        longest = part_lens.max()
        states = torch.full((len(parts), longest, 2), fill, device=parts[0].device)
        mask = torch.zeros((len(part_lens), longest), dtype=torch.long, device=states.device)
        for at, length in enumerate(part_lens):
            mask[at, :length] = 1
            states[at, :length] = parts[at]
        return states, mask.unsqueeze(2), mask.bool()

    def blocks(self, states, ends):
        apart = torch.full([len(states), len(states)], -1.0, device=states.device)
        for at in range(1, len(ends)):
            apart[..., ends[at - 1] : ends[at], ends[at - 1] : ends[at]] = 0
        return apart

    def forward(self, features, feature_lens=None, out_lens=None, **kwargs):
        out_lens = _get_feat_extract_output_lengths(feature_lens)
        count = torch.ceil(feature_lens / (self.window * 2)).long()
        part_lens = torch.full((count.sum(),), self.window * 2, device=feature_lens.device)
        last = F.pad(count, (1, 0), value=-1).cumsum(0)[1:]
        part_lens[last] = feature_lens % (self.window * 2)
        part_lens[part_lens == 0] = self.window * 2
        states, shown, mask = self.padded(features.split(part_lens.tolist(), dim=0), part_lens, fill=0.25)
        chosen = nn.utils.rnn.pad_sequence(
            [torch.ones(each, dtype=torch.bool, device=features.device) for each in part_lens], batch_first=True
        )
        states = (states * shown * self.scale)[mask]
        ends = torch.cat((torch.zeros(1, device=mask.device, dtype=torch.int32), mask.sum(1).cumsum(0))).to(torch.int32)
        apart = self.blocks(states, ends)
        for _ in range(2):
            states = states + apart.softmax(-1) @ states * (1 + ends[1])
        width = [0]
        for length in out_lens:
            width += [self.window] * (length // self.window)
            rest = length % self.window
            if rest != 0:
                width += [rest]
        steps = torch.tensor(width, device=out_lens.device).cumsum(-1)
        others = self.padded(features.split(part_lens.tolist(), dim=0), part_lens)[0][chosen]
        return states, (others * self.scale).square().sum() * steps[-1] + steps.sum()
"""


def tower(source: str) -> nn.Module:
    """The tower of a source, on the pretended device."""
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": nn.functional, "veomni_host": host}
    exec(source, scope)
    torch.manual_seed(0)
    made: nn.Module = on_device(scope["Tower"](type("Config", (), {"merge_size": 2})()))
    return made


def run(source: str, sizes: torch.Tensor) -> tuple[dict[str, int], list[torch.Tensor]]:
    """The waits of a step, by line, and its output and gradients."""
    made = tower(source)
    states = on_device(torch.linspace(0, 1, 58).reshape(2, 29)).t().requires_grad_()
    sizes = on_device(sizes)
    with Waits() as found:
        out, total = made(states, sizes)
        (out * 2).sum().add(total).backward()
    told = {f"{why} {where}": count for (why, where), count in found.found.items()}
    gradients = [each.grad.held for each in made.parameters()]
    return told, [out.detach().held, total.detach().held, *gradients, states.grad.held]


def compared(source: str, sizes: torch.Tensor) -> dict[str, Any]:
    """A tower as it is, and as the idiom writes it."""
    sites = list(idiom.find(ModuleView(Document(source, "lookalike"))))
    theirs, expected = run(source, sizes)
    ours, found = run(spliced(source, sites), sizes)
    same = [torch.equal(one, other) for one, other in zip(found, expected, strict=True)]
    return {"theirs": theirs, "ours": ours, "same": same}


if __name__ == "__main__":
    grid = torch.tensor([[1, 4, 2], [2, 2, 3], [1, 3, 3]])
    lengths = torch.tensor([9, 12, 8])
    print(json.dumps({"sizes": compared(SOURCE, grid), "lengths": compared(SOUNDS, lengths)}), flush=True)
    # Torch ends the pretended device's threads by aborting the process.
    os._exit(0)
