"""Groups and collectives against one process, on 2 and 4 processes."""

import pytest

JOBS = pytest.mark.parametrize(("world", "sizes"), [(2, "sp=2"), (4, "sp=4"), (4, "sp=2")])


@pytest.fixture
def facts(ranks, world, sizes):
    return ranks.once("facts_of_collectives:facts", world, sizes, joined=False, sizes=sizes)


@pytest.mark.sample(1)
@JOBS
def test_outputs_and_gradients_are_those_of_one_process(facts, world, sizes):
    for rank in facts:
        numbers = {name: value for name, value in rank.items() if isinstance(value, float)}
        assert len(numbers) > 20
        assert {name: value for name, value in numbers.items() if not value <= 1e-6} == {}


@JOBS
def test_neighbours_share_sequences_and_data(facts, world, sizes):
    size = int(sizes[-1])
    for rank, told in enumerate(facts):
        first = rank // size * size
        assert told["group"] == [rank % size, size, list(range(first, first + size))]
        assert told["data"] == told["data before"] == [rank // size, world // size]


@JOBS
def test_heads_go_through_peer_memory_where_all_processes_share_it(facts, world, sizes):
    for rank, told in enumerate(facts):
        assert sum(name.endswith("through peers") for name in told) == 17
        assert told["sizes"] == sorted(told["sizes"]) and len(told["sizes"]) > 1  # halves that grow
        assert told["rounds"] > 32  # exchanges, of which some take several rounds
        half = told["sizes"][-1] // 2**21
        assert told["said"] == [
            f"exchanges inside the host go through peer memory, {2 * half} MiB of this GPU"
        ]
        assert told["said of the reason"] == [f"exchanges inside the host are collectives: {told['reason']}"]
        assert told["refused"] == [None, None] and told["asked"] == 1
        own = "torch cannot share memory between processes: no pidfd_getfd here"
        others = "another process of the group cannot share memory"
        assert told["reason"] == (others if rank % int(sizes[-1]) else own)
        assert told["LOCAL_WORLD_SIZE"] == "not all processes are known to be on one host"
        assert told["NCCL_P2P_DISABLE"] == "NCCL_P2P_DISABLE is set"
        assert told["one host"] is None


@JOBS
def test_errors_say_what_to_do(facts, world, sizes):
    told = facts[0]
    assert "torch.distributed is not initialised" in told["not initialised"]
    assert "torchrun" in told["not initialised"]
    for name in ("not divided", "data not divided"):
        assert f"sp=3 does not divide the {world} processes" in told[name]
        assert "choose sp from 1, 2" in told[name]
