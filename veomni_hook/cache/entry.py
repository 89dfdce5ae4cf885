"""The format on disk: names, the manifest, the bytecode container, and the checks of each.

A manifest is ``keys/<stage-1 key>``: the seal of the rest, a line of JSON with what a lookup needs, a line
of JSON with the patch report. An entry is ``<distribution>-<version>/<patch hash>``: the patched text and, in
``__pycache__``, its bytecode. The bytecode contains its own seal, because marshal's bytes differ between
processes: with a seal in the manifest, two writers of one entry would invalidate each other.
Seals are importlib's source hash (3 GB/s; blake2b, at 0.45 GB/s, took 0.9 ms for a module of 190 KB). They
detect damage and edits. Folder ownership protects against other users; anyone who can write can also seal.
"""

from __future__ import annotations

import marshal
from types import CodeType

from veomni_hook.cache.trusted_folder import Defect, Root

# Commands import this module before they know that they need the cache. So functions import json and
# importlib.util, here and in the modules beside it.
TYPE_CHECKING = False  # typing costs 5 ms to import; type checkers treat this name as true
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from veomni_hook.cache.inputs import Inputs

__all__ = [
    "KEYS",
    "Manifest",
    "bytecode_name",
    "check_bytecode",
    "check_text",
    "is_plain",
    "load",
    "pack_bytecode",
    "read_manifest",
    "seal",
]

KEYS = "keys"
_MAGIC = b"\x93VEOMNI\n"  # the first byte is neither ASCII nor UTF-8; the last one reveals a text-mode copy
_TAG_SIZE = 32
_SEAL_SIZE = 8
_LENGTH_SIZE = 8
_PYTHON_MAGIC_AT = len(_MAGIC)
_TAG_AT = _PYTHON_MAGIC_AT + 4
_LENGTH_AT = _TAG_AT + _TAG_SIZE
_TEXT_SEAL_AT = _LENGTH_AT + _LENGTH_SIZE
_PAYLOAD_SEAL_AT = _TEXT_SEAL_AT + _SEAL_SIZE
_PAYLOAD_AT = _PAYLOAD_SEAL_AT + _SEAL_SIZE


class Manifest:
    """The result for one stage-1 key: a patched entry, or (`patch_hash` empty) that no patch applies.

    `text_seal` is the seal of the stored text in hexadecimal, `inputs` is what must be seen again for this
    result to hold (`veomni_hook.cache.inputs`), `report` is JSON. `absent` lists configs for modules that
    were not installed: the name and source module of each. `consult` says whether the report has something
    to do before the module is executed.
    """

    __slots__ = (
        "absent",
        "consult",
        "distribution",
        "inputs",
        "key",
        "module",
        "patch_hash",
        "report",
        "tag",
        "text_seal",
        "version",
    )
    _FIELDS = ("key", "module", "distribution", "version", "patch_hash", "tag", "text_seal")

    def __init__(
        self,
        fields: Mapping[str, str],
        inputs: Inputs,
        report: bytes,
        absent: Sequence[tuple[str, str]] = (),
        *,
        consult: bool = False,
    ) -> None:
        """Take the texts named in ``_FIELDS``; raises KeyError when one is missing."""
        self.key, self.module, self.distribution, self.version, self.patch_hash, self.tag, self.text_seal = (
            fields[name] for name in self._FIELDS
        )
        self.inputs = inputs
        self.report = report
        self.absent = tuple((name, module) for name, module in absent)
        self.consult = consult

    @property
    def entry(self) -> str:
        """The folder of the entry, relative to the root."""
        return f"{self.distribution}-{self.version}/{self.patch_hash}"

    @property
    def text(self) -> str:
        """The stored text's name, relative to the root: the module's path without its first package."""
        below = self.module.partition(".")[2] or self.module
        return f"{self.entry}/{below.replace('.', '/')}.py"

    def encode(self) -> bytes:
        """The manifest file's bytes."""
        import json

        fields: dict[str, object] = {name: getattr(self, name) for name in self._FIELDS}
        inputs = sorted((*key, seen) for key, seen in self.inputs.items())
        fields |= {"inputs": inputs, "absent": self.absent, "consult": self.consult}
        body = json.dumps(fields).encode() + b"\n" + self.report + b"\n"
        return seal(body).hex().encode() + b"\n" + body


def seal(data: bytes | memoryview) -> bytes:
    """Eight bytes that change with the data."""
    from importlib.util import source_hash

    return source_hash(data)


def is_plain(name: str) -> bool:
    """Whether a name is a single path component that is neither hidden nor leads elsewhere."""
    return bool(name) and name[0] != "." and name.isprintable() and not set(name) & set('/\\:*?"<>|')


