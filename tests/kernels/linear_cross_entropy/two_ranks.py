"""One rank of `test_two_ranks`: trains a patched and an upstream model side by side and compares them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.kernels.linear_cross_entropy.routed import batch, load, pair, with_decoder, with_trained_copies
from tests.kernels.matching import close
from tests.processes import join, leave
from veomni_hook.kernels.bind import bind
from veomni_hook.kernels.linear_cross_entropy.deferred import logits_are_read
from veomni_hook.kernels.linear_cross_entropy.options import loss_options
from veomni_hook.kernels.linear_cross_entropy.output import LazyLogits
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.tools.report.explanation import explain


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(models, inputs, tolerance: float = 1e-5, *, read: bool = True) -> None:
    """Take two steps with both models and compare losses and weights; no step may read logits."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(2):
        outputs = [model(**inputs, use_cache=False) for model in models]
        assert isinstance(outputs[1], LazyLogits), "the loss was not fused"
        close(outputs[1].loss.detach(), outputs[0].loss.detach(), tolerance)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    inner = getattr(models[1], "module", models[1])
    assert logits_are_read(inner) is None, "a wrapper read the logits"
    for expected, got in zip(models[0].parameters(), models[1].parameters(), strict=True):
        close(full(got).detach(), full(expected).detach(), tolerance)
    if read:
        outputs = [model(**inputs, use_cache=False) for model in models]
        close(full(outputs[1].logits).detach(), full(outputs[0].logits).detach(), tolerance)
        (outputs[1].loss + outputs[1].logits.mean()).backward()


def sharded(model, policy: MixedPrecisionPolicy):
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model.lm_head, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def bound(patched) -> None:
    """Models that were bound before or after FSDP2 took them run what they are bound to."""
    for when in ("before", "after"):
        model = pair(patched)[1]
        if when == "before":
            bind(model, "reference")
        model = sharded(model, MixedPrecisionPolicy())
        if when == "after":
            bind(model, "reference")
        model(**batch(), use_cache=False).loss.backward()
        ran = {row.backend for row in explain(model).rows}
        assert ran == {"reference"}, ran
        print("bound", when, flush=True)


def trained_head(patched, inputs) -> None:
    """Only the head is trained, in the unit of the whole model and in one of its own."""
    for shard in (of_one_unit, lambda model: sharded(model, MixedPrecisionPolicy())):
        copies = pair(patched)
        for model in copies:
            model.model.requires_grad_(requires_grad=False)
        copies = [shard(model) for model in copies]
        train(copies, inputs, read=False)
        policy_gradient(*copies, inputs, 1e-5)
        print("a trained head", flush=True)


def of_one_unit(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def policy_gradient(upstream, model, inputs, tolerance: float) -> None:
    """Compare a policy gradient, which runs backward from the fields alone, with that from all logits."""
    target = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    every = (upstream(inputs["input_ids"], use_cache=False).logits.float() / 0.8).log_softmax(-1)
    log_probs = every.gather(-1, target.clamp(min=0)[..., None])[..., 0].where(target != -100, 0)
    entropy = -(every.exp() * every).sum(-1).where(target != -100, 0)
    with loss_options(token_outputs=True, temperature=0.8):
        output = model(**inputs, use_cache=False)
    close(output.log_probs.detach(), log_probs.detach(), tolerance)
    close(output.entropy.detach(), entropy.detach(), tolerance)
    (log_probs.exp().sum() - 0.1 * entropy.mean()).backward()
    (output.log_probs.exp().sum() - 0.1 * output.entropy.mean()).backward()
    for expected, got in zip(upstream.parameters(), model.parameters(), strict=True):
        assert (got.grad is None) is (expected.grad is None)
        if got.grad is not None:
            close(full(got.grad), full(expected.grad), tolerance)


def main() -> None:
    set_choice("torch")
    torch.manual_seed(0)
    patched = load(join() / str(dist.get_rank()))
    torch.manual_seed(1 + dist.get_rank())
    inputs = batch()
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        copies = pair(patched)
        train([DistributedDataParallel(model, **options) for model in copies], inputs, read=not options)
        print("DDP", options, flush=True)
        policy_gradient(*(DistributedDataParallel(model, **options) for model in pair(patched)), inputs, 1e-5)
    policies = {
        "float32": (MixedPrecisionPolicy(), 1e-5),
        "bfloat16": (MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), 2e-2),
        "bfloat16 out": (MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16), 2e-2),
    }
    for name, (policy, tolerance) in policies.items():
        copies = pair(patched)
        train([sharded(model, policy) for model in copies], inputs, tolerance)
        print("FSDP2", name, flush=True)
        policy_gradient(*(sharded(model, policy) for model in pair(patched)), inputs, 2 * tolerance)
        if name == "bfloat16 out":
            continue  # what the head's hook casts is not the loss that was computed inside it
        copies = with_decoder(pair(patched))
        train([sharded(model, policy) for model in copies], inputs, tolerance)
        print("FSDP2, a head around its Linear", name, flush=True)
        copies = with_trained_copies(pair(patched), "default")
        train([sharded(model, policy) for model in copies], inputs, tolerance)
        copies = with_trained_copies(pair(patched), "default")
        policy_gradient(*(sharded(model, policy) for model in copies), inputs, 2 * tolerance)
        print("FSDP2, a trained copy of the head", name, flush=True)
    trained_head(patched, inputs)
    bound(patched)
    leave()


if __name__ == "__main__":
    main()
