import pytest

from tests.kernels.patched_qwen3 import load
from veomni_hook.kernels.selection.process_choice import set_choice


@pytest.fixture(autouse=True)
def chosen():
    set_choice("low_rank_linear=torch")


@pytest.fixture(scope="session")
def patched(tmp_path_factory):
    """PEFT's layers with the routed forward, under a name of their own."""
    return load(tmp_path_factory.mktemp("patched"), "peft.tuners.lora.layer", "peft")
