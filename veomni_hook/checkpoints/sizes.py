"""The sizes of a model's routed experts, read from its config: flat or nested, an object or a mapping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from veomni_hook.errors import CheckpointError

__all__ = ["COUNT_KEYS", "OWN_LAYOUT", "ExpertSizes"]

#: Names that configs use for the number of routed experts.
COUNT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")

_INTERMEDIATE_KEYS = ("moe_intermediate_size", "intermediate_size")
_PARTS = ("text_config", "thinker_config")

#: Model types whose parameters in memory are not `[E, 2I, H]` and `[E, H, I]`, and their actual layout.
OWN_LAYOUT = {
    "aria_text": "[E, H, 2I] and [E, I, H] in memory",
    "gpt_oss": "[E, H, 2I] with gate and up interleaved, and biases, in memory",
    "llama4_text": "[E, H, 2I] and [E, I, H] in memory",
    "openai_privacy_filter": "[E, H, 2I] and biases in memory",
}


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Number of routed experts E, hidden size H and intermediate size I of one expert."""

    num_experts: int
    hidden_size: int
    intermediate_size: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise CheckpointError(
                    f"{name} of experts is {value!r}, not a positive int",
                    where="ExpertSizes",
                    fix="pass ExpertSizes(num_experts, hidden_size, intermediate_size) instead of a config; "
                    "where layers differ, one converter a size, each with its own under=",
                )

    @property
    def gate_up(self) -> tuple[int, int, int]:
        """Shape of ``gate_up_proj`` in memory: `[E, 2I, H]`, the gate's rows first."""
        return self.num_experts, 2 * self.intermediate_size, self.hidden_size

    @property
    def down(self) -> tuple[int, int, int]:
        """Shape of ``down_proj`` in memory: `[E, H, I]`."""
        return self.num_experts, self.hidden_size, self.intermediate_size

    @classmethod
    def of(cls, config: object) -> ExpertSizes:
        """Read the sizes from a transformers config, or from the content of ``config.json``.

        The number of experts is ``num_experts``, ``n_routed_experts`` or ``num_local_experts``. For a nested
        config, ``text_config`` (below ``thinker_config``, if there is one) is used.

        Raises:
            CheckpointError: the config has no routed experts, gives two different numbers of experts or one
                size per layer, or belongs to a model that has another layout of experts in memory.
        """
        if isinstance(config, ExpertSizes):
            return config
        part = next((section for section in _inner_first(config) if _counts(section)), None)
        if part is None:
            raise CheckpointError(
                f"the config has no number of routed experts ({', '.join(COUNT_KEYS)})",
                where=_described(config),
                fix="pass the part of the config that describes the experts, or ExpertSizes(...)",
            )
        kind = _get(part, "model_type")
        if kind in OWN_LAYOUT:
            raise CheckpointError(
                f"experts of {kind} are {OWN_LAYOUT[kind]}, which no converter here produces",
                where=_described(part),
                fix="load its expert tensors as they are: they are on disk what they are in memory",
            )
        counts = _counts(part)
        count = next(iter(counts.values()))
        if any(other != count for other in counts.values()):
            raise CheckpointError(
                "the config gives more than one number of experts: "
                + ", ".join(f"{key}={value}" for key, value in counts.items()),
                where=_described(part),
                fix="pass ExpertSizes(num_experts, hidden_size, intermediate_size)",
            )
        sizes = [_get(part, key) for key in _INTERMEDIATE_KEYS]
        intermediate = next((size for size in sizes if size is not None), None)
        # Checked by __post_init__, which rejects None and lists of sizes per layer.
        return cls(count, _get(part, "hidden_size"), intermediate)  # type: ignore[arg-type]


def _inner_first(config: object) -> Iterator[object]:
    for name in _PARTS:
        if (part := _get(config, name)) is not None:
            yield from _inner_first(part)
    yield config


def _counts(config: object) -> dict[str, int]:
    values = {key: _get(config, key) for key in COUNT_KEYS}
    return {key: value for key, value in values.items() if value is not None}  # type: ignore[misc]


def _get(config: object, key: str) -> object | None:
    value: object | None = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
    return value


def _described(config: object) -> str:
    return f"config of {_get(config, 'model_type') or type(config).__name__}"
