from pathlib import Path

import pytest

pytest.importorskip("peft")

from tests.processes import two_ranks


@pytest.mark.slow
def test_lora_of_experts_under_fsdp2_trains_as_upstream_does(tmp_path):
    two_ranks(Path(__file__).with_name("two_ranks.py"), tmp_path)
