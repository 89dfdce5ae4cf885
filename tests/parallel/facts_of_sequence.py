"""What two processes see that share sequences: refusals, recomputation, copies, caches, dropout."""

from __future__ import annotations

import copy
import io
import itertools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import veomni_hook
from tests.parallel import small
from tests.parallel.facts_of_models import rings
from tests.parallel.small import refusal
from veomni_hook.kernels.selection.process_choice import STATE, set_choice
from veomni_hook.parallel import collectives, process

CHECKS: dict[str, Callable[[], Any]] = {}


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


def gradients(model: Any, sizes: str, run: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    process.tell(sizes)
    model.zero_grad()
    run().backward()
    found = small.gradients(model, sizes)
    process.tell("sp=2")
    return found


def compared(model: Any, run: Callable[[], torch.Tensor]) -> float:
    plain = gradients(model, "", run)
    return small.worst(gradients(model, "sp=2", run), plain)[0]


@check
def recurrent_layers_are_refused() -> Any:
    config = transformers.Mamba2Config(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8, state_size=8, n_groups=1,
        chunk_size=8,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    batch = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    with torch.no_grad():
        evaluated = bool(model(**batch).loss.isfinite())
    return {
        "error": refusal(lambda: model(**batch)),
        "evaluated": evaluated,
        "explain": str(veomni_hook.explain(model)),
    }


@check
def other_architectures() -> Any:
    """What training answers, by the reason; the weights stay as they are."""
    ids = small.batch("plain")["input_ids"]
    sizes = {
        "vocab_size": small.VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_attention_heads": 4,
    }
    whole = torch.zeros(2, 16, 32)
    gpt2 = small.model("gpt2", add_cross_attention=True)
    upcast = small.model("gpt2", "eager", reorder_and_upcast_attn=True)
    llama4 = transformers.AutoModelForCausalLM.from_config(
        transformers.Llama4TextConfig(
            **sizes, intermediate_size_mlp=24, num_hidden_layers=1, num_local_experts=2
        )
    )
    bert = transformers.AutoModelForMaskedLM.from_config(
        transformers.BertConfig(**sizes, num_hidden_layers=1)
    )
    t5 = transformers.AutoModelForSeq2SeqLM.from_config(
        transformers.T5Config(
            vocab_size=small.VOCABULARY,
            d_model=32,
            d_ff=24,
            d_kv=8,
            num_heads=4,
            num_layers=1,
            decoder_start_token_id=0,
        )
    )
    told = {
        "gpt2": refusal(lambda: gpt2(input_ids=ids, encoder_hidden_states=whole)),
        "upcast": refusal(lambda: upcast(input_ids=ids)),
        "llama4": refusal(lambda: llama4(input_ids=ids)),
        "bert": refusal(lambda: bert(input_ids=ids)),
        "t5": refusal(lambda: t5(input_ids=ids, labels=ids)),
    }
    upcast.gradient_checkpointing_enable({"use_reentrant": True})
    upcast.enable_input_require_grads()
    return told | {"upcast, checkpoint": refusal(lambda: upcast(input_ids=ids))}


@check
def a_reference_model_and_other_lengths_between_forward_and_backward() -> float:
    """The layers are recomputed when the last forward was not split, or had another length."""
    model, reference = small.model("llama"), small.model("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batches = [small.batch("plain", length) for length in (15, 16, 9)]

    def run() -> torch.Tensor:
        losses = []
        for batch in batches:
            losses.append(model(**batch).loss)
            with torch.no_grad():
                losses.append(reference(**batch).loss + model(**batch).loss)
        with torch.no_grad():
            model(**small.batch("plain", 8))  # as many positions as each process had
        return sum(losses)

    return compared(model, run)


@check
def padded_batches_of_other_lengths() -> float:
    model = small.model("llama", "eager")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return compared(model, lambda: sum(model(**small.batch("padded", n)).loss for n in (15, 16)))


@check
def copies_and_saved_models() -> Any:
    model = small.model("llama")
    batch = small.batch("plain", 15)
    model(**batch).loss.backward()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    other = copy.deepcopy(model)
    return {
        "names us": b"veomni_hook.parallel" in buffer.getvalue(),
        "copy": compared(other, lambda: other(**batch).loss),
        "states": sorted(model.state_dict()) == sorted(other.state_dict()),
    }


@check
def other_batches() -> Any:
    """In the third call of each model; what the ranks share is not what they exchange."""
    rank = distributed.get_rank()
    batch = small.batch("plain", 16) | {"labels": small.batch("plain", 16)["input_ids"]}
    ids = batch["input_ids"]
    longer = small.batch("plain", 16 + rank)["input_ids"]
    other = {
        "ids": {"input_ids": ids if rank == 0 else ids.flip(1)},
        "two tokens": {"input_ids": ids if rank == 0 else torch.cat([ids[:, :3].flip(1), ids[:, 3:]], 1)},
        "labels": {"labels": ids.clone().index_fill_(1, torch.tensor([3 + rank]), -100)},
        "lengths": {"input_ids": longer, "labels": longer},
        "names": {"position_ids": torch.arange(16)[None]} if rank else {},
    }
    told = {}
    for name, changed in other.items():
        model = small.model("llama")
        for _ in range(2):
            model(**batch).loss.backward()
        told[name] = refusal(lambda model=model, changed=changed: model(**{**batch, **changed}))
    embedded = model.get_input_embeddings()(ids if rank == 0 else ids.flip(1))
    told["embeddings"] = refusal(lambda: small.model("llama")(inputs_embeds=embedded))
    return told


@check
def heads_that_cannot_be_divided() -> str:
    transformers.AttentionInterface.register("of_the_user", lambda *_, **__: 1 / 0)
    model = small.model("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=24)
    model.set_attn_implementation("of_the_user")
    return refusal(lambda: model(**small.batch("plain")))


@check
def derivatives_of_gradients() -> Any:
    told = {}
    for heads in (1, 2):
        model = small.model("llama", num_key_value_heads=heads)
        loss = model(**small.batch("plain")).loss
        told[heads] = refusal(
            lambda loss=loss, model=model: torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
        )
    return told


@check
def eager_functions_that_were_replaced() -> Any:
    """A ring never computes in place of a function that it does not know."""
    home = sys.modules[transformers.LlamaForCausalLM.__module__]
    model = small.model("llama", "eager", num_attention_heads=3, num_key_value_heads=3, hidden_size=24)
    upstream, told = vars(home).copy(), {}
    for name in ("eager_attention_forward", "repeat_kv"):
        vars(home)[name] = lambda *operands, name=name, **named: upstream[name](*operands, **named)
        told[name] = refusal(lambda: model(**small.batch("plain")))
        vars(home)[name] = upstream[name]
    model.train().config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    told["dropout"] = refusal(lambda: model(**small.batch("plain")))
    return told


@check
def hosts_of_one_process() -> Any:
    """Heads are not exchanged between hosts."""
    model = small.model("llama")
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    with rings() as sizes:
        error = compared(model, lambda: model(**small.batch("plain", 15)).loss)
    explained = str(veomni_hook.explain(model))
    del os.environ["LOCAL_WORLD_SIZE"]
    return {"error": error, "rings": sorted(sizes), "explain": explained}


@check
def filled_caches() -> str:
    model, ids = small.model("llama"), small.batch("plain")["input_ids"]
    filled = model(input_ids=ids, use_cache=True).past_key_values
    return refusal(lambda: model(input_ids=ids, past_key_values=filled))


@check
def kept_caches() -> str:
    model, ids = small.model("llama"), small.batch("plain")["input_ids"]
    with torch.no_grad():
        kept = model(input_ids=ids, use_cache=True).past_key_values
    return refusal(lambda: model(input_ids=ids, past_key_values=kept))


@check
def attention_weights() -> str:
    model = small.model("llama", "eager")
    return refusal(lambda: model(**small.batch("plain"), output_attentions=True))


@check
def generation() -> bool:
    model = small.model("llama").eval()
    model(**small.batch("plain")).loss.backward()
    ids = small.batch("plain", 5)["input_ids"]
    split = model.generate(ids, max_new_tokens=6, do_sample=False)
    process.tell("")
    whole = model.generate(ids, max_new_tokens=6, do_sample=False)
    process.tell("sp=2")
    return bool((split == whole).all())


@check
def new_layers() -> float:
    model = small.model("llama")
    batch = small.batch("plain", 15)
    model(**batch).loss.backward()
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])
    model.model.layers[1].self_attn = copy.deepcopy(small.model("llama").model.layers[1].self_attn)
    return compared(model, lambda: model(**batch).loss)


@check
def after_an_error_in_the_layers() -> float:
    model = small.model("llama")
    batch = small.batch("plain", 15)
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        model(**batch)
    except ZeroDivisionError:
        hook.remove()
    with torch.no_grad():
        model(**batch)
    return compared(model, lambda: model(**batch).loss)


@check
def layers_that_bypass_the_interface() -> str:
    model = small.model("llama")
    attention = model.model.layers[1].self_attn
    attention.forward = types.MethodType(lambda self, hidden_states, **_: (hidden_states, None), attention)
    return refusal(lambda: model(**small.batch("plain")))


@check
def an_implementation_of_the_user() -> Any:
    seen = []

    def mine(module: Any, query: Any, key: Any, value: Any, mask: Any, **operands: Any) -> Any:
        seen.append(
            [list(query.shape), list(key.shape), module.num_key_value_groups, None if mask is None else 1]
        )
        return transformers.integrations.sdpa_attention.sdpa_attention_forward(
            module, query, key, value, mask, **operands
        )

    transformers.AttentionInterface.register("mine", mine)
    model = small.model("llama", num_key_value_heads=1)
    model.set_attn_implementation("mine")
    error = compared(model, lambda: model(**small.batch("plain", 16)).loss)
    groups = {layer.self_attn.num_key_value_groups for layer in model.model.layers}
    return {"error": error, "whole": seen[0], "split": seen[-1], "groups": sorted(groups)}


@check
def packed_by_cumulative_lengths() -> Any:
    """An implementation that takes ``cu_seq_lens``, as flash attention does: the boundaries of whole sequences."""
    seen = []

    def varlen(module: Any, query: Any, key: Any, value: Any, mask: Any, **operands: Any) -> Any:
        assert mask is None
        ends = operands["cu_seq_lens_q"].tolist()
        seen.append([query.shape[1], query.shape[2], *ends, operands["max_length_q"]])
        groups = module.num_key_value_groups
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                *(each[:, :, start:end] for each in (query, key, value)),
                is_causal=True,
                scale=operands["scaling"],
            )
            for start, end in itertools.pairwise(ends)
        ]
        return torch.cat(parts, 2).transpose(1, 2), None

    transformers.AttentionInterface.register("varlen", varlen)
    model = small.model("llama")
    model.set_attn_implementation("varlen")
    batch = small.batch("packed", 15)
    lengths = torch.tensor([0, 5, 15], dtype=torch.int32)
    given = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), lengths)
    given |= dict.fromkeys(("max_length_q", "max_length_k"), 10)
    error = compared(model, lambda: model(**batch, **given).loss)
    return {"error": error, "whole": seen[0], "split": seen[-1]}


