"""Trainer with an unchanged script: two processes that share sequences log what one process logs."""

from types import SimpleNamespace

import pytest
from accelerate.utils import ParallelismConfig
from torch import distributed, nn

from tests.parallel.facts_of_trainer import FEEDS
from veomni_hook.errors import ParallelError, VeomniHookWarning
from veomni_hook.parallel import data, groups, process
from veomni_hook.tools.report.parallel import notes_on


def alike(told, one, feed="whole"):
    # Of split batches, the loss of evaluation is a mean over other parts.
    for key in ("losses", "norms", *(["evaluated"] if "split" not in feed else [])):
        assert told[key] == pytest.approx(one[key], rel=1e-4)
    assert told["predictions"] == one["predictions"] == [6, 16, 48]
    assert told["tokens"] == one["tokens"] == 3 * 2 * 2 * 16


@pytest.mark.sample(2)
@pytest.mark.parametrize("feed", FEEDS)
def test_trainer_logs_what_one_process_logs(ranks, feed):
    (one,) = ranks.once("facts_of_trainer:logged", 1, feed="whole" if feed == "dispatched" else feed)
    told = ranks.run("facts_of_trainer:logged", 2, "sp=2", feed=feed)
    for facts in told:
        alike(facts, one, feed)
    reads = {"streamed": [True, False], "streamed, split": [True, False]}
    assert [facts["reads"] for facts in told] == reads.get(feed, ["each process" in feed] * 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("feed", "batch"), [("streamed", 1), ("streamed, split", 2)])
def test_two_groups_get_two_shares(ranks, feed, batch):
    (one,) = ranks.once("facts_of_trainer:logged", 1, feed="streamed")
    for facts in ranks.run("facts_of_trainer:logged", 4, "sp=2", feed=feed, batch=batch):
        alike(facts, one, feed)


def test_what_is_gathered_for_metrics_counts_once(ranks):
    (one,) = ranks.run("facts_of_trainer:gathered", 1)
    assert one == {"tensors": [*range(7)], "objects": [f"row {n}" for n in range(7)], "sums": [1, 5, 9, 6]}
    assert ranks.run("facts_of_trainer:gathered", 2, "sp=2") == [one] * 2
    for told in ranks.run("facts_of_trainer:gathered", 4, "sp=2"):
        assert told["tensors"] == one["tensors"] and told["objects"] == one["objects"]


def test_a_world_that_cannot_be_divided_stops_before_the_first_step(ranks):
    with pytest.raises(AssertionError, match="sp=3 does not divide the 2 processes"):
        ranks.run("facts_of_trainer:logged", 2, "sp=3")


@pytest.mark.parametrize(
    ("counts", "sizes"), [((4,), "1, 2, 4"), ((6, 4), "1, 2"), ((3, 4), "1"), ((24, 12, 8), "1, 2, 4")]
)
def test_errors_list_the_sizes_that_divide(counts, sizes):
    assert groups.choices(*counts) == f"choose sp from {sizes}"


@pytest.mark.parametrize("ask", [lambda: data.count(accelerator(0, 6)), lambda: groups.check_world(6)])
def test_a_share_of_the_data_that_does_not_exist(monkeypatch, ask):
    monkeypatch.setattr(process, "_told", process.Sizes(sp=4))
    with pytest.raises(ParallelError, match="sp=4 does not divide the 6 processes") as error:
        ask()
    assert "choose sp from 1, 2, 3, 6, or start another number of processes" in str(error.value)


def accelerator(rank, world, **axes):
    config, names = ParallelismConfig(**axes), [axis.removesuffix("_size") for axis in axes]
    mesh = SimpleNamespace(mesh_dim_names=names) if axes and "sp" not in names else None
    state = SimpleNamespace(device_mesh=mesh, parallelism_config=config if axes else None)
    return SimpleNamespace(num_processes=world, process_index=rank, state=state)


@pytest.mark.parametrize("axis", ["tp", "cp", "sp"])
def test_a_parallelism_config_of_the_script_wins(monkeypatch, axis):
    monkeypatch.setattr(process, "_told", None)
    monkeypatch.setattr(process, "_left_out", None)
    process.tell("sp=2,ep=4")
    own = accelerator(3, 4, dp_shard_size=2, **{f"{axis}_size": 2})
    with pytest.warns(
        VeomniHookWarning, match=f"sp=2,ep=4 is left out: the script gives .* own, with {axis}. To"
    ):
        assert data.mesh(own, own.state) is own.state
    process.tell("sp=2")  # a module that is imported later
    assert (process.sizes().sp, process.sizes().ep, data.index(own)) == (1, 1, 3)
    assert notes_on(nn.Linear(2, 2)) == (process.left_out(),)


@pytest.mark.parametrize("axes", [{"dp_shard_size": 4}, {"dp_replicate_size": 2, "dp_shard_size": 2}])
def test_data_parallelism_of_the_script_stays_beside_sp(monkeypatch, axes):
    monkeypatch.setattr(process, "_told", process.Sizes(sp=2))
    assert [(data.index(accelerator(r, 4, **axes)), data.count(accelerator(r, 4, **axes))) for r in range(4)] == [
        (0, 2), (0, 2), (1, 2), (1, 2),
    ]  # fmt: skip
    own = accelerator(1, 4, **axes)
    assert data.mesh(own, own.state.device_mesh) is None
    meshes = []
    evaluating = SimpleNamespace(prepare=lambda loader: meshes.append(data.mesh(own, "own")) or loader)
    data.prepared(evaluating, accelerator, False)
    assert meshes == ["own"]


def test_hosts_that_gloo_cannot_connect(monkeypatch):
    def refused(ranks, **options):
        assert (ranks, options["backend"]) == ([0, 1], "gloo")
        raise RuntimeError("no route")

    group = SimpleNamespace(group_name="own", _get_backend=lambda _: None)
    mesh = SimpleNamespace(get_group=lambda _: group)
    monkeypatch.setattr(process, "_told", process.Sizes(sp=2))
    monkeypatch.setattr(groups, "device", lambda: "cuda")
    monkeypatch.setattr(groups, "init_device_mesh", lambda *_, **__: mesh)
    for name, answer in (("is_initialized", True), ("get_world_size", 4), ("get_rank", 1)):
        monkeypatch.setattr(distributed, name, lambda answer=answer: answer)
    monkeypatch.setattr(groups, "_BESIDE", {})
    monkeypatch.setattr(distributed, "get_process_group_ranks", lambda _: [0, 1])
    monkeypatch.setattr(distributed, "new_group", refused)
    with pytest.raises(ParallelError, match=r"(?s)gloo cannot connect .*no route.*GLOO_SOCKET_IFNAME"):
        groups.sequence_group()


def test_shares(monkeypatch):
    monkeypatch.setattr(process, "_told", None)
    process.tell("sp=2")
    assert [(data.index(accelerator(r, 4)), data.count(accelerator(r, 4))) for r in range(4)] == [
        (0, 2), (0, 2), (1, 2), (1, 2),
    ]  # fmt: skip
    counts = []
    preparing = SimpleNamespace(prepare=lambda loader: counts.append(data.count(accelerator(1, 4))) or loader)
    data.prepared(preparing, test_shares, False)
    data.prepared(preparing, accelerator, True)
    assert counts == [4, 2]
    assert data.once([1], test_shares) == data.of_first([1], test_shares) == [1]
