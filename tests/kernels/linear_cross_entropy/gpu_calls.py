"""Calls of linear_cross_entropy's Triton kernels that `tests.kernels.absent_gpu` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.kernels.absent_gpu.operands import BF16, F32, Call, both_ways


def calls() -> Iterator[Call]:
    """Everything that is asked of the loss and of statistics without it, in 16 bits and in float32."""
    from tests.kernels.linear_cross_entropy.objectives import (
        EVERYTHING,
        OBJECTIVES,
        loss_of,
        operands,
        tokens_of,
    )
    from tests.kernels.linear_cross_entropy.test_distillation import teacher_of
    from veomni_hook.kernels.linear_cross_entropy import triton

    for name in ("plain", "all", "scale, softcap"):
        for dtype in (BF16, F32):
            given, target = operands(dtype)
            objective = OBJECTIVES[name]("cpu")
            yield f"{name} {dtype}", partial(both_ways, loss_of(triton, target, objective, EVERYTHING), given)
            tokens = tokens_of(triton, target, objective, EVERYTHING)
            yield f"statistics, {name} {dtype}", partial(both_ways, tokens, given)
            taught = objective._replace(teacher=teacher_of(target), distillation=0.5, label_smoothing=0.0)
            loss = loss_of(triton, target, taught, EVERYTHING)
            yield f"with a teacher, {name} {dtype}", partial(both_ways, loss, given)
            tokens = tokens_of(triton, target, taught, EVERYTHING._replace(distillation=True))
            yield f"statistics, with a teacher, {name} {dtype}", partial(both_ways, tokens, given)
