"""What people do with a model beside training it plainly: each use returns numbers, which the hook may not change.

    python -m tests.uses.uses [--hook] [--device cuda] FAMILY USE …

prints them, or the error, for every use (or those named), one line of JSON each. Models are tiny, their weights
random, and the same in each process.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import pickle
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

if "--hook" in sys.argv:
    import veomni_hook.install  # noqa: F401

import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32, "num_hidden_layers": 4,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3": {"tie_word_embeddings": True}, "gemma2": {"query_pre_attn_scalar": 16}, "phi3": {},
    "olmo2": {}, "granite": {}, "cohere2": {}, "glm4": {}, "starcoder2": {}, "qwen3_moe": EXPERTS,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2}, "deepseek_v3": EXPERTS | LATENT,
    "qwen3_next": EXPERTS | LINEAR,
}  # fmt: skip

Use = Callable[["Subject"], Any]
USES: dict[str, Use] = {}


class Subject:
    """Makes models of a family on a device, and batches of ids."""

    def __init__(self, family: str, device: str) -> None:
        self.config, self.device = AutoConfig.for_model(family, **SIZES | FAMILIES[family]), device

    def model(self, **options: Any) -> Any:
        """A model whose weights are the same each time."""
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(self.config), **options)
        with torch.no_grad():
            for weight in model.parameters():
                noise = torch.randn(weight.shape)
                weight.copy_(noise * 0.08 if weight.ndim > 1 else weight + noise * 0.05)
        return model.to(self.device)

    def ids(self, rows: int = 2, length: int = 12, seed: int = 3) -> torch.Tensor:
        """Ids of a batch."""
        return torch.randint(3, 256, (rows, length), generator=torch.Generator().manual_seed(seed)).to(
            self.device
        )

    def step(self, model: Any, **more: Any) -> list[Any]:
        """The loss and all gradients of a step."""
        loss = model(input_ids=self.ids(), labels=self.ids(), **more).loss
        loss.backward()
        return [total(loss), *gradients(model)]

    def generated(self, **options: Any) -> list[Any]:
        """The ids that a model generates."""
        model = self.model().eval()
        model.generation_config.eos_token_id = None
        ids = options.pop("ids", self.ids())
        return model.generate(ids, max_new_tokens=8, pad_token_id=0, **options).tolist()


def total(tensor: torch.Tensor | None) -> float | None:
    """One number for a tensor."""
    return None if tensor is None else float(tensor.detach().double().abs().sum())


def gradients(model: nn.Module) -> list[float | None]:
    """One number for each parameter's gradient."""
    return [total(weight.grad) for _, weight in sorted(model.named_parameters())]


def linears(model: nn.Module) -> list[nn.Linear]:
    """The linear layers but the head."""
    return [
        part for name, part in model.named_modules() if isinstance(part, nn.Linear) and "lm_head" not in name
    ]


def use(function: Use) -> Use:
    """Enter a use into the table by its name."""
    USES[function.__name__] = function
    return function


@use
def training(of: Subject) -> Any:
    return of.step(of.model())


@use
def anomaly_detection(of: Subject) -> Any:
    with torch.autograd.set_detect_anomaly(True):
        return of.step(of.model())


@use
def tensors_saved_on_the_cpu(of: Subject) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return of.step(of.model())


@use
def optimizer_in_the_backward(of: Subject) -> Any:
    model = of.model()

    def update(weight: torch.Tensor) -> None:
        weight.data.add_(weight.grad, alpha=-0.1)
        weight.grad = None

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(update)
    of.step(model)
    return [*of.step(model), *map(total, model.parameters())]


@use
def hook_of_all_gradients(of: Subject) -> Any:
    model, seen = of.model(), []
    weights = [weight for _, weight in sorted(model.named_parameters())]
    torch.autograd.graph.register_multi_grad_hook(weights, lambda grads: seen.extend(map(total, grads)))
    return [*of.step(model), *seen]


@use
def hooks_of_modules(of: Subject) -> Any:
    model, seen = of.model(), []
    for name, part in model.named_modules():
        if name.endswith(("norm", "mlp", "proj")):
            part.register_forward_pre_hook(lambda _, args: (args[0] * 1.1, *args[1:]) if args else None)
            part.register_full_backward_hook(lambda _, __, grads: seen.append(total(grads[0])))
    return [*of.step(model), *sorted(seen)]


@use
def global_hook(of: Subject) -> Any:
    seen: list[str] = []
    module = torch.nn.modules.module
    handle = module.register_module_forward_hook(lambda part, _, __: seen.append(type(part).__name__))
    try:
        return [*of.step(of.model()), *sorted(name for name in seen if "Norm" in name)]
    finally:
        handle.remove()


@use
def copies(of: Subject) -> Any:
    model, file = of.model(), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    others = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)
    return [of.step(other) for other in others]


@use
def threads(of: Subject) -> Any:
    model, logits = of.model().eval(), [None] * 4

    def run(number: int) -> None:
        with torch.no_grad():
            logits[number] = total(model(of.ids(seed=number)).logits)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return logits


@use
def reparametrised_weights(of: Subject) -> Any:
    model = of.model()
    for linear in linears(model):
        parametrizations.weight_norm(linear)
    for part in [*model.modules()]:
        if "Norm" in type(part).__name__ and isinstance(getattr(part, "weight", None), nn.Parameter):
            parametrize.register_parametrization(part, "weight", nn.Softplus())
    return of.step(model)


@use
def pruned_weights(of: Subject) -> Any:
    model = of.model()
    for linear in (*linears(model), model.get_output_embeddings()):
        prune.l1_unstructured(linear, "weight", amount=0.3)
    return of.step(model)


