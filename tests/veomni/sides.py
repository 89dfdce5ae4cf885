"""The two sides of the comparison: VeOmni's generated module, and the module that the hook serves."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn

from tests.veomni import linear_attention
from tests.veomni.configurations import AUDIO, CLASSES, CONFIGURATIONS, IMAGE, LABELS, VIDEO, configuration

T = TypeVar("T", bound=nn.Module)
START = "veomni.models.transformers"
BOTH = ("deepseek_v3", "deepseek_v4", "glm_moe_dsa", "qwen3", "qwen3_5", "qwen3_5_moe")
#: The folders of VeOmni's configs, and the devices that they have one for.
CONFIGS: tuple[tuple[str, str], ...] = tuple(
    (folder, device)
    for folder in CONFIGURATIONS
    for device in ("gpu", "npu")
    if device == "gpu"
    or folder in (*BOTH, "qwen3_moe", "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe", "seed_oss")
)
#: What VeOmni's slots are bound to: eager code, and the one kernel of its registry that runs on every device.
OPS = ("eager", "chunk_loss")


def config_module(folder: str, device: str) -> str:
    """The name of a config, for VEOMNI_PATCHES."""
    return f"{START}.{folder}.{CONFIGURATIONS[folder][0]}_{device}_patch_gen_config"


def side(folder: str, device: str = "") -> Any:
    """VeOmni's generated module for a device; without one, transformers' module as it is imported here."""
    family = CONFIGURATIONS[folder][0]
    if device:
        return import_module(f"{START}.{folder}.generated.patched_modeling_{family}_{device}")
    return import_module(f"transformers.models.{family}.modeling_{family}")


def prepare() -> None:
    """What VeOmni's trainer does before it builds a model, for one process without a device."""
    for name, value in {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }.items():
        os.environ.setdefault(name, value)
    from torch import distributed
    from veomni.distributed.parallel_state import init_parallel_state

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    init_parallel_state(device_type="cpu")
    linear_attention.register()


def bound(module: Any, loss: str = "eager", linear: str = linear_attention.NAME) -> bool:
    """Bind VeOmni's slots in a module as ``build_foundation_model`` does: to eager code, but for these.

    Returns:
        Whether there are any.
    """
    from veomni.arguments.arguments_types import OpsImplementationConfig
    from veomni.models.auto import _bind_veomni_ops
    from veomni.ops import apply_ops_config

    fields = OpsImplementationConfig.__dataclass_fields__
    chosen = {name: "eager" for name in fields if name.endswith("_implementation")}
    chosen |= {"qat_implementation": "none", "cross_entropy_loss_implementation": loss}
    chosen |= {f"{op}_implementation": linear for op in ("causal_conv1d", "chunk_gated_delta_rule")}
    ops = OpsImplementationConfig(**chosen)
    apply_ops_config(ops)
    return _bind_veomni_ops(module, ops)


def model(
    module: Any,
    folder: str,
    trained: str = "",
    state: Mapping[str, Tensor] | None = None,
    linear: str = linear_attention.NAME,
) -> nn.Module:
    """A model in training mode, with the state of another or with seeded weights.

    Args:
        trained: its class; the first one of `CLASSES` if empty.
    """
    trained = trained or CLASSES[folder][0]
    assert bound(module, linear=linear)
    torch.manual_seed(0)
    made = getattr(module, trained)._from_config(configuration(folder, trained), attn_implementation="eager")
    return weighted(made, state)


def weighted(made: T, state: Mapping[str, Tensor] | None = None) -> T:
    """A new model in training mode, with the state of another or with seeded weights."""
    if state is not None:
        made.load_state_dict(state)
        return made.train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        for name, buffer in made.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.05 * torch.randn(buffer.shape, generator=generator)
            elif name.endswith("tid2eid"):
                experts = torch.rand(buffer.shape[0], 4, generator=generator).argsort(1)
                buffer.copy_(experts[:, : buffer.shape[1]])
    return made.train()