@check
def dropout() -> Any:
    model = small.model("llama", "eager", attention_dropout=0.5)
    batch = small.batch("plain", 16)

    def once(*, checkpoint: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        model.gradient_checkpointing_enable() if checkpoint else model.gradient_checkpointing_disable()
        return gradients(model, "sp=2", lambda: model(**batch).loss)

    plain, again = once(checkpoint=False), once(checkpoint=True)
    number = torch.rand(())
    numbers = [torch.empty(()) for _ in range(2)]
    distributed.all_gather(numbers, number)
    return {
        "recomputed": small.worst(again, plain)[0],
        "generators agree": numbers[0].item() == numbers[1].item(),
    }


@check
def own_dropout_in_each_process() -> bool:
    """Heads with the same queries and keys get other masks in another process."""
    from veomni_hook.parallel.attention import own_random_numbers

    torch.manual_seed(5)
    with own_random_numbers(torch.empty(0), distributed.get_rank() + 1):
        mine = torch.rand(8)
    others = [torch.empty(8) for _ in range(2)]
    distributed.all_gather(others, mine)
    return bool((others[0] != others[1]).any())


@check
def tensor_parallelism() -> str:
    model, mesh = small.model("llama"), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for layer in model.model.layers:
        parallelize_module(
            layer.mlp,
            mesh,
            {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()},
        )
    return refusal(lambda: model(**small.batch("plain")))


@check
def accumulated_gradients() -> float:
    model = small.model("qwen3")
    batches = [small.batch("padded", length) for length in (15, 12)]
    items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    return compared(model, lambda: sum(model(**batch, num_items_in_batch=items).loss for batch in batches))


@check
def fully_sharded_training() -> float:
    batches = [small.batch("padded", length) for length in (15, 16, 13, 12, 9)]

    def trained(model: Any, units: Callable[[Any], list[Any]] | None) -> dict[str, torch.Tensor]:
        process.tell("" if units is None else "sp=2")
        model.gradient_checkpointing_enable()
        if units is not None:
            mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
            for unit in units(model):
                fully_shard(unit, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
        for batch in batches:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        process.tell("sp=2")
        full = ((name, getattr(p, "full_tensor", lambda p=p: p)()) for name, p in model.named_parameters())
        return {name: value.detach() for name, value in full}

    with STATE.restored():
        set_choice("torch")
        plain = trained(small.model("llama"), None)
        ours = (
            trained(small.model("llama"), units)
            for units in (
                lambda model: [*model.model.layers, model],
                lambda model: [*model.model.layers, model.model, model],
            )
        )
        return max(small.worst(found, plain)[0] for found in ours)


@check
def positions_of_the_loss() -> Any:
    """By who may see the gradient of all positions: how often it was summed, and how far gradients are."""
    upstream, told = collectives._sum_of_parts, {}
    for seen in ("nobody", "a hook of the base model", "hidden states", "odd", "changed"):
        model, sums = small.model("llama"), list[int]()
        base, batch = model.model, small.batch("plain", 15 if seen == "odd" else 16)
        if seen == "a hook of the base model":
            base.register_forward_hook(lambda *_: None)
        if seen == "hidden states":
            batch["output_hidden_states"] = True
        if seen == "changed":

            def forward(*given: Any, base: Any = base, **others: Any) -> Any:
                output = type(base).forward(base, *given, **others)
                output.last_hidden_state.mul_(2)
                return output

            base.forward = forward

        def noted(*operands: Any, sums: list[int] = sums) -> torch.Tensor:
            sums.append(1)
            return upstream(*operands)

        collectives._sum_of_parts = noted
        try:
            with STATE.restored():
                set_choice("torch")
                far = compared(model, lambda model=model, batch=batch: model(**batch).loss)
        finally:
            collectives._sum_of_parts = upstream
        told[seen] = [len(sums), far]
    hidden = small.model("llama").model(input_ids=small.batch("plain", 16)["input_ids"]).last_hidden_state
    kept = io.BytesIO()
    torch.save(hidden, kept)
    kept.seek(0)
    told["saved"] = [len(kept.getvalue()) < 16_384, float((torch.load(kept) - hidden).abs().max())]
    return told


@check
def explanations() -> str:
    return str(veomni_hook.explain(small.model("llama", num_key_value_heads=1)))


def facts() -> dict[str, Any]:
    """Return what each check found, in one process after the other."""
    return {name: check() for name, check in CHECKS.items()}
