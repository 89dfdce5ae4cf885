"""The settings of this process: one frozen object, and the source of each value.

Precedence, lowest first: defaults, settings file (the nearest `veomni-hook.toml` or `pyproject.toml` with a
`[tool.veomni-hook]` table, searched upward), environment, `activate(...)`. Read when the first module that
could be patched is imported, not at activation: `import veomni_hook.install` must stay cheap. (`children` is
read at activation, if any source sets it.)
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.util import find_spec

from veomni_hook.errors import InputError, SettingsError, VeomniHookWarning
from veomni_hook.settings_file import nearest
from veomni_hook.sizes import bytes_of

TYPE_CHECKING = False  # typing costs 5 ms to import; type checkers treat this name as true
if TYPE_CHECKING:
    from typing import Any

#: Values of the setting `plugins` besides names.
ALL, NONE = "all", "none"

_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word not in _WORDS:
        raise ValueError("0, 1, true, false, yes, no, on, off")
    return _WORDS[word]


def _text(value: object) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value) or "\0" in str(os.fspath(value)):
        raise ValueError("a non-empty string")
    return str(os.fspath(value))


def _word(legal: tuple[str, ...], value: object) -> str:
    if value not in legal:
        raise ValueError(", ".join(legal))
    return str(value)


_device = partial(_word, ("auto", "gpu", "npu"))
_traceback = partial(_word, ("short", "full"))


def _names(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ValueError("module names, comma-separated or as a list")
    return tuple(name for name in value if name)


def _plugins(value: object) -> str:
    word = str(value).strip().lower()
    if word in _WORDS or word in (ALL, NONE):
        return ALL if _WORDS.get(word, word == ALL) else NONE
    try:
        return ",".join(_names(value)) or NONE
    except ValueError:
        raise ValueError("0, 1, all, none, or names of distributions or entry points") from None


#: The value of the setting `deterministic` that switches the mode on.
BATCH_INVARIANT = "batch_invariant"


def _deterministic(value: object) -> str:
    if value not in (BATCH_INVARIANT, NONE, ""):
        raise ValueError(f"{BATCH_INVARIANT}, {NONE}")
    return BATCH_INVARIANT if value == BATCH_INVARIANT else ""


#: The axes of the setting `parallel`, in the order in which they are spelt.
AXES = ("sp", "ep")


def _assignments(value: object, legal: str) -> list[tuple[str, str, str]]:
    """Return the parts of ``a=1,b`` that are not ``none``: name, sign and what is behind it."""
    if not isinstance(value, str):
        raise ValueError(legal)
    parts = [part.strip() for part in value.split(",") if part.strip() not in ("", NONE)]
    assignments = [part.partition("=") for part in parts]
    return [(name.strip(), sign, number.strip()) for name, sign, number in assignments]


def _parallel(value: object) -> str:
    legal = "sizes such as sp=2 or sp=2,ep=4 (axes: sp, ep; whole numbers from 1), or none"
    if isinstance(value, Mapping):
        pairs = [(str(axis), str(size)) for axis, size in value.items()]
    else:
        pairs = [(axis, size) for axis, _, size in _assignments(value, legal)]
    sizes = dict(pairs)
    if len(sizes) != len(pairs) or not all(
        axis in AXES and size.isascii() and size.isdigit() and int(size) >= 1 for axis, size in pairs
    ):
        raise ValueError(legal)
    return ",".join(f"{axis}={int(sizes[axis])}" for axis in AXES if int(sizes.get(axis, 1)) > 1)


def axes_of(parallel: str) -> dict[str, int]:
    """Return the sizes of all axes that a value of `parallel` says."""
    sizes = dict(part.split("=") for part in parallel.split(",") if part)
    return {axis: int(sizes.get(axis, 1)) for axis in AXES}


#: The parts of the setting `memory`, in the order in which they are spelt; what a number says, if one may.
MEMORY = {"checkpoint": "", "offload": "bytes of host memory", "tiles": "positions"}
AUTO = "auto"


def _memory(value: object) -> str:
    legal = (
        "checkpoint, offload (offload=64GiB: of host memory at most), tiles (tiles=4096: positions), or none;"
        " or alone what a step may take: 40GiB, or auto for what the device has"
    )
    if isinstance(value, Mapping):
        pairs = [(str(part), "" if given is True else str(given)) for part, given in value.items() if given]
    else:
        pairs = [(part, number) for part, _, number in _assignments(value, legal)]
    parts = dict(pairs)
    try:
        if [*parts] == [AUTO] and not parts[AUTO]:
            return AUTO
        if len(pairs) == 1 and not pairs[0][1] and re.fullmatch(r"[\d.]+ *[A-Za-z]+", pairs[0][0]):
            return f"{bytes_of(pairs[0][0])}B"
        sizes: dict[str, int | str] = {part: bytes_of(number) if number else "" for part, number in pairs}
    except InputError:
        raise ValueError(legal) from None
    if len(parts) != len(pairs) or any(
        part not in MEMORY or (size != "" and not (MEMORY[part] and size)) for part, size in sizes.items()
    ):
        raise ValueError(legal)
    if "offload" in sizes:  # what goes to the host is what checkpointed layers keep
        sizes.setdefault("checkpoint", "")
    return ",".join(f"{part}={sizes[part]}".rstrip("=") for part in MEMORY if part in sizes)


#: The values of the setting `precision` that switch it on, and its options: numbers of layers.
FORMATS = FLOAT8, MXFP8 = "float8", "mxfp8"
ENDS = ("first", "last")


def precision_of(value: object) -> str:
    """Return the canonical form of a value of `precision`; raises ValueError with the legal ones."""
    legal = (
        "float8, mxfp8 (Blackwell), or none; without some layers: float8,first=1,last=1 (from each end), "
        "float8,skip=k_proj+v_proj (by name)"
    )
    if isinstance(value, Mapping):
        pairs = [(str(name), given) for name, given in value.items() if given or given == ""]
    else:
        pairs = [(name, given if sign else True) for name, sign, given in _assignments(value, legal)]
    options: dict[str, Any] = dict(pairs)
    switches = [(name, options.pop(name)) for name in FORMATS if name in options]
    skip = options.pop("skip", ())
    names = [name.strip() for name in skip.split("+")] if isinstance(skip, str) else skip
    if not pairs:
        return ""
    if (
        len({name for name, _ in pairs}) != len(pairs)
        or [switch for _, switch in switches] != [True]
        or not isinstance(names, list | tuple)
        or not all(isinstance(name, str) and re.fullmatch(r"\w+(\.\w+)*", name) for name in names)
        or any(name not in ENDS or not re.fullmatch("[0-9]+", str(given)) for name, given in options.items())
    ):
        raise ValueError(legal)
    ends = (f"{name}={int(options[name])}" for name in ENDS if int(options.get(name, 0)))
    return ",".join((switches[0][0], *ends, *([f"skip={'+'.join(names)}"] if names else [])))


def _setting(
    variable: str,
    default: object,
    parse: Callable[[object], object],
    *,
    text: Callable[[Settings], object] | None = None,
) -> Any:
    """Declare a setting, all of it.

    Args:
        variable: its environment variable.
        default: its value if no source sets it.
        parse: returns the value for what a source says; raises ValueError with the legal values.
        text: what of it changes the patched text of modules, besides the configs that apply: a part of the
            key in the cache.
    """
    return field(default=default, metadata={"variable": variable, "parse": parse, "text": text})


@dataclass(frozen=True)
class Settings:
    """The values of all settings.

    Attributes:
        enabled: False patches nothing.
        kernels: kernel choice: `auto`, `eager`, a backend, or `op=backend,…`.
        device: which config of a GPU/NPU pair applies; `auto` selects `npu` if torch_npu is installed.
        dump_patched: write every patched module and its diff to `dump_dir`.
        dump_dir: folder for `dump_patched`, relative to the working directory.
        cache_dir: root of the cache; None: the user's cache folder.
        strict: turn warnings (module imported too early, no source, …) into errors.
        patches: extra modules that hold patch configs.
        idioms: recognise operations by their code in every modeling module; False applies only the patches
            that configs name.
        remote_code: patch modules of `trust_remote_code` models as well.
        children: activation adds the hook to this process's environment, for every child process.
        plugins: which entry points of installed distributions are enabled: `all`, `none`, or names of
            distributions or entry points, comma-separated.
        banner: print once, on rank 0, what is patched in a model that runs.
        parallel: sizes of the parallel axes, `sp=2,ep=4`; empty: none. An axis of size 1 is left out.
        memory: how a step of training needs less memory: `checkpoint`, `offload`, `tiles`, comma-separated;
            or what it may take, `40GiB` or `auto`.
        precision: `float8`: linear layers and experts of decoders multiply in float8; with `first=1`,
            `last=1`, `skip=k_proj+v_proj`, without these. `mxfp8`: in MX, which Blackwell has.
        speech: False leaves the parts of a model that make speech unbuilt, so that the rest can be trained.
        host_values: keep the integers of a batch on the host when accelerate or Trainer moves it to a device.
        deterministic: `batch_invariant` gives a row of a forward pass the same bits in any batch; empty: off.
        traceback: `short` removes this package's frames from the tracebacks of errors that an import
            raises, `full` keeps them.
    """

    enabled: bool = _setting("VEOMNI_HOOK", True, _boolean)
    kernels: str = _setting("VEOMNI_KERNELS", "auto", _text)
    device: str = _setting("VEOMNI_DEVICE", "auto", _device, text=lambda chosen: chosen.device_kind())
    dump_patched: bool = _setting("VEOMNI_DUMP_PATCHED", False, _boolean)
    dump_dir: str = _setting("VEOMNI_DUMP_DIR", "veomni_patched", _text)
    cache_dir: str | None = _setting("VEOMNI_CACHE_DIR", None, _text)
    strict: bool = _setting("VEOMNI_STRICT", False, _boolean)
    patches: tuple[str, ...] = _setting("VEOMNI_PATCHES", (), _names)
    idioms: bool = _setting("VEOMNI_IDIOMS", True, _boolean, text=lambda chosen: chosen.idioms)
    remote_code: bool = _setting("VEOMNI_REMOTE_CODE", False, _boolean)
    children: bool = _setting("VEOMNI_CHILDREN", False, _boolean)
    plugins: str = _setting("VEOMNI_PLUGINS", ALL, _plugins)
    banner: bool = _setting("VEOMNI_BANNER", True, _boolean)
    traceback: str = _setting("VEOMNI_TRACEBACK", "short", _traceback)
    parallel: str = _setting("VEOMNI_PARALLEL", "", _parallel, text=lambda chosen: chosen.axis("sp") > 1)
    memory: str = _setting("VEOMNI_MEMORY", "", _memory, text=lambda chosen: bool(chosen.memory))
    precision: str = _setting("VEOMNI_PRECISION", "", precision_of)
    speech: bool = _setting("VEOMNI_SPEECH", True, _boolean, text=lambda chosen: chosen.speech)
    host_values: bool = _setting("VEOMNI_HOST_VALUES", False, _boolean)
    deterministic: str = _setting("VEOMNI_DETERMINISTIC", "", _deterministic)

    def axis(self, name: str) -> int:
        """Return the size of a parallel axis (`AXES`)."""
        return axes_of(self.parallel)[name]

    def device_kind(self) -> str:
        """Return which of a GPU/NPU pair of configs applies: `device`, or `npu` if torch_npu is installed."""
        if self.device != "auto":
            return self.device
        return "npu" if "torch_npu" in sys.modules or find_spec("torch_npu") else "gpu"

    def of_text(self) -> dict[str, str]:
        """Return what changes the patched text of modules, for the key in the cache."""
        parts = {one.name: one.metadata["text"] for one in fields(self)}
        return {name: str(part(self)) for name, part in parts.items() if part is not None}


_PARSERS: dict[str, Callable[[object], object]] = {
    one.name: one.metadata["parse"] for one in fields(Settings)
}
#: The environment variable of each setting.
ENVIRONMENT: dict[str, str] = {one.name: one.metadata["variable"] for one in fields(Settings)}

#: Set, to its process id, by the process that printed the banner: its children do not print it again.
BANNER_SHOWN = "VEOMNI_BANNER_SHOWN"


@dataclass(frozen=True)
class Provenance:
    """The source of one setting's value, and the values that it overrides (highest precedence first)."""

    value: object
    source: str
    beaten: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True)
