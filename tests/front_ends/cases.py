"""What each front end trains, with which command; noxfile.py says what is installed for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pydoc_data.topics import topics
from types import MappingProxyType
from typing import Any, NamedTuple

SCRIPTS = Path(__file__).parent / "scripts"
#: Of Qwen3, as `tests.recipes.tiny` makes it: all that idioms route in it.
DENSE = frozenset(
    {"rms_norm", "add_rms_norm", "rotary", "qk_norm_rotary", "gated_mlp", "linear_cross_entropy"}
)
STEPS = 5
TEXTS = [text[:320] for text in list(topics.values())[:64] if len(text) > 320]


class Case(NamedTuple):
    """A training run.

    Attributes:
        front_end: its session in noxfile.py.
        command: its words; ``{model}`` is the model's folder, here and in ``config``.
        rows: the data, in ``rows.json``.
        config: what ``config.yaml`` says.
        variables: of the environment.
        eager: what `explain` says of each op that runs upstream's code.
        ops: all that `explain` names.
        note: what `explain` says beside its rows.
        ranks: how many processes train.
        plugin: the line that switches the hook on is in ``plugin.py``, and not in the command.
        not_here: why it cannot run on a CPU.
        model: the function of `tests.recipes.tiny` that makes the model.
    """

    front_end: str
    command: str
    rows: list[dict[str, Any]]
    config: dict[str, Any]
    variables: Mapping[str, str] = MappingProxyType({})
    eager: Mapping[str, str] = MappingProxyType({})
    ops: frozenset[str] = DENSE
    note: str = ""
    ranks: int = 1
    plugin: bool = False
    not_here: str = ""
    model: str = "dense"


# Gradients are compared as they are, not as they are clipped.
SHARED = {
    "max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-3, "seed": 7, "max_grad_norm": 1000, "output_dir": "out",
}  # fmt: skip

AXOLOTL = {
    **SHARED,
    "base_model": "{model}", "datasets": [{"path": "rows.json", "ds_type": "json", "type": "completion"}],
    "dataset_prepared_path": "prepared", "sequence_len": 256, "micro_batch_size": 2, "gradient_accumulation_steps": 2,
    "num_epochs": 1, "optimizer": "adamw_torch", "lr_scheduler": "constant", "val_set_size": 0, "save_strategy": "no",
    "bf16": False, "fp16": False, "tf32": False, "special_tokens": {"pad_token": "<pad>"},
}  # fmt: skip
AXOLOTL_LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
# Defaults but for the MLP, where Axolotl runs a Triton kernel that allocates on a GPU.
AXOLOTL_KERNELS = {"lora_qkv_kernel": True, "lora_o_kernel": True, "lora_mlp_kernel": False}
# Its kernels read weights of four bits on a GPU only; bitsandbytes also does so on a CPU.
AXOLOTL_NO_KERNELS = dict.fromkeys(AXOLOTL_KERNELS, False)
AXOLOTL_QLORA = {"adapter": "qlora", "load_in_4bit": True, **AXOLOTL_NO_KERNELS}
EDITED = r"eager \(the function that asks is an edited copy of the patched code: axolotl\."
BYPASSED = r"torch \(.*adapter fused\)(, \d+ calls in training)?$"
PROMPTED = [{"instruction": text[:80], "input": "", "output": text[80:]} for text in TEXTS]


def axolotl(**config: Any) -> Case:
    return Case(
        "axolotl",
        "axolotl train config.yaml",
        [{"text": text} for text in TEXTS],
        {**AXOLOTL, **config},
        {"AXOLOTL_DO_NOT_TRACK": "1"},
    )


LLAMA_FACTORY = {
    **SHARED,
    "model_name_or_path": "{model}", "stage": "sft", "do_train": True, "dataset": "rows", "dataset_dir": ".",
    "template": "default", "cutoff_len": 256, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    "lr_scheduler_type": "constant", "report_to": "none",
}  # fmt: skip


def llama_factory(**config: Any) -> Case:
    return Case("llama-factory", "llamafactory-cli train config.yaml", PROMPTED, {**LLAMA_FACTORY, **config})


SWIFT = {
    **SHARED,
    "model": "{model}", "model_type": "qwen3", "template": "dummy", "dataset": "rows.json", "split_dataset_ratio": 0,
    "torch_dtype": "float32", "max_length": 256, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    "lr_scheduler_type": "constant", "report_to": "none", "add_version": False, "save_only_model": True,
    "dataset_num_proc": 1, "dataloader_num_workers": 0,
}  # fmt: skip


def swift(**config: Any) -> Case:
    conversations = [
        {"messages": [{"role": "user", "content": text[:80]}, {"role": "assistant", "content": text[80:]}]}
        for text in TEXTS
    ]
    return Case("ms-swift", "swift sft config.yaml", conversations, {**SWIFT, **config})


TRL = {
    **SHARED,
    "model_name_or_path": "{model}", "dtype": "float32", "datasets": [{"path": "json", "data_files": "rows.json"}],
    "per_device_train_batch_size": 4, "report_to": "none", "bf16": False, "use_cpu": True, "lr_scheduler_type": "constant",
}  # fmt: skip
SAMPLED = {
    "reward_funcs": ["tests.recipes.trl_steps.many_different_letters"],
    "num_generations": 4, "max_completion_length": 16, "beta": 0.1,
}  # fmt: skip
PROMPTS = [{"prompt": text[:60]} for text in TEXTS]
PAIRS = [{"prompt": text[:80], "chosen": text[80:160], "rejected": text[200:320]} for text in TEXTS]


# The trainer computes losses and log-probabilities itself, with our function.
OWN_HEAD = r"{}'s log-probabilities: veomni_hook\.token_log_probs in \d+ calls$"
NEVER_ASKED = {"linear_cross_entropy": r".*the model was never asked for a loss"}


def trl(trainer: str, rows: list[dict[str, Any]], **config: Any) -> Case:
    return Case(
        "trl", f"trl {trainer} --config config.yaml", rows, {**TRL, **config},
        eager=NEVER_ASKED, note=OWN_HEAD.format("TRL"),
    )  # fmt: skip


def script(front_end: str, name: str, rows: list[dict[str, Any]]) -> Case:
    """A library that has no command of its own: a script as its documents show it."""
    return Case(front_end, f"python {SCRIPTS / name} {{model}}", rows, {})


LOW_RANK = DENSE | {"low_rank_linear"}
VERL = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}

CASES = {
    "axolotl-full-packed": axolotl(sample_packing=True),
    "axolotl-lora": axolotl(**AXOLOTL_LORA, **AXOLOTL_KERNELS)._replace(
        ops=LOW_RANK, eager={"qk_norm_rotary": EDITED, "rotary": EDITED, "low_rank_linear": BYPASSED}
    ),
    "axolotl-lora-mlp": axolotl(
        **AXOLOTL_LORA, lora_qkv_kernel=True, lora_o_kernel=True, lora_mlp_kernel=True
    )._replace(
        command=f"python {SCRIPTS / 'axolotl_mlp_on_a_cpu.py'}",
        ops=LOW_RANK,
        eager={
            "qk_norm_rotary": EDITED,
            "rotary": EDITED,
            "low_rank_linear": r"torch \(.*not called yet",
            "gated_mlp": r"replaced by axolotl\.",
        },
    ),
    "axolotl-lora-experts": axolotl(**AXOLOTL_LORA, **AXOLOTL_KERNELS)._replace(
        model="with_experts",
        ops=LOW_RANK - {"gated_mlp"} | {"moe_experts", "moe_router", "load_balancing_loss"},
        eager={
            "qk_norm_rotary": EDITED,
            "rotary": EDITED,
            "low_rank_linear": BYPASSED,
            "load_balancing_loss": r".*never asked for this loss: output_router_logits is off",
        },
    ),
    "axolotl-lora-linear-attention": axolotl(**AXOLOTL_LORA, **AXOLOTL_NO_KERNELS)._replace(
        model="with_linear_attention", ops=LOW_RANK | {"log_decay", "causal_conv", "gated_delta_rule"}
    ),
    "axolotl-qlora": axolotl(**{**AXOLOTL_LORA, **AXOLOTL_QLORA})._replace(ops=LOW_RANK),
    "llama-factory-lora-neat-packing": llama_factory(
        finetuning_type="lora", lora_target="all", packing=True, neat_packing=True
    )._replace(ops=LOW_RANK),
    "llama-factory-full-two-ranks": llama_factory(finetuning_type="full")._replace(
        variables={"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}, ranks=2
    ),
    "ms-swift-full": swift(tuner_type="full"),
    "ms-swift-full-plugin": swift(tuner_type="full", external_plugins=["plugin.py"])._replace(plugin=True),
    "ms-swift-lora": swift(tuner_type="lora")._replace(ops=LOW_RANK),
    "ms-swift-packing": swift(tuner_type="full", packing=True)._replace(
        not_here="ms-swift packs samples for flash-attention alone, which needs a GPU"
    ),
    "trl-sft": trl("sft", [{"text": text} for text in TEXTS]),
    "trl-sft-packed-lora": trl(
        "sft", [{"text": text} for text in TEXTS], packing=True, max_length=256, use_peft=True
    )._replace(ops=LOW_RANK),
    "trl-dpo": trl("dpo", PAIRS),
    "trl-grpo": trl("grpo", PROMPTS, **SAMPLED),
    "trl-rloo": trl("rloo", PROMPTS, **SAMPLED),
    "lightning": script("lightning", "fit_lightning.py", [{"text": text} for text in TEXTS]),
    "sentence-transformers": script(
        "sentence-transformers",
        "fit_sentence_transformers.py",
        [{"anchor": text[:80], "positive": text[80:]} for text in TEXTS],
    )._replace(ops=DENSE - {"linear_cross_entropy"}),
    "verl-actor": script("verl", "verl_actor.py", [{"text": text} for text in TEXTS])._replace(
        variables=VERL,
        note=OWN_HEAD.format("verl"),
        eager={"linear_cross_entropy": r"replaced by verl\.models\.transformers\.dense_common\."},
    ),
}

#: Commands that measure a model and train none.
EVALUATIONS = {
    "lm-eval": Case(
        "lm-eval",
        f"python {SCRIPTS / 'lm_eval_explained.py'} run --model hf --model_args pretrained={{model}},dtype=float32"
        " --tasks config.yaml --device cpu --batch_size 4 --log_samples --output_path out",
        [{"text": text} for text in TEXTS],
        eager=NEVER_ASKED,
        config={
            "task": "topics", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "rows.json"}},
            "test_split": "test", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
        },
    )
}  # fmt: skip