@use
def fewer_layers(of: Subject) -> Any:
    model = of.model()
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    return of.step(model)


@use
def another_head(of: Subject) -> Any:
    model = of.model()
    model.set_output_embeddings(nn.Sequential(model.get_output_embeddings(), nn.Tanh()))
    return of.step(model)


@use
def a_larger_vocabulary(of: Subject) -> Any:
    model = of.model()
    model.resize_token_embeddings(264, mean_resizing=False)
    with torch.no_grad():
        for embeddings in (model.get_input_embeddings(), model.get_output_embeddings()):
            embeddings.weight[256:] = 0.01
    return of.step(model)


@use
def biases_of_linear_layers(of: Subject) -> Any:
    model = of.model()
    for linear in linears(model):
        if linear.bias is None:
            linear.bias = nn.Parameter(torch.full_like(linear.weight[:, 0], 0.02))
    return of.step(model)


@use
def saliency(of: Subject) -> Any:
    model = of.model().eval()
    embeds = model.get_input_embeddings()(of.ids()).detach().requires_grad_()
    scores = model(inputs_embeds=embeds).logits[:, -1].log_softmax(-1).max(-1).values
    return total(*torch.autograd.grad(scores.sum(), embeds))


@use
def product_with_the_hessian(of: Subject) -> Any:
    model = of.model(attn_implementation="eager")
    weights = [*model.parameters()]
    loss = model(input_ids=of.ids(), labels=of.ids()).loss
    first = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
    norm = sum(one.square().sum() for one in first if one is not None)
    return [*map(total, torch.autograd.grad(norm, weights, allow_unused=True))]


@use
def gradients_of_samples(of: Subject) -> Any:
    model = of.model(attn_implementation="eager").eval()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    embeds = model.get_input_embeddings()(of.ids()).detach()

    def loss(weights: Any, row: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        inputs = {"inputs_embeds": row[None], "labels": labels[None], "use_cache": False}
        return functional_call(model, weights, (), inputs).loss

    by_name = vmap(grad(loss), in_dims=(None, 0, 0))(weights, embeds, of.ids())
    return [total(by_name[name]) for name in sorted(by_name)]


@use
def forward_mode(of: Subject) -> Any:
    model = of.model(attn_implementation="eager").eval()
    embeds = model.get_input_embeddings()(of.ids()).detach()
    along = jvp(
        lambda x: model(inputs_embeds=x, use_cache=False).logits, (embeds,), (torch.ones_like(embeds),)
    )
    return [*map(total, along)]


@use
def inner_states(of: Subject) -> Any:
    output = of.model(attn_implementation="eager").eval()(
        of.ids(), output_hidden_states=True, output_attentions=True
    )
    return [*map(total, output.hidden_states)], [*map(total, output.attentions or ())]


@use
def generation(of: Subject) -> Any:
    torch.manual_seed(7)
    return [
        of.generated(num_beams=3),
        of.generated(do_sample=True, top_k=20),
        of.generated(cache_implementation="static", disable_compile=True),
        of.generated(use_cache=False),
        of.generated(ids=of.ids(1).repeat(1, 2), prompt_lookup_num_tokens=3),
        of.generated(ids=of.ids(1), assistant_model=of.model().eval()),
    ]


@use
def checkpoints(of: Subject) -> Any:
    model = of.model().train()
    model.gradient_checkpointing_enable()
    plain = of.step(model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return plain, of.step(model)


@use
def losses_of_logits(of: Subject) -> Any:
    model, teacher = of.model(), of.model().eval()
    with torch.no_grad():
        target = teacher(of.ids(seed=5)).logits.softmax(-1)
    output = model(input_ids=of.ids(), labels=of.ids())
    divergence = nn.functional.kl_div(output.logits.log_softmax(-1), target, reduction="batchmean")
    (output.loss + divergence + 1e-2 * output.logits.logsumexp(-1).square().mean()).backward()
    return gradients(model)


@use
def graphs_used_twice(of: Subject) -> Any:
    model = of.model()
    one = model(input_ids=of.ids(), labels=of.ids()).loss
    other = model(input_ids=of.ids(seed=4), labels=of.ids(seed=4)).loss
    (one * other).backward(retain_graph=True)
    (-3 * one).backward()
    return gradients(model)


@use
def outputs_as_tuples(of: Subject) -> Any:
    loss, logits, *rest = of.model()(input_ids=of.ids(), labels=of.ids(), return_dict=False)
    return total(loss), total(logits), len(rest)


@use
def exported(of: Subject) -> Any:
    program = torch.export.export(of.model().eval(), (of.ids(),), {"use_cache": False})
    return total(program.module()(of.ids(), use_cache=False).logits)


@use
def weights_on_a_disk(of: Subject) -> Any:
    from accelerate import disk_offload

    model = of.model().eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        disk_offload(model, folder, execution_device=torch.device(of.device))
        return total(model(of.ids()).logits)


@use
def int8_layers(of: Subject) -> Any:
    if of.device != "cpu":
        return None
    model = torch.ao.quantization.quantize_dynamic(of.model().eval(), {nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        output = model(input_ids=of.ids(), labels=of.ids())
        return total(output.loss), total(output.logits)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing but the results is printed."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def main() -> None:
    """Print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("uses", nargs="*", default=[*USES])
    parser.add_argument("--hook", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.uses or USES:
        with quiet():
            try:
                result = USES[name](Subject(options.family, options.device))
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
        print(json.dumps([name, result]), flush=True)


if __name__ == "__main__":
    main()
