"""The prover of linear attention: upstream's text around the routed calls, and its functions' formulas.

An idiom knows the functions by their declaration alone, so here each one's body is compared with the
reference, in every release.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.proof.compare import MODE, Differs, run, tensors
from tests.proof.provers import Proof, Unreached, slots_of, with_kernels
from tests.proof.restored import prove_inserted_code

#: Sums over chunks are taken in another order.
_TOLERANCE, _HALF = 2e-5, 5e-2


def prove_linear_attention(site: Any, module: Any) -> Proof:
    """A site's edits, taken back, leave upstream's code; and the function it calls is the op's formula."""
    prove_inserted_code(site, module)
    calls = {"gated_delta_rule": _rule, "causal_conv": _convolution}
    if site.op not in calls:
        return Proof(gradients=0)
    inputs, options = calls[site.op]()
    if site.variant == "channel_decay":
        query = inputs["query"] = torch.randn(2, 70, 4, 8)
        inputs |= {"key": torch.randn(query.shape), "g": -torch.rand(query.shape)}
    return _proved(site, module, inputs, options)


def _proved(site: Any, module: Any, inputs: dict[str, Any], options: dict[str, Any]) -> Proof:
    if MODE.kernels == "triton" and site.op == "gated_delta_rule":  # half precision alone
        # Triton's interpreter multiplies no matrices of bfloat16.
        half = torch.bfloat16 if torch.cuda.is_available() else torch.float16
        inputs |= {name: inputs[name].to(half) for name in ("query", "key", "value")}
    function = getattr(module, site.captures["function"])
    separated = getattr(module, f"veomni_{site.op}").separated
    owner = nn.Module()
    (slot,) = slots_of(module, site.op)

    def both(call: Callable[..., Any]) -> Any:
        return run(lambda **given: call(**given, **options), inputs)

    found = with_kernels(MODE.kernels, lambda: both(separated(slot, owner, function)))
    outcome = slot.outcome(owner)
    if outcome is None or outcome.backend != MODE.kernels:
        raise Unreached(f"the reference did not run: {outcome}")
    expected = both(function)
    if expected.keys() != found.keys() or len(tensors(dict(expected))) < 2 * len(inputs):
        raise Differs(f"results differ: {sorted(expected.keys() ^ found.keys())}")
    errors = {}
    for name, want in expected.items():
        errors[name] = ((want - found[name]).abs().max() / want.abs().max().clamp(min=1e-6)).item()
        exact = inputs[next(iter(inputs))].dtype is torch.float32
        tolerance = _TOLERANCE * MODE.slack if exact else _HALF
        if not errors[name] <= tolerance:
            raise Differs(f"{name}: relative error {errors[name]:.2e}, allowed {tolerance:.1e}")
    return Proof(len(expected.gradients), errors)


def _rule() -> tuple[dict[str, Any], dict[str, Any]]:
    torch.manual_seed(0)
    inputs = {name: torch.randn(2, 70, 2, 8) for name in ("query", "key")}
    inputs |= {"value": torch.randn(2, 70, 4, 6), "g": -torch.rand(2, 70, 4), "beta": torch.rand(2, 70, 4)}
    inputs["initial_state"] = torch.randn(2, 4, 8, 6)
    return inputs, {"output_final_state": True, "use_qk_l2norm_in_kernel": True}


def _convolution() -> tuple[dict[str, Any], dict[str, Any]]:
    torch.manual_seed(0)
    inputs = {"hidden_states": torch.randn(2, 6, 9), "weight": torch.randn(6, 4), "bias": torch.randn(6)}
    return inputs, {"activation": "silu"}
