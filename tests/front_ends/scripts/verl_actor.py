"""verl's actor: a worker of its FSDP engine improves a policy on samples of fixed length, as its PPO trainer asks.

The samples are texts in place of what vLLM or SGLang would draw; a CPU is a platform that verl does not bring.
"""

import contextlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform

#: Figures that verl logs.
MEMORY = dict.fromkeys(
    ["memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"], int
)
MEMORY["mem_get_info"] = lambda: (0, 0)


class CPU(PlatformCUDA):
    """What the engine asks of a platform."""

    device_name = "cpu"
    device_module = SimpleNamespace(**vars(torch.cpu), **MEMORY, get_device_name=lambda: "CPU")

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def empty_cache(self):
        pass

    def manual_seed(self, seed):
        pass

    manual_seed_all = manual_seed

    def synchronize(self, device_index=None):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    @contextlib.contextmanager
    def nvtx_range(self, msg):
        yield


set_platform(CPU())
os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # the engine for GPUs

from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import (  # noqa: E402
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding  # noqa: E402

STEPS, SAMPLES, PROMPT, RESPONSE = 5, 8, 24, 40


def batch_of(ids, *, compute_loss, **tensors):
    """Samples of prompts and responses without padding, as verl's trainer hands them to its workers."""
    shape = (len(ids), PROMPT + RESPONSE)
    tensors |= {
        "input_ids": ids,
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "attention_mask": torch.ones(shape, dtype=torch.long),
        "response_mask": torch.ones(len(ids), RESPONSE, dtype=torch.long),
        "position_ids": torch.arange(shape[1]).expand(shape).contiguous(),
    }
    meta = {
        "temperature": 0.7,
        "calculate_entropy": True,
        "compute_loss": compute_loss,
        "global_batch_size": SAMPLES,
    }
    return left_right_2_no_padding(tu.get_tensordict(tensors, meta))


def main(model):
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=model,
            use_fused_kernels=True,
            fused_kernel_options={"impl_backend": "torch"},
            override_config={"attn_implementation": "sdpa", "tie_word_embeddings": True},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=2,
            infer_micro_batch_size_per_gpu=4,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
            use_torch_compile=False,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=STEPS, clip_grad=1000.0),
        checkpoint_config=None,
    )
    actor = TrainingWorker(config)
    actor.reset()
    policy = FSDPActorConfig(
        strategy="fsdp2",
        entropy_coeff=0.01,
        ppo_mini_batch_size=SAMPLES,
        ppo_micro_batch_size_per_gpu=2,
        rollout_n=1,
    )
    actor.set_loss_fn(partial(ppo_loss, config=policy))

    tokenizer = config.model_config.tokenizer
    texts = [row["text"] for row in json.loads(Path("rows.json").read_text(encoding="utf-8"))]
    ids = torch.tensor([tokenizer(text).input_ids[: PROMPT + RESPONSE] for text in texts[: STEPS * SAMPLES]])
    generator = torch.Generator().manual_seed(7)
    for samples in ids.split(SAMPLES):
        asked = batch_of(samples, compute_loss=False)
        drawn = no_padding_2_padding(tu.get(actor.infer_batch(asked), "log_probs"), asked).float()
        # As of a policy that has moved since it drew, so that ratios are not 1.
        moved = drawn + 0.1 * torch.randn(drawn.shape, generator=generator)
        advantages = torch.randn(SAMPLES, 1, generator=generator).expand(SAMPLES, RESPONSE).contiguous()
        data = batch_of(samples, compute_loss=True, old_log_probs=moved, advantages=advantages)
        tu.assign_non_tensor(data, mini_batch_size=SAMPLES, dataloader_kwargs={"shuffle": False})
        print(tu.get(actor.train_mini_batch(data), "metrics"))
    os.makedirs("out", exist_ok=True)
    actor.engine.module.save_pretrained(
        "out",
        state_dict=torch.distributed.checkpoint.state_dict.get_model_state_dict(
            actor.engine.module,
            options=torch.distributed.checkpoint.state_dict.StateDictOptions(full_state_dict=True),
        ),
    )


if __name__ == "__main__":
    main(sys.argv[1])
