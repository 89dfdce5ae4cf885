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
from tests.kernels.batches import assert_batch_invariant
from tests.kernels.matching import DEVICE, assert_matches
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
        gpu: sizes that Triton's kernels are compiled at for GPUs that are not there (`absent_gpu`).
        gpu_dtypes: of rows, there.
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
    gpu: Sequence[Any] = ()
    gpu_dtypes: Sequence[torch.dtype] = (torch.bfloat16,)
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
    """A call of a kernel, and of its reference, with operands of a size; both as functions of the tensors.

    The size is by default the first of the case. Operands that are named are ``changed``.
    """

    def __init__(
        self,
        kernel: Kernel,
        size: Any = None,
        dtype: torch.dtype = torch.float32,
        others: torch.dtype | None = None,
        **changed: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.case, self.backend = cases(kernel.op)[kernel.variant], kernel.backend
        made = self.case.operands(self.case.sizes[0] if size is None else size, dtype, others or dtype)
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
        self.ours, self.theirs = map(self.by, functions)
        rule = declared.refusal(kernel.op, kernel.variant, kernel.backend)
        self._rule = None if self.case.rule is None else partial(self.case.rule, partial(rule, None))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The operands that are tensors."""
        return [self.operands[name] for name in self.names]

    def _with(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        return [*(self.operands | dict(zip(self.names, tensors, strict=True))).values()]

    def by(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What the op's operands are given to, as a function of the tensors."""
        return lambda *tensors: self.case.call(function, *self._with(tensors))

    def matches(
        self,
        wanted: Sequence[bool] | None = None,
        *,
        of: Callable[[Any], Any] = lambda found: found,
        exact: bool | None = None,
        tolerance: float | None = None,
    ) -> None:
        """Compare both sides: ``of`` says what of the results, the case how exactly."""
        low = min((x.dtype for x in self.tensors if x.is_floating_point()), key=bits)
        by_case = self.case.tolerance.get((self.backend, low), self.case.tolerance.get(low))
        sides = [lambda *tensors, side=side: of(side(*tensors)) for side in (self.ours, self.theirs)]
        assert_matches(
            *sides, self.tensors, self.wanted if wanted is None else wanted,
            exact=self.backend in self.case.exact if exact is None else exact,
            tolerance=tolerance or by_case,
        )  # fmt: skip

    def is_batch_invariant(self, part: int | None = None) -> None:
        """Assert that a row's results (or a ``part`` of them) and gradients have the same bits in any batch."""
        rows = [name for name in self.names if name in self.case.rows]
        fixed = [name for name in rows if not self.wanted[self.names.index(name)]]
        rows = [name for name in rows if name not in fixed]
        others = [name for name in self.names if name not in (*rows, *fixed)]

        def run(*tensors: torch.Tensor) -> torch.Tensor:
            named = dict(zip((*rows, *others, *fixed), tensors, strict=True))
            found = results(self.ours(*(named[name] for name in self.names)))
            chosen = found if part is None else found[part : part + 1]
            return torch.cat([each.flatten(1) for each in chosen], -1)

        assert_batch_invariant(
            run, *([self.operands[name] for name in names] for names in (rows, others, fixed))
        )

    def refused(self, *tensors: torch.Tensor) -> str | None:
        """Why the kernel does not take this call, or one with other tensors."""
        return self._rule and self._rule(*self._with(tensors or self.tensors))


def results(made: Any) -> tuple[torch.Tensor, ...]:
    """What a call returns, as a tuple."""
    return made if isinstance(made, tuple) else (made,)


def bits(dtype: torch.dtype) -> int:
    """The bits of a number."""
    return torch.finfo(dtype).bits


def call_of(
    op: str, variant: str, backend: str, *of: Any, **changed: Callable[[torch.Tensor], torch.Tensor]
) -> Call:
    """The `Call` of the kernel of these names."""
    return Call(declared.kernels(op, backend)[variant], *of, **changed)


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
