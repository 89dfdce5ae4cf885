"""Norm and rotation of queries and keys in Triton: one pass forward, one backward, one launch for both.

`veomni_hook.kernels.qk_norm_rotary.device` has the formulas. Products are rounded to the promoted dtype of
the norm and the tables, as upstream; the backward is in float32 throughout. Only the operands are saved: a
row's scale is recomputed from the row, which backward reads anyway. Gradients may arrive in any layout.
Results have the same strides as upstream's; dq and dk have the memory order
``[batch, length, heads, head_dim]``, which projections take. Deterministic and batch-invariant: there are no
atomics.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl

from veomni_hook.kernels.qk_norm_rotary import device, reference, skipped_calls
from veomni_hook.kernels.qk_norm_rotary.variants import OP
from veomni_hook.kernels.rms_norm.tiles import summed
from veomni_hook.kernels.shared.autograd import applied, backward_once
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, power
from veomni_hook.kernels.shared.module_calls import parameter
from veomni_hook.kernels.shared.operand_checks import not_plain
from veomni_hook.kernels.shared.operators import define_op

__all__ = ["kernel", "refuses"]

Tensor = torch.Tensor
_WEIGHT, _ONE_PLUS = 1, 2  # the factors, as `rms_norm.device.load_factor` numbers them
_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
#: Tiles over all heads of a position are unrolled; more numbers would need too many tiles.
MOST_NUMBERS = 1 << 17
#: A program takes several positions until it has this many numbers.
_FEW_NUMBERS, _MOST_POSITIONS = 1024, 4


class Plan(NamedTuple):
    """How a kernel is launched: numbers per tile and warp, loads in flight, programs per multiprocessor."""

    tile: int
    a_warps: int
    positions: int = 1
    stages: int = 1
    programs: int = 0


# On an H200, share of a copy's bandwidth at 32/8 heads of 128: forward 95 % (88 % with 512 per warp),
# backward 96 % (92 % with three loads in flight, 76 % with one). Fewer heads need more programs per
# multiprocessor: 75 % with four and 41 % with one at 16/8 heads of 64.
FORWARD = Plan(tile=4096, a_warps=1024)
BACKWARD = Plan(tile=2048, a_warps=512, stages=4, programs=4)
#: How many numbers of positions the programs of a multiprocessor work on together.
_NUMBERS_A_PROCESSOR = 6144


class _Sizes(NamedTuple):
    """The constants of a launch; of a head, twice ``half`` numbers are rotated, ``rest`` are not."""

    q_heads: int
    k_heads: int
    q_block: int
    k_block: int
    half: int
    rest: int
    half_block: int
    rest_block: int


@cache
def _room(on: torch.device) -> tuple[int, int]:
    """The number of multiprocessors, and the bytes that programs of one may stage."""
    if on.type != "cuda":
        return 2, 1 << 16  # the interpreter
    properties = torch.cuda.get_device_properties(on)
    memory = int(getattr(properties, "shared_memory_per_block_optin", 1 << 16))
    return properties.multi_processor_count, memory


def _sizes(plan: Plan, q: Tensor, k: Tensor, cos: Tensor) -> tuple[_Sizes, int, int, int]:
    """The constants of a launch, positions and warps per program, and numbers per position."""
    half = cos.shape[2] // 2
    rest = q.shape[3] - 2 * half
    half_block, rest_block = power(half), power(rest)
    row = power(2 * half_block + (rest_block if rest else 0))
    q_block, k_block = (min(power(x.shape[1]), max(1, plan.tile // row)) for x in (q, k))
    numbers = max(q_block, k_block) * row
    sizes = _Sizes(q.shape[1], k.shape[1], q_block, k_block, half, rest, half_block, rest_block)
    positions = max(plan.positions, min(_MOST_POSITIONS, _FEW_NUMBERS // numbers))
    heads = sum(-(-x.shape[1] // block) * block for x, block in ((q, q_block), (k, k_block)))
    return sizes, positions, max(1, min(8, numbers // plan.a_warps)), heads * row


def _readable(x: Tensor) -> Tensor:
    """``x``, or a copy in the memory order ``[batch, length, heads, head_dim]`` if rows are scattered."""
    return x if x.stride(3) == 1 else x.transpose(1, 2).contiguous().transpose(1, 2)


def _strides(x: Tensor) -> tuple[int, int]:
    """The strides of batch and length in a table; a single batch is broadcast."""
    return (x.stride(0) if x.shape[0] > 1 else 0), x.stride(1)


def _positions_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor of the shape of ``x``, in the memory order of ``[batch, length, heads, head_dim]``."""
    b, h, s, d = x.shape
    return torch.empty_strided((b, h, s, d), (s * h * d, d, h * d, 1), dtype=dtype, device=x.device)


