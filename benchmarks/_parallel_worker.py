"""One of the processes of `parallel_gpu`, started by torchrun: measures the sides of a part by turns."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

#: Steps of a turn, of which the first is not measured; turns, and how many if they take no longer in seconds.
STEPS, TURNS, MORE, SECONDS = 3, 2, 12, 30
LENGTHS = {
    "sequences": (8192, 16384, 32768, 65536, 131072),
    "memory": (65536, 131072, 262144),
    "longest": (983_040,),
    "whole": (131072,),
    "batches": (8192, 131072),
    "experts": (4096, 8192, 16384, 32768, 65536),
}
SIDES = {
    "sequences": ("sp1", "sp", "ring"),
    "memory": ("sp", "alst", "ring", "sp-kept", "ring-checkpointed"),
    "experts": ("fsdp", "ep", "all_to_all"),
}
DENSE = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False, "max_position_embeddings": 1 << 20,
}  # fmt: skip
EXPERTS = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "vocab_size": 151_936, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "tie_word_embeddings": False, "max_position_embeddings": 1 << 20,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
    "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
Step = Callable[[], Any]


class Job:
    """What the parts share: the device, the sizes, and how a step is timed."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from torch import distributed

        self.device, self.layers = options.device, options.layers
        devices = torch.cuda.device_count() if self.device == "cuda" else 0
        # Processes that share a GPU have gloo alone: enough for `batches`.
        distributed.init_process_group("cpu:gloo,cuda:nccl" if devices > 1 else "gloo")
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        if devices:
            torch.cuda.set_device(self.rank % devices)
        given = options.lengths.split(",") if options.lengths else LENGTHS.get(options.part, ())
        self.lengths = [int(each) for each in given]
        self.sides = options.sides.split(",") if options.sides else list(SIDES.get(options.part, ()))

    def axis(self, name: str) -> str:
        """Return the setting in which all processes share an axis."""
        return f"{name}={self.world}"

    def shapes(self, shapes: dict[str, Any]) -> dict[str, Any]:
        """Return the shapes of a part, or small ones for a CPU."""
        if self.device == "cuda":
            return shapes
        return {name: SMALL.get(name, value) for name, value in shapes.items()}

    def synchronize(self) -> None:
        """Wait for this GPU."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def ids(self, vocabulary: int, rows: int, length: int, seed: int) -> Any:
        """Return ids [rows, length], the same for a seed on every process."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, vocabulary, (rows, length), generator=generator).to(self.device)

    def by_turns(self, steps: dict[str, Step], tokens: dict[str, int]) -> dict[str, dict[str, Any]]:
        """Measure sides by turns: milliseconds, tokens of a GPU in a second, its peak in GiB, the loss."""
        times: dict[str, list[float]] = {name: [] for name in steps}
        found: dict[str, dict[str, Any]] = {name: {} for name in steps}
        turns, turn = TURNS, 0
        while turn < turns:
            turn, began = turn + 1, time.perf_counter()
            for name, step in steps.items():
                if "failed" in found[name]:
                    continue
                try:
                    found[name] |= self._turn(step, times[name])
                except Exception as error:
                    # Both processes run out of memory at one size; what fails on one alone ends the job.
                    found[name]["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                    self.clear()
            if turn == TURNS:
                turns += self._more(time.perf_counter() - began)
        for name, each in found.items():
            if "failed" not in each:
                each["step_ms"] = round(statistics.median(times[name]), 2)
                each["tokens_per_s"] = round(tokens[name] / each["step_ms"] * 1e3)
        return found

    def _more(self, seconds: float) -> int:
        """Return for how many more turns there is time, in all processes, if one takes so long."""
        import torch
        from torch import distributed

        longest = torch.tensor(seconds, device=self.device)
        distributed.all_reduce(longest, distributed.ReduceOp.MAX)
        return max(0, min(MORE - TURNS, int(SECONDS / float(longest))))

    def _turn(self, step: Step, times: list[float]) -> dict[str, Any]:
        import torch
        from torch import distributed

        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        loss = None
        for number in range(STEPS):
            distributed.barrier()
            self.synchronize()
            began = time.perf_counter()
            loss = step()
            self.synchronize()
            if number:
                times.append(1e3 * (time.perf_counter() - began))
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else 0.0
        return {"gib": round(peak, 2), "loss": round(float(loss), 5)}

    def clear(self) -> None:
        """Free what steps have left."""
        import torch

        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def dense(job: Job, layers: int, *, checkpointing: bool = False, optimizer: bool = False) -> Step:
    """Return ``step(setting, ids)`` of Qwen3-8B's shapes under FSDP2, from no gradients."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from veomni_hook.parallel import process

    config = Qwen3Config(**job.shapes(DENSE), num_hidden_layers=layers, attn_implementation="sdpa")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if job.device == "cuda" else torch.float32)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    if checkpointing:
        model.gradient_checkpointing_enable()
    mesh = init_device_mesh(job.device, (job.world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=job.device)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.02) if "norm" not in name else torch.nn.init.ones_(parameter)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(job.device)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-5) if optimizer else None

    def step(setting: str, ids: Any, **given: Any) -> Any:
        process.tell(setting)
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False, **given).loss
        loss.backward()
        if adam is not None:
            adam.step()
        process.tell("")
        return loss.detach()

    step.model = model  # type: ignore[attr-defined]
    return step


@contextmanager
def one_attention(job: Job) -> Iterator[None]:
    """`scaled_dot_product_attention` takes torch's flash attention on all sides."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if job.device == "cuda" else nullcontext():
        yield


def sequences(job: Job) -> Iterator[dict[str, Any]]:
    """Yield a row for each length."""
    step = dense(job, job.layers)
    vocabulary = job.shapes(DENSE)["vocab_size"]
    for length in job.lengths:
        own, shared = job.ids(vocabulary, 1, length, job.rank), job.ids(vocabulary, job.world, length, 2)
        sides = {
            "sp1": lambda own=own: step("", own),
            "sp": lambda shared=shared: step(job.axis("sp"), shared),
            "ring": lambda shared=shared: ring(step, shared),
        }
        chosen = {name: side for name, side in sides.items() if name in job.sides}
        with one_attention(job):
            found = job.by_turns(chosen, dict.fromkeys(chosen, length))
        yield {"length": length, "layers": job.layers, "sides": found}
        job.clear()


def ring(step: Any, ids: Any) -> Any:
    """A step with torch's context parallelism as accelerate prepares it: no masks, shifted labels."""
    import torch
    from accelerate.big_modeling import _attach_context_parallel_hooks
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh(ids.device.type, (torch.distributed.get_world_size(),), mesh_dim_names=("cp",))
    ids, length = ids.clone(), ids.shape[1]
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100).contiguous()
    positions = torch.arange(length, device=ids.device).repeat(len(ids), 1)
    buffers = [ids, shifted, positions]
    hooks = _hooks(step.model, _attach_context_parallel_hooks)
    try:
        with context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
        ):
            return step("", ids, position_ids=positions, shift_labels=shifted)
    finally:
        for hook in hooks:
            hook.remove()


