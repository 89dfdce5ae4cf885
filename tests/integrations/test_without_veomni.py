"""`register` where VeOmni is not installed, or is installed without what it needs."""

import sys

import pytest

from veomni_hook.errors import KernelError
from veomni_hook.integrations.veomni import register
from veomni_hook.integrations.veomni.backend import BACKENDS, kernel_of
from veomni_hook.integrations.veomni.registration import _OFFERS


@pytest.fixture
def no_veomni(monkeypatch):
    loaded = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "veomni"}
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "veomni"]:
        del sys.modules[name]
    sys.modules.update(loaded)


def put(folder, files, monkeypatch):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder)


def test_every_offer_has_a_kernel_of_every_backend():
    for offer in _OFFERS:
        assert [kernel_of(*offer.ours, backend).backend for backend in BACKENDS] == [*BACKENDS]
    with pytest.raises(KernelError, match="rms_norm/unweighted has no 'cuda' kernel"):
        kernel_of("rms_norm", "unweighted", "cuda")


def test_an_unknown_backend_is_an_error_that_lists_the_others():
    with pytest.raises(KernelError, match=r"no backend 'cuda'[\s\S]*backends: torch, triton, npu"):
        register("torch", "cuda")


def test_a_missing_veomni_is_named(no_veomni, monkeypatch):
    monkeypatch.setitem(sys.modules, "veomni", None)
    with pytest.raises(KernelError, match=r"the package veomni is not installed[\s\S]*pip install"):
        register()


def test_a_package_that_veomni_needs_is_named(no_veomni, tmp_path, monkeypatch):
    put(
        tmp_path, {"veomni/__init__.py": "", "veomni/ops/__init__.py": "import not_there_at_all"}, monkeypatch
    )
    with pytest.raises(KernelError, match="it needs the package not_there_at_all, which is not installed"):
        register()


def test_a_veomni_for_other_releases_is_an_error(no_veomni, tmp_path, monkeypatch):
    files = {"veomni/__init__.py": "", "veomni/ops/__init__.py": "from transformers import NotThereAtAll"}
    put(tmp_path, files, monkeypatch)
    with pytest.raises(
        KernelError, match=r"cannot be imported: [\s\S]*NotThereAtAll[\s\S]*releases of torch"
    ):
        register()


def test_a_veomni_without_a_registry_is_an_error(no_veomni, tmp_path, monkeypatch):
    put(tmp_path, {"veomni/__init__.py": "", "veomni/ops/__init__.py": ""}, monkeypatch)
    with pytest.raises(KernelError, match=r"there is no module veomni\.ops\.kernel_registry"):
        register()
