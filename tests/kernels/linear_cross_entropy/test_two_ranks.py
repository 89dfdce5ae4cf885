from pathlib import Path

from tests.processes import two_ranks


def test_ddp_and_fsdp2_train_as_upstream_does(tmp_path):
    for output in two_ranks(Path(__file__).with_name("two_ranks.py"), tmp_path):
        assert output.count("DDP") >= 3 and output.count("FSDP2") >= 5 and output.count("bound") == 2
        assert output.count("a trained head") == output.count("a trained copy") == 2
