"""torch's matrix products, replaced in this process: each row is computed as if it were alone.

Everything that multiplies matrices goes through the operators below: ``linear``, ``matmul``, ``@``,
``einsum``, and the backward passes of these. Products of other dtypes, and of sparse tensors, stay torch's.
On a CPU, torch's own product computes one row after the other; this is slow, and for checking results.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from veomni_hook.errors import SettingsError

__all__ = ["OPERATORS", "install", "uninstall"]

Tensor = torch.Tensor
Number = int | float

#: The operators: ``a @ b``, and ``beta * term + alpha * a @ b``.
OPERATORS = (
    "mm",
    "mm.out",
    "bmm",
    "bmm.out",
    "addmm",
    "addmm.out",
    "addmm_",
    "baddbmm",
    "baddbmm.out",
    "baddbmm_",
)
#: Rows times a matrix for each group of rows; the host waits for the groups.
_GROUPED = "_grouped_mm"
_KEYS = {"CPU": torch._C.DispatchKey.CPU, "CUDA": torch._C.DispatchKey.CUDA}
_DTYPES = {
    "CPU": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
    "CUDA": (torch.bfloat16, torch.float16, torch.float32),
}
_library: Any = None


def install() -> None:
    """Replace the operators, on a CPU and, where there is one, on a GPU.

    Raises:
        SettingsError: this torch cannot call what it replaces.
    """
    global _library  # noqa: PLW0603
    if _library is not None:
        return
    if not hasattr(torch.library, "get_kernel"):
        raise SettingsError(
            f"torch {torch.__version__} cannot call an operator that is replaced",
            where="deterministic=batch_invariant",
            fix="install torch>=2.10, or leave the setting out",
        )
    devices = ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",)
    replaced = {(name, device): _replacement(name, device) for device in devices for name in OPERATORS}
    replaced |= {(_GROUPED, device): _grouped(device) for device in devices}
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that an operator is replaced
        for (name, device), function in replaced.items():
            _library.impl(name, function, device, allow_override=True)


def uninstall() -> None:
    """Bring torch's operators back."""
    global _library  # noqa: PLW0603
    if _library is not None:
        _library._destroy()
        _library = None
        _original.cache_clear()


@cache
def _original(name: str, device: str) -> Callable[..., Any]:
    kernel: Any = torch.library.get_kernel(f"aten::{name}", device)
    keys = torch._C.DispatchKeySet(_KEYS[device])

    def call(*operands: object, **options: object) -> Any:
        return kernel.call_boxed(keys, *operands, **options)

    return call


def _replacement(name: str, device: str) -> Callable[..., Tensor]:
    """Return what computes the operator on ``device`` from now on."""
    original = _original(name, device)
    multiply: Callable[..., Tensor] = _on_gpu if device == "CUDA" else _by_rows

    def function(*tensors: Tensor, out: Tensor | None = None, **factors: Number) -> Tensor:
        *term, a, b = tensors
        target = term[0] if name.endswith("_") else out
        if not _is_served(_DTYPES[device], a, b, *term, *(() if out is None else (out,))):
            return original(*tensors, **factors, **({} if out is None else {"out": out}))  # type: ignore[no-any-return]
        if target is not None and out is not None and target.numel() == 0:
            target.resize_(*a.shape[:-1], b.shape[-1])
        flat = a.dim() == 2
        operands = [operand[None] if flat else operand for operand in (a, b)]
        output = multiply(
            *operands, term[0] if term else None, factors.get("alpha", 1), factors.get("beta", 1)
        )
        output = output[0] if flat else output
        return output if target is None else target.copy_(output)

    return function


def _grouped(device: str) -> Callable[..., Tensor]:
    """Return what computes ``torch._grouped_mm`` of rows and a matrix for each group, group by group."""
    original = _original("_grouped_mm", device)

    def function(
        a: Tensor,
        b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        if a.dim() != 2 or b.dim() != 3 or offs is None or bias is not None:
            output: Tensor = original(a, b, offs, bias, out_dtype)
            return output
        result = a.new_zeros(len(a), b.shape[2], dtype=out_dtype or a.dtype)
        for matrix, (first, last) in zip(b, pairwise([0, *offs.tolist()]), strict=True):
            result[first:last] = a[first:last] @ matrix
        return result

    return function


def _is_served(dtypes: tuple[torch.dtype, ...], a: Tensor, b: Tensor, *others: Tensor) -> bool:
    """Whether the operands fit; where they do not, torch's own operator raises the error."""
    if {other.dtype for other in (b, *others)} - {a.dtype} or a.dtype not in dtypes or a.dim() != b.dim():
        return False
    return a.shape[-1] == b.shape[-2] and a.shape[:-2] == b.shape[:-2]


def _on_gpu(a: Tensor, b: Tensor, term: Tensor | None, alpha: Number, beta: Number) -> Tensor:
    from veomni_hook.batch_invariance.triton import product  # Triton may be missing where there is no GPU

    return product(a, b, term, alpha=alpha, beta=beta)


def _by_rows(a: Tensor, b: Tensor, term: Tensor | None, alpha: Number, beta: Number) -> Tensor:
    multiply = _original("mm", "CPU")
    output = a.new_empty(*a.shape[:2], b.shape[2])
    for matrix, other, results in zip(a, b, output, strict=True):
        for row, result in zip(matrix, results, strict=True):
            # A new tensor begins at a multiple of 64 bytes; vectorised code may depend on this.
            result.copy_(multiply(row[None].clone(memory_format=torch.contiguous_format), other)[0])
    output = output if alpha == 1 else output * alpha
    return output if term is None or beta == 0 else output + beta * term
