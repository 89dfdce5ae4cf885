"""Whether the processes of a sequence group have the same batch: checked with a model's first batch.

With different batches, attention would mix positions of several sequences, and nothing else would tell.
"""

from __future__ import annotations

import torch

from veomni_hook.errors import ParallelError
from veomni_hook.parallel.groups import SequenceGroup

__all__ = ["check_same_batch"]

#: How many positions are compared, spread over the batch.
_SAMPLES = 16
_TOLERANCE = 1e-2
_OPS = torch.ops._c10d_functional


@torch.no_grad()
def check_same_batch(model: str, hidden_states: torch.Tensor, group: SequenceGroup) -> None:
    """Compare shapes, and hidden states at a few positions; the host waits.

    Zeros are not compared: dropout puts them at other places in each process.

    Raises:
        ParallelError: they differ.
    """
    batch, length = hidden_states.shape[:2]
    shape = torch.tensor([batch, length], device=hidden_states.device)
    shapes = _all(shape, group).view(group.size, -1).tolist()
    if any(one != shapes[0] for one in shapes):
        _differ(model, f"batches of {' and '.join(f'{b} x {p}' for b, p in shapes)} positions", group)
    rows = hidden_states.flatten(2).flatten(0, 1)
    at = torch.linspace(0, rows.shape[0] - 1, _SAMPLES, device=rows.device).long()
    samples = _all(rows[at].float(), group).view(group.size, -1)
    first = samples[:1]
    far = (samples - first).abs() > _TOLERANCE * first.abs().max().clamp(min=1e-30)
    if bool((far & (samples != 0) & (first != 0)).any()):
        _differ(model, "other tokens", group)


def _all(x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    whole: torch.Tensor = _OPS.wait_tensor(
        _OPS.all_gather_into_tensor(x.contiguous(), group.size, group.name)
    )
    return whole


def _differ(model: str, what: str, group: SequenceGroup) -> None:
    raise ParallelError(
        f"the {group.size} processes that share each sequence have {what}",
        where=f"the first batch of {model} in rank {group.rank} of its sequence group",
        fix="give them the same batches: index, count = veomni_hook.parallel.data_shard(), and "
        "DistributedSampler(dataset, num_replicas=count, rank=index)",
    )
