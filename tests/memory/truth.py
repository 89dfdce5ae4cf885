"""What a step really takes on a CPU, as PyTorch's profiler sees its allocator."""

import gc

import torch
from torch.profiler import ProfilerActivity, profile


def real_peak(model, inputs, optimizer=None):
    """The bytes that live at once in the second step of a model: what lived before it, and what it allocates."""

    def step():
        model(**inputs).loss.backward()
        if optimizer is not None:
            optimizer.step()

    step()
    model.zero_grad(set_to_none=True)
    states = (
        [] if optimizer is None else [one for state in optimizer.state.values() for one in state.values()]
    )
    kept = [*model.parameters(), *model.buffers(), *states, *inputs.values()]
    storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in kept if torch.is_tensor(one)}
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(50, 2, 2)  # Triton's interpreter leaves tensors in cycles
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    gc.set_threshold(*thresholds)
    events = recorded.profiler.kineto_results.events()
    changes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    now = peak = sum(storage.nbytes() for storage in storages.values())
    for _, change in changes:
        now += change
        peak = max(peak, now)
    model.zero_grad(set_to_none=True)
    return peak