def _result(x: Tensor, dtype: torch.dtype, *, joined: bool) -> Tensor:
    """An empty tensor with the strides of upstream's result: concatenated results are contiguous."""
    result = torch.empty_like(
        x, dtype=dtype, memory_format=torch.contiguous_format if joined else torch.preserve_format
    )
    # Upstream preserves non-contiguous columns; here rows are written contiguously.
    return result if result.stride(3) == 1 else _positions_first(x, dtype)


class _Launched(NamedTuple):
    """How a call is launched; ``results`` are the sizes and strides of both results.

    ``launch`` is None if there is nothing to compute. ``numbers`` are the arguments after the two eps.
    """

    launch: Launch | None
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    results: tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


_Shapes = tuple[torch.Size, ...]
_Strides = tuple[tuple[int, ...], ...]
_Dtypes = tuple[torch.dtype, ...]


def _stand_in(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor without data: plans depend on shapes and strides."""
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


# Plans depend on everything that Triton specialises on, and on the sizes and strides of a call.
@lru_cache(maxsize=LAUNCHES)
def _forward_plan(
    on: torch.device,
    dtypes: _Dtypes,
    shapes: _Shapes,
    strides: _Strides,
    form: tuple[int, torch.dtype, torch.dtype, torch.dtype],
    joined: bool,  # noqa: FBT001
) -> _Launched:
    """Return the forward's plan.

    Args:
        on: where it runs.
        dtypes: of q, the weights, cos and the results.
        shapes: of q, k and cos.
        strides: of q, k, cos and sin.
        form: the factor, and the dtypes to which normalised values, norms and products are rounded.
        joined: whether upstream concatenates the results.
    """
    q, k = (_stand_in(*each, dtypes[0]) for each in zip(shapes[:2], strides[:2], strict=True))
    cos, sin = (_stand_in(shapes[2], each, dtypes[2]) for each in strides[2:])
    q_out, k_out = (_result(x, dtypes[3], joined=joined) for x in (q, k))
    results = (tuple(q_out.shape), q_out.stride()), (tuple(k_out.shape), k_out.stride())
    positions, length = q.shape[0] * q.shape[2], q.shape[2]
    if not positions:
        return _Launched(None, (0, 0, 0), (), results)
    sizes, at_once, warps, _ = _sizes(FORWARD, q, k, cos)
    factor, *rounded = form
    constants = *sizes, factor, *(_TL[each] for each in rounded), at_once
    numbers = (
        positions, length, *q.stride()[:3], *k.stride()[:3], *_strides(cos), *_strides(sin),
        *q_out.stride()[:3], *k_out.stride()[:3],
    )  # fmt: skip
    launch = Launch(device.forward, 8, *constants, num_warps=warps)
    return _Launched(launch, (-(-positions // at_once), 1, 1), numbers, results)


@lru_cache(maxsize=LAUNCHES)
def _backward_plan(
    on: torch.device,
    dtypes: _Dtypes,
    shapes: _Shapes,
    strides: _Strides,
    form: tuple[int, torch.dtype],
    to_weight: bool,  # noqa: FBT001
) -> _Launched:
    """Return the backward's plan: as `_forward_plan`, with the gradients' dtype and strides at the ends."""
    q, k = (_stand_in(*each, dtypes[0]) for each in zip(shapes[:2], strides[:2], strict=True))
    cos, sin = (_stand_in(shapes[2], each, dtypes[2]) for each in strides[2:4])
    dq, dk = (_positions_first(x, x.dtype) for x in (q, k))
    results = (tuple(dq.shape), dq.stride()), (tuple(dk.shape), dk.stride())
    positions, length = q.shape[0] * q.shape[2], q.shape[2]
    sizes, at_once, warps, per_position = _sizes(BACKWARD, q, k, cos)
    together = max(1, _NUMBERS_A_PROCESSOR // (at_once * (q.shape[1] + k.shape[1]) * q.shape[3]))
    a_processor = min(BACKWARD.programs, together)
    processors, room = _room(on)
    staged = a_processor * per_position * at_once * (dtypes[0].itemsize + dtypes[3].itemsize)
    stages = min(BACKWARD.stages, 1 + room // max(staged, 1))
    programs = min(a_processor * processors, -(-positions // at_once))
    if not programs:
        return _Launched(None, (0, 0, 0), (), results)
    factor, middle = form
    constants = *sizes, factor, _TL[middle], to_weight, at_once, stages
    numbers = (
        positions, length, *q.stride()[:3], *k.stride()[:3], *_strides(cos), *_strides(sin),
        *strides[4][:3], *strides[5][:3],
    )  # fmt: skip
    launch = Launch(device.backward, 11, *constants, num_warps=warps)
    return _Launched(launch, (programs, 1, 1), numbers, results)


def _forward_op(  # noqa: PLR0913, PLR0917 - the op's schema
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_eps: float,
    k_eps: float,
    factor: int,
    middle: torch.dtype,
    normed: torch.dtype,
    product: torch.dtype,
    out: torch.dtype,
    joined: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor]:
    q, k = _readable(q), _readable(k)
    plan = _forward_plan(
        q.device, (q.dtype, q_weight.dtype, cos.dtype, out), (q.shape, k.shape, cos.shape),
        (q.stride(), k.stride(), cos.stride(), sin.stride()), (factor, middle, normed, product), joined,
    )  # fmt: skip
    q_out = torch.empty_strided(*plan.results[0], dtype=out, device=q.device)
    k_out = torch.empty_strided(*plan.results[1], dtype=out, device=q.device)
    if plan.launch is not None:
        plan.launch(
            plan.grid, q, k, q_weight, k_weight, cos, sin, q_out, k_out,
            float(q_eps), float(k_eps), *plan.numbers,
        )  # fmt: skip
    return q_out, k_out


def _backward_op(  # noqa: PLR0913, PLR0917 - the op's schema
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_grad: Tensor,
    k_grad: Tensor,
    q_eps: float,
    k_eps: float,
    factor: int,
    middle: torch.dtype,
    to_weight: bool,  # noqa: FBT001 - the op's schema
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, q_grad, k_grad = map(_readable, (q, k, q_grad, k_grad))
    plan = _backward_plan(
        q.device, (q.dtype, q_weight.dtype, cos.dtype, q_grad.dtype), (q.shape, k.shape, cos.shape),
        (q.stride(), k.stride(), cos.stride(), sin.stride(), q_grad.stride(), k_grad.stride()),
        (factor, middle), to_weight,
    )  # fmt: skip
    dq = torch.empty_strided(*plan.results[0], dtype=q.dtype, device=q.device)
    dk = torch.empty_strided(*plan.results[1], dtype=k.dtype, device=q.device)
    columns = q.shape[3]
    programs = plan.grid[0]
    if plan.launch is None or not to_weight:
        weights = torch.zeros(2, columns, dtype=q_weight.dtype, device=q.device)
        partial = weights  # a placeholder that the kernel does not access
    else:
        partial = torch.empty_strided(
            (programs, 2 * columns), (2 * columns, 1), dtype=torch.float32, device=q.device
        )
    if plan.launch is not None:
        plan.launch(
            plan.grid, q, k, q_weight, k_weight, cos, sin, q_grad, k_grad, dq, dk, partial,
            float(q_eps), float(k_eps), *plan.numbers,
        )  # fmt: skip
        if to_weight:
            weights = summed(partial, q_weight.dtype).view(2, columns)
    return dq, dk, weights


def _forward_fake(q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *_, dtype, joined = others
    return _result(q, dtype, joined=joined), _result(k, dtype, joined=joined)


def _backward_fake(q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    weights = others[0].new_empty((2, q.shape[3]))
    return _positions_first(q, q.dtype), _positions_first(k, k.dtype), weights


_FORWARD = define_op(
    "qk_norm_rotary(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin,"
    " float q_eps, float k_eps, int factor, ScalarType middle, ScalarType normed, ScalarType product,"
    " ScalarType out, bool joined)"
    " -> (Tensor, Tensor)",
    _forward_op,
    _forward_fake,
)
_BACKWARD = define_op(
    "qk_norm_rotary_backward(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin,"
    " Tensor q_grad, Tensor k_grad, float q_eps, float k_eps, int factor, ScalarType middle, bool to_weight)"
    " -> (Tensor, Tensor, Tensor)",
    _backward_op,
    _backward_fake,
)


class _QkNormRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *operands: Any) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands[:6])
        ctx.form = operands[6:10]
        return _FORWARD(*operands)  # type: ignore[no-any-return]

    @staticmethod
    @backward_once
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, *_ = ctx.saved_tensors
        # Unused results have no gradient, and their inputs get none.
        used = [grad is not None for grad in incoming]
        needs = [need and use for need, use in zip(ctx.needs_input_grad[:4], used * 2, strict=True)]
        grads = (
            torch.zeros_like(x) if grad is None else grad for x, grad in zip((q, k), incoming, strict=True)
        )
        dq, dk, weights = _BACKWARD(*ctx.saved_tensors, *grads, *ctx.form, needs[2] or needs[3])
        return (
            dq if needs[0] else None,
            dk if needs[1] else None,
            weights[0] if needs[2] else None,
            weights[1] if needs[3] else None,
            *[None] * 10,
        )


_apply = applied(_QkNormRotary)


class _Kernel:
    """The kernel of one variant; unsupported operands are computed by the reference."""

    def __init__(self, variant: str) -> None:
        norm, rotation = OP.variants[variant].form
        self._formula = reference.of(variant)
        self._factor = _ONE_PLUS if norm == "one_plus_weight" else _WEIGHT
        self._cast_first = norm == "cast_before_weight"
        self._cast_out = rotation == "half_split_cast_out"
        self._joined = rotation == "half_split_partial"

    def __call__(  # noqa: PLR0913, PLR0917 - the operands of the op
        self,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        q_eps: float,
        k_eps: float,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return normalised, rotated ``q`` and ``k`` ``[batch, heads, length, head_dim]``, of any strides.

        Weights are ``[head_dim]``, ``cos`` and ``sin`` ``[batch or 1, length, width]``, in any float dtypes.
        Results have the same dtypes as the formula's. Nothing is mutated.
        """
        numbers = isinstance(q_eps, (float, int)) and isinstance(k_eps, (float, int))
        if not numbers or self._unsuited(q, k, q_weight, k_weight, cos, sin):
            return self._formula(q, k, q_weight, k_weight, q_eps, k_eps, cos, sin)
        middle, normed = torch.float32, q.dtype
        if self._cast_first:
            middle, normed = q.dtype, torch.promote_types(q.dtype, q_weight.dtype)
        product = torch.promote_types(normed, cos.dtype)
        out = normed if self._cast_out else product
        needed = q.requires_grad or k.requires_grad or q_weight.requires_grad or k_weight.requires_grad
        run = _apply if needed and torch.is_grad_enabled() else _FORWARD
        return run(  # type: ignore[no-any-return]
            q,
            k,
            q_weight,
            k_weight,
            cos,
            sin,
            q_eps,
            k_eps,
            self._factor,
            middle,
            normed,
            product,
            out,
            self._joined,
        )

    def _unsuited(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
    ) -> bool:
        if not_plain(q, k, q_weight, k_weight, cos, sin) or not q.ndim == k.ndim == 4 or cos.ndim != 3:
            return True
        batch, heads, length, columns = q.shape
        tables, positions, width = cos.shape
        return not (
            q.dtype is k.dtype
            and q_weight.dtype is k_weight.dtype
            and cos.dtype is sin.dtype
            and _DTYPES.issuperset((q.dtype, q_weight.dtype, cos.dtype))
            and q.device == k.device == q_weight.device == k_weight.device == cos.device == sin.device
            and k.shape == (batch, k.shape[1], length, columns)
            and q_weight.shape == k_weight.shape == (columns,)
            and q_weight.is_contiguous()
            and k_weight.is_contiguous()
            and cos.shape == sin.shape
            and tables in (1, batch)
            and positions == length
            and (width == columns or (self._joined and 0 < width < columns))
            and width % 2 == 0
            and cos.stride(2) == sin.stride(2) == 1
            and not (cos.requires_grad or sin.requires_grad)
            and max(heads, k.shape[1]) * power(columns) <= MOST_NUMBERS
        )


@cache
def kernel(variant: str) -> _Kernel:
    """Return the kernel of a variant."""
    return _Kernel(variant)


def refuses(owner: Any, *operands: Any) -> str | None:
    """Return why this call must run the upstream code, or None; `upstream` documents the operands."""
    reason = skipped_calls.refuses(owner, *operands)
    if reason is not None:
        return reason
    hidden_states, q_norm, k_norm, _, _, tables = operands
    weights = parameter(q_norm, "weight"), parameter(k_norm, "weight")
    reason = not_plain(*weights)
    if reason is not None:
        return reason
    for operand in (hidden_states, *weights, *(tables or ())):
        if operand.dtype not in _DTYPES:
            return f"an operand has dtype {operand.dtype}"
    device = hidden_states.device
    for weight in weights:
        if weight.device != device:
            return f"the weight of a norm is on {weight.device}, the input on {device}"
    return None
