"""What every op declares for `test_contract`: ``tests/kernels/<op>/cases.py`` has a `Case` for each variant.

They are in ``CASES``, or a function ``case`` makes that of a variant.

``REFUSED`` there lists calls that kernels refuse. An op without the file fails, or says in `ELSEWHERE` why it has none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch

from tests.kernels import declared
from tests.kernels.matching import DEVICE
from veomni_hook.kernels.selection.declaration import Kernel
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.slot.arguments import operand_names

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Those that run wherever the tests run: interpreted, on the double of torch_npu's operators, and as they are. Kernels
#: of other packages have tests of their own.
BACKENDS = ("triton", "npu", "torch")
#: Ops whose calls are no functions of tensors alone, or that are not converted yet.
ELSEWHERE = {
    **dict.fromkeys(("attention", "varlen_attention"), "masks and layers decide what is computed"),
    **dict.fromkeys(("linear_cross_entropy", "load_balancing_loss"), "a loss of many operands, in chunks"),
    **dict.fromkeys(("moe_experts", "moe_router", "low_rank_linear"), "routings and modules are operands"),
    **dict.fromkeys(("gated_delta_rule", "causal_conv"), "sequences have boundaries"),
}
_COMPOSED = "shared.recompute"
OPS = [op for op in registry.names() if op not in ELSEWHERE]


@dataclass(frozen=True)
class Case:
    """How a variant is called.

    Attributes:
        operands: ``(size, dtype of rows, dtype of other tensors)`` -> the operands by name, in the order of calls.
            Floating-point tensors have gradients.
        sizes: what ``operands`` takes. The first is small; 16-bit dtypes are compared in it by default.
        batch: a size of 64 rows and some columns.
        deep: a size of rows in three dimensions, where three strides lead to a row.
        rows: the operands whose first dimension is the batch.
        fixed: tensors without gradients.
        call: ``(function, *operands)`` -> the results, where a call is not the operands in their order.
        rule: ``(rule, *operands)`` -> why a kernel takes no such call, the same way; None: it takes every call.
        exact: backends that have the reference's bits.
        tolerance: of the largest value, by dtype, or backend and dtype, where it is not that of `matching`.
        rounds: how many of a result's values may differ from the reference's in float16.
        rereads: by backend, the results that are kept for the backward.
        spared: operands that are not kept.
        kept: by backend, how many tensors like the rows are kept beside operands and such results.
        dtypes: of rows.
        unlike: what does not hold: by the name of the test and the backend, the reason.
    """

    operands: Callable[[Any, torch.dtype, torch.dtype], Mapping[str, Any]]
    sizes: Sequence[Any]
    batch: Any = None
    deep: Any = None
    rows: Sequence[str] = ("hidden_states",)
    fixed: Sequence[str] = ()
    call: Callable[..., Any] = lambda function, *operands: function(*operands)
    rule: Callable[..., str | None] | None = lambda rule, *operands: rule(*operands)
    exact: Sequence[str] = ()
    tolerance: Mapping[torch.dtype | tuple[str, torch.dtype], float] = field(default_factory=dict)
    rounds: float = 0.01
    rereads: Mapping[str, Sequence[int]] = field(default_factory=dict)
    spared: Sequence[str] = ()
    kept: Mapping[str, int] = field(default_factory=dict)
    dtypes: Sequence[torch.dtype] = DTYPES
    unlike: Mapping[tuple[str, str], str] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """A call that is refused: which operands are changed, what the reason says, and whom it concerns."""

    reason: str
    change: Mapping[str, Any]
    variants: Sequence[str]
    backends: Sequence[str]


class Call:
    """A call of a kernel, and of its reference, with operands of a size; both as functions of the tensors."""

    def __init__(
        self,
        kernel: Kernel,
        size: Any,
        dtype: torch.dtype = torch.float32,
        others: torch.dtype | None = None,
        **changed: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.case = cases(kernel.op)[kernel.variant]
        made = self.case.operands(size, dtype, others or dtype)
        self.operands = {
            name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
            for name, value in made.items()
        }
        for name, change in changed.items():
            self.operands[name] = change(self.operands[name])
        self.names = [name for name, value in self.operands.items() if isinstance(value, torch.Tensor)]
        self.wanted = [
            name not in self.case.fixed and self.operands[name].is_floating_point() for name in self.names
        ]
        functions = declared.pair(kernel.op, kernel.variant, kernel.backend)
        self.ours, self.theirs = (partial(self._run, function) for function in functions)
        rule = declared.refusal(kernel.op, kernel.variant, kernel.backend)
        self._rule = None if self.case.rule is None else partial(self.case.rule, partial(rule, None))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The operands that are tensors."""
        return [self.operands[name] for name in self.names]

    def _with(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        return [*(self.operands | dict(zip(self.names, tensors, strict=True))).values()]

    def _run(self, function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        return self.case.call(function, *self._with(tensors))

    def refused(self, *tensors: torch.Tensor) -> str | None:
        """Why the kernel does not take this call, or one with other tensors."""
        return self._rule and self._rule(*self._with(tensors or self.tensors))


@cache
def cases(op: str) -> Mapping[str, Case]:
    """The op's cases by variant."""
    module = import_module(f"tests.kernels.{op}.cases")
    if hasattr(module, "CASES"):
        return module.CASES
    return {variant: module.case(variant) for variant in registry.ops()[op].variants}


def in_order(op: str, variant: str, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``operands`` that a variant takes, and the defaults of others, in their order."""
    return {name: operands.get(name, default) for name, default in operand_names(op, variant).items()}


def refusals(op: str) -> Iterator[tuple[Kernel, Refusal]]:
    """What the op's kernels refuse."""
    for refusal in getattr(import_module(f"tests.kernels.{op}.cases"), "REFUSED", ()):
        for backend in refusal.backends:
            of_backend = declared.kernels(op, backend)
            for variant in refusal.variants:
                yield of_backend[variant], refusal


def calls(
    turn: int, test: str, *, sizes: bool = False, operators: bool = False, cheap: bool = False
) -> list[Any]:
    """The cases of a test: every kernel, or every kernel, size and dtype.

    The default suite takes one kernel of each file, another one in every turn. Of sizes and dtypes, it takes one pair
    for each kernel, and all sizes in float32 for the first. With ``operators``, only kernels that have some; with ``cheap``, it takes all.
    """
    found = []
    for op, backend in product(OPS, BACKENDS):
        of_backend = list(declared.kernels(op, backend).values())
        if operators:
            of_backend = (
                [] if backend == "torch" else [each for each in of_backend if _COMPOSED not in each.load]
            )
        files = defaultdict(list)
        for kernel in of_backend:
            files[kernel.load.partition(":")[0]].append(kernel)
        leading = {group[turn % len(group)] for group in files.values()}
        for number, kernel in enumerate(of_backend):
            case = cases(op)[kernel.variant]
            if (test, backend) in case.unlike or (test in {"batches", "rounds"} and case.batch is None):
                continue
            every: list[tuple[Any, ...]] = [()]
            taken = every if kernel in leading or cheap else []
            if sizes:
                every = list(product(case.sizes, case.dtypes))
                # Where operands are rounded does not hang on sizes.
                usual = [each for each in every if each[0] is case.sizes[0] or each[1] is torch.float32]
                taken = [usual[number % len(usual)], *(usual[len(case.dtypes) :] if number == 0 else [])]
            for each in every:
                name = " ".join(map(str, (op, backend, kernel.variant, *each)))
                found.append(
                    pytest.param(kernel, *each, id=name, marks=[] if each in taken else pytest.mark.slow)
                )
    return found