def calls(
    made: nn.Module, module: Any, given: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, dict[str, Tensor | None] | str]]:
    """Yield for every input and binding of the loss the numbers of one step by name, or the error's text."""
    for name, arguments in given.items():
        for loss in OPS:
            assert bound(module, loss)
            yield f"{name}/{loss}", _step(made, arguments, dummy=name == "dummy")
    assert bound(module)
    if "media" in given:
        yield "piped/eager", _piped(made, given["media"])
    if getattr(made.config, "num_labels", 0) != LABELS:
        # The balancing loss is added to a loss, and with log-probabilities there is none.
        routed = hasattr(made.config.get_text_config(), "output_router_logits")
        asked = {"return_log_probs": True, **({"output_router_logits": False} if routed else {})}
        yield "packed/log_probs", _step(made, {**given["packed"], **asked}, dummy=False)


def positions(made: Any, media: Mapping[str, Any]) -> Tensor:
    """What VeOmni's data worker computes. (Not all of its functions can be pickled.)"""
    from veomni.utils.constants import AUDIO_INPUT_INDEX, IMAGE_INPUT_INDEX, VIDEO_INPUT_INDEX

    tokens = media["input_ids"].clone()
    for token, index in ((IMAGE, IMAGE_INPUT_INDEX), (VIDEO, VIDEO_INPUT_INDEX), (AUDIO, AUDIO_INPUT_INDEX)):
        tokens[media["input_ids"] == token] = index
    grids = {name: media[name].clone() for name in ("image_grid_thw", "video_grid_thw")}
    asked = {"input_ids": tokens, "attention_mask": media["attention_mask"], **grids}
    if "audio_feature_lengths" in media:
        asked |= {"audio_seqlens": media["audio_feature_lengths"], "second_per_grids": torch.tensor([1.0])}
    places: Tensor = made.get_position_id_func()(**asked)["position_ids"]
    return places


def _piped(made: nn.Module, media: Mapping[str, Any]) -> dict[str, Tensor | None] | str:
    """A step with what VeOmni's data pipeline asks the model for: the positions, and the sizes of pictures."""
    batch = {name: media[name].clone() for name in ("image_grid_thw", "video_grid_thw")}
    try:
        places = positions(made, media)
        made.get_metadata_collate_func()(batch, {})
    except Exception as error:  # compared with the other side's
        return f"{type(error).__name__}: {error}"
    places = places.reshape(1, 3, -1)
    added = {"position_ids": places, "multimodal_metadata": batch["multimodal_metadata"]}
    given = _step(made, {**media, **added}, dummy=False)
    return given if isinstance(given, str) else {**given, "position_ids": places}


def _step(made: nn.Module, arguments: Mapping[str, Any], *, dummy: bool) -> dict[str, Tensor | None] | str:
    from veomni.distributed.parallel_state import ParallelState

    made.zero_grad(set_to_none=True)
    # A copy, because models write into their inputs; the same noise on both sides, because dummies are random.
    copied = {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()
    }
    torch.manual_seed(2)
    with mock.patch.object(ParallelState, "fsdp_enabled", property(lambda _: dummy)):
        try:
            given = made(**copied, use_cache=False)
            numbers = _outputs(given)
            (numbers["log_probs"].sum() if given.loss is None else given.loss).backward()
        except Exception as error:  # compared with the other side's
            return f"{type(error).__name__}: {error}"
    return numbers | {f"grad of {name}": parameter.grad for name, parameter in made.named_parameters()}


def _outputs(given: Any) -> dict[str, Any]:
    found = dict(given.items())
    payload = found.pop("fused_linear_aux", None)
    found |= {name: getattr(payload, name) for name in ("log_probs", "entropy") if payload is not None}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def differences(theirs: Any, ours: Any) -> dict[str, Any]:
    """Which numbers are not the same bits, with the largest difference and what is allowed beside it."""
    if isinstance(theirs, str) or isinstance(ours, str):
        return {} if theirs == ours else {"error": [str(theirs)[:500], str(ours)[:500]]}
    found: dict[str, Any] = {}
    for name in [*theirs, *(name for name in ours if name not in theirs)]:
        mine, other = ours.get(name), theirs.get(name)
        if mine is None or other is None or mine.shape != other.shape:
            if mine is not other:
                found[name] = [_described(other), _described(mine)]
        elif not torch.equal(mine, other):
            scale = other.abs().max().item()
            close = torch.allclose(mine, other, rtol=1e-4, atol=1e-5 * max(scale, 1e-3))
            found[name] = {"difference": (mine - other).abs().max().item(), "scale": scale, "close": close}
    return found


def _described(value: Tensor | None) -> str:
    return "missing" if value is None else str(tuple(value.shape))