def bytecode_name(text: str, tag: str) -> str:
    """The bytecode beside a stored text, for the interpreter with that tag."""
    folder, _, name = text.rpartition("/")
    return f"{folder}/__pycache__/{name.removesuffix('.py')}.{tag}.veomni"


def read_manifest(root: Root, key: str) -> Manifest:
    """Read the manifest for a stage-1 key; raises Defect. Check the folder ``keys`` first."""
    import json

    name = f"{KEYS}/{key}"
    stored, _, body = root.read(name).partition(b"\n")
    if stored != seal(body).hex().encode():
        raise Defect(f"{root.full(name)} is truncated or was edited")
    head, _, report = body.partition(b"\n")
    try:
        fields = json.loads(head)
        inputs = {(kind, seen_of): seen for kind, seen_of, seen in fields["inputs"]}
        manifest = Manifest(fields, inputs, report[:-1], fields["absent"], consult=bool(fields["consult"]))
    except (ValueError, LookupError, TypeError) as error:
        raise Defect(f"{root.full(name)} is not a manifest of this cache") from error
    if manifest.key != key:
        raise Defect(f"{root.full(name)} was written for another key")
    return manifest


def pack_bytecode(code: CodeType, text_seal: str, tag: str) -> bytes:
    """The container of `code`, which was compiled from the text with that seal."""
    from importlib.util import MAGIC_NUMBER

    payload = marshal.dumps(code)
    header = _MAGIC + MAGIC_NUMBER + _padded(tag) + len(payload).to_bytes(_LENGTH_SIZE, "little")
    return header + bytes.fromhex(text_seal) + seal(payload) + payload


def check_bytecode(data: bytes, path: str, text_seal: str, tag: str) -> memoryview:
    """Check a container and return its marshal payload; `path` is for messages. Raises Defect."""
    if len(data) < _PAYLOAD_AT:
        raise Defect(f"{path} is truncated")
    if data[:_PYTHON_MAGIC_AT] != _MAGIC:
        raise Defect(f"{path} has a bad magic number: it is not bytecode of this cache")
    if data[_TAG_AT:_LENGTH_AT] != _padded(tag):
        other = data[_TAG_AT:_LENGTH_AT].rstrip(b"\0").decode("ascii", "replace")
        raise Defect(f"{path} was written for {other}, not for {tag}")
    payload = memoryview(data)[_PAYLOAD_AT:]
    length = int.from_bytes(data[_LENGTH_AT:_TEXT_SEAL_AT], "little")
    if len(payload) != length:
        raise Defect(f"{path} is truncated: {len(payload)} bytes of code, not {length}")
    if data[_TEXT_SEAL_AT:_PAYLOAD_SEAL_AT].hex() != text_seal:
        raise Defect(f"{path} was compiled from another text")
    if data[_PAYLOAD_SEAL_AT:_PAYLOAD_AT] != seal(payload):
        raise Defect(f"{path} was changed after it was written")
    return payload


def load(root: Root, manifest: Manifest) -> tuple[CodeType, bytes]:
    """Check a patched entry for this interpreter, and return its code and its text; raises Defect."""
    from importlib.util import MAGIC_NUMBER

    text = check_text(root, manifest)
    name = bytecode_name(manifest.text, manifest.tag)
    path = root.full(name)
    data = root.read(name)
    payload = check_bytecode(data, path, manifest.text_seal, manifest.tag)
    if data[_PYTHON_MAGIC_AT:_TAG_AT] != MAGIC_NUMBER:
        raise Defect(f"{path} was written by another build of this Python version")
    try:
        code = marshal.loads(payload)
    except (EOFError, ValueError, TypeError) as error:
        raise Defect(f"{path} cannot be read by marshal: {error}") from error
    if not isinstance(code, CodeType):
        raise Defect(f"{path} holds no code object but a {type(code).__name__}")
    if code.co_filename != root.full(manifest.text):
        raise Defect(f"{path} was compiled as {code.co_filename}: the cache was moved")
    return code, text


def check_text(root: Root, manifest: Manifest) -> bytes:
    """Return the stored text's bytes; checks every folder on the path and the bytecode's. Raises Defect."""
    root.check_folders(f"{manifest.text.rpartition('/')[0]}/__pycache__")
    text = root.read(manifest.text)
    if seal(text).hex() != manifest.text_seal:
        raise Defect(f"{root.full(manifest.text)} was changed after it was written")
    return text


def _padded(tag: str) -> bytes:
    return tag.encode("ascii", "replace")[:_TAG_SIZE].ljust(_TAG_SIZE, b"\0")