def _hooks(model: Any, attach: Callable[[Any], None]) -> list[Any]:
    """Attach forward pre-hooks; return their handles, which accelerate does not."""
    from torch.nn import Module

    handles, register = [], Module.register_forward_pre_hook

    def noting(module: Module, *operands: Any, **options: Any) -> Any:
        handles.append(register(module, *operands, **options))
        return handles[-1]

    Module.register_forward_pre_hook = noting  # type: ignore[assignment, method-assign]
    try:
        attach(model)
    finally:
        Module.register_forward_pre_hook = register  # type: ignore[method-assign]
    return handles


def memory(job: Job) -> Iterator[dict[str, Any]]:
    """Yield a row for each length: one sequence that both GPUs share."""
    from veomni_hook.memory import parts
    from veomni_hook.memory.remedies import with_setting

    step = dense(job, job.layers)
    model: Any = step.model  # type: ignore[attr-defined]
    vocabulary = job.shapes(DENSE)["vocab_size"]

    def ours(ids: Any) -> Any:
        block = with_setting("checkpoint,offload,tiles", model)
        assert block is not None
        with block:
            return step(job.axis("sp"), ids)

    def checkpointed(ids: Any) -> Any:
        model.gradient_checkpointing_enable()
        try:
            return ring(step, ids)
        finally:
            model.gradient_checkpointing_disable()

    for length in job.lengths:
        ids = job.ids(vocabulary, 1, length, 2)
        sides = {
            "sp": lambda ids=ids: ours(ids),
            "alst": lambda ids=ids: alst(step, ids),
            "ring": lambda ids=ids: ring(step, ids),
            "sp-kept": lambda ids=ids: step(job.axis("sp"), ids),
            "ring-checkpointed": lambda ids=ids: checkpointed(ids),
        }
        chosen = {name: side for name, side in sides.items() if name in job.sides}
        with one_attention(job), parts.using(parts.Parts()):
            model.gradient_checkpointing_disable()
            found = job.by_turns(chosen, dict.fromkeys(chosen, length // job.world))
        yield {"length": length, "layers": job.layers, "sides": found}
        job.clear()


def alst(step: Any, ids: Any) -> Any:
    """A step with what DeepSpeed has of ALST: its attention and tiled MLP, and transformers' checkpoints.

    Its checkpoints on the host, which take more time, are left out; the loss is ours, which makes no logits.
    """
    import deepspeed
    import torch
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP, UlyssesSPAttentionHF
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, world = step.model, torch.distributed.get_world_size()
    config, mlp = model.config, type(model.model.layers[0].mlp)
    if "alst" not in ALL_ATTENTION_FUNCTIONS:
        deepspeed.init_distributed("nccl" if ids.is_cuda else "gloo")
        attention = UlyssesSPAttentionHF(
            attn=ALL_ATTENTION_FUNCTIONS["sdpa"], batch_size=1, attn_head_count=config.num_attention_heads,
            attn_head_size=config.head_dim, kv_head_count=config.num_key_value_heads,
            num_hidden_layers=config.num_hidden_layers, process_group=torch.distributed.group.WORLD,
            seq_length_is_variable=True,
        )  # fmt: skip
        ALL_ATTENTION_FUNCTIONS.register("alst", attention.forward)
        ALL_MASK_ATTENTION_FUNCTIONS.register("alst", lambda *operands, **options: None)
    forward = mlp.forward

    def tiled(self: Any, x: Any) -> Any:
        weights = [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight]
        return TiledMLP.apply(forward, self, x, -(-x.shape[1] // x.shape[2]), weights)  # type: ignore[no-untyped-call]

    length = ids.shape[1]
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    positions = torch.arange(length, device=ids.device)[None]
    own = [
        whole.chunk(world, 1)[torch.distributed.get_rank()].contiguous()
        for whole in (ids, positions, shifted)
    ]
    implementation = config._attn_implementation
    model.gradient_checkpointing_enable()
    mlp.forward, config._attn_implementation = tiled, "alst"
    try:
        return step("", own[0], position_ids=own[1], shift_labels=own[2])
    finally:
        mlp.forward, config._attn_implementation = forward, implementation
        model.gradient_checkpointing_disable()


def longest(job: Job) -> Iterator[dict[str, Any]]:
    """Yield a row for each length: a step in 80 GB, with an allocation for the layers that are left out."""
    import torch

    from veomni_hook.memory.host import BLOCK, BLOCKS

    if job.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(80e9 / torch.cuda.get_device_properties(0).total_memory)
    step = dense(job, job.layers)
    layers = step.model.model.layers  # type: ignore[attr-defined]
    # Weights and gradients: what a layer has here, as often as layers are left out.
    size = sum(p.to_local().nbytes for p in layers[0].parameters())  # type: ignore[attr-defined]
    others = 36 - job.layers if job.device == "cuda" else 1
    ballast = torch.empty(2 * others * size, dtype=torch.uint8, device=job.device)
    for length in job.lengths:
        row: dict[str, Any] = {
            "length": length,
            "layers": job.layers,
            "gib for others": ballast.nbytes / 2**30,
        }
        if job.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        try:
            with one_attention(job):
                ids = job.ids(job.shapes(DENSE)["vocab_size"], 1, length, 1)
                row["loss"] = step(job.axis("sp"), ids).item()
        except torch.OutOfMemoryError as error:
            row["failed"] = str(error).splitlines()[0]
        row["seconds"] = time.perf_counter() - began
        if job.device == "cuda":
            row["gib"] = torch.cuda.max_memory_allocated() / 2**30
            row["gib reserved"] = torch.cuda.max_memory_reserved() / 2**30
        # What each layer keeps is the same.
        row["gib of the host for all layers"] = (
            BLOCKS.held * BLOCK / job.layers * (job.layers + others) / 2**30
        )
        yield {name: round(fact, 3) if isinstance(fact, float) else fact for name, fact in row.items()}
        job.clear()


def whole(job: Job) -> Iterator[dict[str, Any]]:
    """Yield a row of the model with all its layers, with checkpointing and AdamW."""
    step = dense(job, 36 if job.device == "cuda" else 3, checkpointing=True, optimizer=True)
    vocabulary = job.shapes(DENSE)["vocab_size"]
    for length in job.lengths:
        ids = job.ids(vocabulary, 1, length, 1)
        with one_attention(job):
            sides = {"sp": lambda ids=ids: step(job.axis("sp"), ids)}
            found = job.by_turns(sides, {"sp": length // job.world})
        yield {"length": length, "layers": len(step.model.model.layers), "sides": found}  # type: ignore[attr-defined]


def expert_models(job: Job, kinds: dict[str, tuple[int, str]]) -> Iterator[tuple[str, Any]]:
    """Yield a model of Qwen3-30B-A3B's shapes for each size of ``ep`` and implementation of its dispatch."""
    import torch
    from torch import distributed
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.distributed import DistributedConfig

    config = Qwen3MoeConfig(**job.shapes(EXPERTS), num_hidden_layers=job.layers, attn_implementation="sdpa")
    dtype = torch.bfloat16 if job.device == "cuda" else torch.float32
    folder = [tempfile.mkdtemp()]
    distributed.broadcast_object_list(folder)
    if job.rank == 0:
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        Qwen3MoeForCausalLM(config).save_pretrained(folder[0])
        torch.set_default_dtype(torch.float32)
    distributed.barrier()
    for name, (size, implementation) in kinds.items():
        given = DistributedConfig(fsdp_size=job.world, ep_size=size, ep_implementation=implementation)
        yield (
            name,
            Qwen3MoeForCausalLM.from_pretrained(
                folder[0], dtype=dtype, distributed_config=given, attn_implementation="sdpa"
            ).train(),
        )


def experts(job: Job, *, hook: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of tokens of a GPU; sequences have 4,096 tokens."""
    kinds = {"fsdp": (1, "auto"), "ep": (job.world, "veomni"), "all_to_all": (job.world, "all_to_all")}
    kinds = (
        {name: kind for name, kind in kinds.items() if name in job.sides} if hook else {"liger": (1, "auto")}
    )
    models = dict(expert_models(job, kinds))

    def step(model: Any, ids: Any) -> Any:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    for tokens in job.lengths:
        rows, length = max(1, tokens // 4096), min(tokens, 4096)
        ids = job.ids(job.shapes(EXPERTS)["vocab_size"], rows, length, job.rank)
        sides = {name: lambda model=model, ids=ids: step(model, ids) for name, model in models.items()}
        with one_attention(job):
            found = job.by_turns(sides, dict.fromkeys(sides, tokens))
        yield {"tokens": tokens, "layers": job.layers, "sides": found}
        job.clear()


def link(job: Job) -> Iterator[dict[str, Any]]:
    """Yield bytes a second that leave a GPU."""
    import torch
    from torch import distributed

    for size in (1 << 22, 1 << 26, 1 << 29) if job.device == "cuda" else (1 << 16,):
        source = torch.randn(size // 4, device=job.device)
        same, wide = torch.empty_like(source), torch.empty(job.world * len(source), device=job.device)
        # Half of an exchange stays; a gather sends all of the source to each other process.
        calls = {
            "all-to-all": (partial(distributed.all_to_all_single, same, source), 1 - 1 / job.world),
            "all-gather": (partial(distributed.all_gather_into_tensor, wide, source), job.world - 1),
        }
        for name, (call, share) in calls.items():
            taken = [_timed(job, call) for _ in range(10)][3:]
            rate = size * share / statistics.median(taken)
            yield {"collective": name, "bytes": size, "gb_per_s": round(rate / 1e9, 1)}


def batches(job: Job) -> Iterator[dict[str, Any]]:
    """Yield microseconds in which the host compares the ids, labels and mask of a call, on an idle device."""
    import torch

    from veomni_hook.parallel import agreement, process
    from veomni_hook.parallel.groups import sequence_group

    process.tell(job.axis("sp"))
    group, model = sequence_group(), torch.nn.Identity()
    for length in job.lengths:
        tensors = {name: job.ids(1000, 1, length, 0) for name in ("input_ids", "labels", "attention_mask")}
        started, waited = list[float](), list[float]()
        for _ in range(200):
            job.synchronize()
            began = time.perf_counter()
            call = agreement.entered(model, (), tensors)
            started.append(time.perf_counter() - began)
            agreement.check_same_batch(model, tensors["input_ids"], group, first=False)
            waited.append(time.perf_counter() - began - started[-1])
            agreement.left(call)
        times = {"started_us": started, "waited_us": waited}
        yield {
            "length": length,
            **{key: round(1e6 * statistics.median(took[20:])) for key, took in times.items()},
        }


def _timed(job: Job, call: Step) -> float:
    job.synchronize()
    began = time.perf_counter()
    call()
    job.synchronize()
    return time.perf_counter() - began


def said(row: dict[str, Any]) -> str:
    """A line for each side of a row."""
    head = ", ".join(f"{name} {value}" for name, value in row.items() if name != "sides")
    return "\n".join([head, *(f"    {name:11}{each}" for name, each in row.get("sides", {}).items())])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure a part; rank 0 writes its rows after each of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("job")
    parser.add_argument("output", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lengths")
    parser.add_argument("--sides")
    options = parser.parse_args(arguments)
    if options.job == "hook":
        import veomni_hook

        # Sides without the axis say so: by their own sizes, or at each step.
        veomni_hook.activate(
            parallel=f"{'ep' if options.part == 'experts' else 'sp'}={os.environ['WORLD_SIZE']}",
            memory={
                "memory": "tiles",
                "whole": "checkpoint,offload,tiles",
                "longest": "checkpoint,offload=64TiB,tiles",
            }.get(options.part, ""),
        )
    else:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3_moe

        apply_liger_kernel_to_qwen3_moe()
    job = Job(options)
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "link": lambda: link(job),
        "sequences": lambda: sequences(job),
        "memory": lambda: memory(job),
        "longest": lambda: longest(job),
        "whole": lambda: whole(job),
        "batches": lambda: batches(job),
        "experts": lambda: experts(job, hook=options.job == "hook"),
    }
    rows = []
    for row in parts[options.part]():
        rows.append(row)
        if job.rank == 0:
            print(said(row), flush=True)
            options.output.write_text(json.dumps(rows))
    from torch import distributed

    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
