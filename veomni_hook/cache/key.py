"""Cache keys: digests of everything that affects the output, with no date, path or manual version number.

A key is the digest of length-prefixed fields, so two different lists of fields never give the same text.
Digests are blake2b with 20 bytes, in hexadecimal. hashlib is imported on first use: with OpenSSL it takes
5 ms, and by the first target transformers has already loaded it.
"""

from __future__ import annotations

import os
import sys

from veomni_hook.patterns import PATTERN_FILES

TYPE_CHECKING = False  # typing costs 5 ms to import; type checkers treat this name as true
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from importlib.resources.abc import Traversable

__all__ = [
    "DIGEST_SIZE",
    "digest",
    "engine_digest",
    "interpreter_tag",
    "stage1_key",
    "stage2_key",
]

DIGEST_SIZE = 20
_ENGINE_PARTS = ("cache", "patches")
_CODE_SUFFIXES = (".py", ".pyc")
_KERNELS = "kernels"
_engine: dict[str, str] = {}


def digest(data: bytes) -> str:
    """The digest of `data`: 40 hexadecimal digits."""
    from hashlib import blake2b

    return blake2b(data, digest_size=DIGEST_SIZE).hexdigest()


def interpreter_tag() -> str:
    """The interpreter's cache tag, with the optimisation level if it is not 0 (``cpython-311.opt-2``)."""
    tag = sys.implementation.cache_tag or f"{sys.implementation.name}-{sys.hexversion:x}"
    return f"{tag}.opt-{sys.flags.optimize}" if sys.flags.optimize else tag


def engine_digest() -> str:
    """The digest of this package's files that affect the output; computed once per process.

    Includes the files that idioms read as their patterns.
    """
    if "digest" not in _engine:
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        files = list(_folder_files(package)) if os.path.isdir(package) else list(_resource_files())
        fields = (part for name, data in sorted(files) for part in (name.encode(), data))
        _engine["digest"] = _digest_fields(fields)
    return _engine["digest"]


def stage1_key(  # noqa: PLR0913 - the fields of the key, every one by keyword
    *,
    module: str,
    upstream: bytes,
    engine: str,
    settings: Mapping[str, str],
    config_names: Sequence[str],
    inprocess: Sequence[tuple[str, str]],
    distribution: str,
    version: str,
) -> str:
    """The key that can be computed before any config is loaded.

    `upstream` is the installed source's bytes, `settings` the settings that affect the output (in any
    order), `config_names` the configs in the order in which they apply, `inprocess` the configs registered in
    this process with the digests of their source text. The interpreter's tag and version are added here.
    """
    from importlib.util import source_hash

    # importlib's digest for hash-based .pyc files, which have the same purpose: 0.05 ms for 195 KB, where
    # blake2b takes 0.29 ms.
    source = f"{len(upstream)}:{source_hash(upstream).hex()}"
    groups: tuple[Sequence[str], ...] = (
        (module, source, engine, distribution, version, interpreter_tag(), sys.version),
        [part for item in sorted(settings.items()) for part in item],
        config_names,
        [part for item in inprocess for part in item],
    )
    return _digest_fields(_digest_fields(part.encode() for part in group).encode() for group in groups)


def stage2_key(stage1: str, configs: Iterable[str]) -> str:
    """The key once configs are loaded: with the digests of those for the module, in their order."""
    return _digest_fields(part.encode() for part in (stage1, *configs))


def _digest_fields(fields: Iterable[bytes]) -> str:
    from hashlib import blake2b

    hasher = blake2b(digest_size=DIGEST_SIZE)
    for field in fields:
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    return hasher.hexdigest()


def _folder_files(package: str) -> Iterator[tuple[str, bytes]]:
    for part in _ENGINE_PARTS:
        for folder, folders, names in os.walk(os.path.join(package, part)):
            folders[:] = [name for name in folders if name != "__pycache__"]
            for name in names:
                if name.endswith(_CODE_SUFFIXES):
                    path = os.path.join(folder, name)
                    with open(path, "rb", buffering=0) as file:
                        yield os.path.relpath(path, package).replace(os.sep, "/"), file.read()
    for op in os.listdir(os.path.join(package, _KERNELS)):
        for name in PATTERN_FILES:
            path = os.path.join(package, _KERNELS, op, name)
            if os.path.isfile(path):  # missing if only compiled files are installed; then idioms fail too
                with open(path, "rb", buffering=0) as file:
                    yield f"{_KERNELS}/{op}/{name}", file.read()


def _resource_files() -> Iterator[tuple[str, bytes]]:
    # The package is in a zip file: only its loader can list it.
    from importlib.resources import files

    pending: list[tuple[str, Traversable]] = [
        (part, files("veomni_hook").joinpath(part)) for part in _ENGINE_PARTS
    ]
    while pending:
        name, item = pending.pop()
        if item.is_dir():
            pending.extend((f"{name}/{child.name}", child) for child in item.iterdir())
        elif name.endswith(_CODE_SUFFIXES):
            yield name, item.read_bytes()
    for op in files("veomni_hook").joinpath(_KERNELS).iterdir():
        for name in PATTERN_FILES:
            if op.is_dir() and (formulas := op.joinpath(name)).is_file():
                yield f"{_KERNELS}/{op.name}/{name}", formulas.read_bytes()