class Resolved:
    """The settings with the provenance of each field; `ignored` lists the ignored files and the reasons."""

    settings: Settings
    provenance: Mapping[str, Provenance] = field(default_factory=dict)
    file: str | None = None
    unknown_environment: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


_said: set[str] = set()


def resolve(
    environ: Mapping[str, str] | None = None,
    start_dir: str | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Resolved:
    """Resolve every setting from its four sources; warn, once per process, if a settings file is ignored.

    Args:
        environ: the environment; `os.environ` by default.
        start_dir: where the upward search for a settings file begins; the working directory by default.
        overrides: the arguments of `activate(...)`.

    Raises:
        SettingsError: a value is invalid, a key is unknown, or the file is not valid TOML; in strict mode
            also if a settings file is ignored.
    """
    environ = os.environ if environ is None else environ
    path, table, ignored = nearest(start_dir)
    layers: list[tuple[str, dict[str, object]]] = [("default", {f.name: f.default for f in fields(Settings)})]
    if path is not None:
        layers.append((path, _checked(table, f"settings file {path}")))
    from_environment = {
        name: environ[variable] for name, variable in ENVIRONMENT.items() if environ.get(variable, "") != ""
    }
    layers.append(("environment", _checked(from_environment, "environment")))
    layers.append(("activate()", _checked(dict(overrides or {}), "activate()")))

    provenance: dict[str, Provenance] = {}
    for name in _PARSERS:
        claims = [(source, values[name]) for source, values in layers if name in values]
        source, value = claims[-1]
        if source == "environment":
            source = ENVIRONMENT[name]
        beaten = tuple((ENVIRONMENT[name] if s == "environment" else s, v) for s, v in reversed(claims[:-1]))
        provenance[name] = Provenance(value, source, beaten)
    known = {*ENVIRONMENT.values(), BANNER_SHOWN}
    unknown = tuple(sorted(v for v in environ if v.startswith("VEOMNI_") and v not in known))
    values = {name: origin.value for name, origin in provenance.items()}
    settings = Settings(**values)  # type: ignore[arg-type]
    _report(ignored, settings)
    return Resolved(settings, provenance, path, unknown, tuple(f"{p}: {why}" for p, why in ignored.items()))


def _checked(values: Mapping[str, object], where: str) -> dict[str, object]:
    checked = {}
    for name, value in values.items():
        if name not in _PARSERS:
            raise SettingsError(
                f"unknown setting {name!r}", where=where, fix=f"settings are: {', '.join(sorted(_PARSERS))}"
            )
        try:
            checked[name] = _PARSERS[name](value)
        except ValueError as error:
            shown = ENVIRONMENT[name] if where == "environment" else name
            raise SettingsError(
                f"setting {shown} has the illegal value {value!r}", where=where, fix=f"legal values: {error}"
            ) from None
    return checked


def _report(ignored: Mapping[str, str], settings: Settings) -> None:
    for path, problem in ignored.items():
        fix = (
            "make it and the folders above it yours alone (chown, chmod go-w), or set its values in the "
            "environment (VEOMNI_KERNELS=…)"
        )
        if settings.strict:
            raise SettingsError(f"the settings file must not be used: {problem}", where=path, fix=fix)
        if path not in _said:
            _said.add(path)
            warnings.warn(
                f"the settings file {path} is ignored: {problem}. To use it, {fix}",
                VeomniHookWarning,
                stacklevel=3,
            )
