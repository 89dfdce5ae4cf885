import pytest

from veomni_hook.kernels.selection.process_choice import set_choice


@pytest.fixture(autouse=True)
def chosen():
    set_choice("low_rank_linear=torch")


@pytest.fixture(scope="session")
def patched(tmp_path_factory):
    """PEFT's layers with the routed forward, under a name of their own."""
    from tests.kernels.low_rank_linear.adapted import load

    return load(tmp_path_factory.mktemp("patched"))
