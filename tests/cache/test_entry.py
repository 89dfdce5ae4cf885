"""Names and the two formats on the disk, each check by itself."""

import marshal
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import pytest

from veomni_hook.cache import entry
from veomni_hook.cache.trusted_folder import Defect, Root

SEAL = entry.seal(b"text").hex()
TAG = "cpython-311"
CODE = compile("x = 1", "somewhere.py", "exec")


def test_layout_is_the_documented_one():
    named = _manifest(
        module="transformers.models.qwen3.modeling_qwen3",
        distribution="transformers",
        version="5.23.0",
        patch_hash="c0ffee",
    )
    assert named.text == "transformers-5.23.0/c0ffee/models/qwen3/modeling_qwen3.py"
    assert _manifest(module="single").text == "pkg-1/h/single.py"
    assert entry.bytecode_name("d-1/h/sub/mod.py", TAG) == "d-1/h/sub/__pycache__/mod.cpython-311.veomni"


def test_plain_names_lead_nowhere_else():
    assert [
        name
        for name in ("", ".", "..", ".hidden", "a/b", "a\\b", "c:", "a\0b", "a\nb")
        if entry.is_plain(name)
    ] == []
    assert all(map(entry.is_plain, ("5.23.0+cu121", "1!2.0", "torch_npu", "größe", "a-b")))


def test_bytecode_container_gives_back_the_code():
    data = entry.pack_bytecode(CODE, SEAL, TAG)
    assert marshal.loads(entry.check_bytecode(data, "p", SEAL, TAG)) == CODE


def test_every_byte_of_the_container_is_covered():
    data = entry.pack_bytecode(CODE, SEAL, TAG)
    python_magic = range(8, 8 + len(MAGIC_NUMBER))  # checked where the code is loaded
    for place in sorted(set(range(len(data))) - set(python_magic)):
        damaged = data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :]
        with pytest.raises(Defect):
            entry.check_bytecode(damaged, "p", SEAL, TAG)


def test_every_shortening_of_the_container_is_noticed():
    data = entry.pack_bytecode(CODE, SEAL, TAG)
    for size in range(len(data)):
        with pytest.raises(Defect, match="truncated"):
            entry.check_bytecode(data[:size], "p", SEAL, TAG)
    with pytest.raises(Defect, match="truncated"):
        entry.check_bytecode(data + b"\0", "p", SEAL, TAG)


def _manifest(**changes):
    fields = {"key": "k1", "module": "pkg.mod", "distribution": "pkg", "version": "1", "patch_hash": "h"}
    return entry.Manifest(
        {**fields, "tag": TAG, "text_seal": SEAL, **changes}, {("file", "/a"): "1"}, b'{"a": [1]}'
    )


@pytest.fixture
def opened(root):
    opened = Root.create(str(root))
    opened.make_folders(entry.KEYS)
    return opened


def test_manifest_gives_back_its_fields(opened):
    written = _manifest()
    opened.write("keys/k1", written.encode())
    found = entry.read_manifest(opened, "k1")
    for name in "key module distribution version patch_hash tag text_seal inputs report".split():
        assert getattr(found, name) == getattr(written, name), name
    assert (found.entry, found.text) == ("pkg-1/h", "pkg-1/h/mod.py")


def test_every_byte_of_the_manifest_is_covered(opened):
    data = _manifest().encode()
    for place in range(len(data)):
        opened_data = data[:place] + bytes([data[place] ^ 0x01]) + data[place + 1 :]
        (Path(opened.path) / "keys/k1").write_bytes(opened_data)
        with pytest.raises(Defect, match="truncated or was edited"):
            entry.read_manifest(opened, "k1")


@pytest.mark.parametrize(
    "body", [b"", b"null\n{}\n", b"[]\n{}\n", b'{"key": "k1"}\n{}\n', b"{\n{}\n", b"\xff\n"]
)
def test_sealed_nonsense_is_no_manifest(opened, body):
    opened.write("keys/k1", entry.seal(body).hex().encode() + b"\n" + body)
    with pytest.raises(Defect, match="is not a manifest of this cache"):
        entry.read_manifest(opened, "k1")


def test_manifest_of_another_key_is_refused(opened):
    opened.write("keys/k2", _manifest().encode())
    with pytest.raises(Defect, match="written for another key"):
        entry.read_manifest(opened, "k2")
