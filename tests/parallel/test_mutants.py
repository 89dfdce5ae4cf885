"""A change of one line is found: by each kind of check, for each step of the exchange."""

import pytest

CLOSE = 1e-5
PADDED, UNREAD = "qwen3/sdpa/padded/15", "llama/sdpa/packed/15/unread"
CHECKPOINT = "llama/eager/padded/13/checkpoint="

SEQUENCES = {
    "positions of the neighbour": ("parallel.collectives:own_part", "start = group.rank * part", "start = (1 - group.rank) * part", PADDED),
    "no gradient comes back from heads": ("parallel.collectives:_AllToAll.backward", "_exchange(grad, ctx.group)", "grad", PADDED),
    "the gradient of a gather is halved": (
        "parallel.collectives:_Gather.backward", "_sum_of_parts(grad, ctx.group)", "_sum_of_parts(grad, ctx.group) / 2", PADDED,
    ),
    "the gradient of a sum stays in its process": ("parallel.collectives:_Sum.backward", "_sum(grad, ctx.group)", "grad", UNREAD),
    "a part's loss is divided by its own labels": (
        "kernels.linear_cross_entropy.shares:part_of", "counts = target != ", "counts = target[start:end] != ", UNREAD,
    ),
    "the row at the border counts twice": (
        "kernels.linear_cross_entropy.shares:part_of", "return rows[start:end], target[start:end]", "start = max(start - 1, 0)\n    return rows[start:end], target[start:end]", UNREAD,
    ),
    "attention sees copies at the end": (
        "parallel.attention:_attend", "(each[:, :, :full] for each in to_heads(query, key, value, group))", "to_heads(query, key, value, group)", "llama/eager/plain/15",
    ),
    "a checkpoint forgets that its pass was split": (
        "parallel.sharding:in_force", "sharding.in_layers or _in_backward()", "sharding.in_layers", CHECKPOINT,
    ),
}  # fmt: skip
EXPERTS = {
    "weights get no gradient": (
        "parallel.expert_dispatch:_Delivered.backward", "return collect(", "return 0 * collect(", "layer", {"routing": "random"},
    ),
    "ids of the first rank's experts": (
        "parallel.expert_dispatch:OncePerRank._local", "self.ep_mesh.get_local_rank() * local", "0 * local", "layer", {"routing": "random"},
    ),
    "a recompute dispatches anew": (
        "parallel.expert_records:Record.take", "if not self.replaying:", "if True:", "recompute", {"perturbed": "noise"},
    ),
    "weights of a recompute stand at other places": (
        "parallel.expert_dispatch:in_recorded_order", "return torch.where(same.any(2), ordered, 0.0)", "return weights", "recompute", {"perturbed": "order"},
    ),
    "the norm is that of one mesh": (
        "parallel.gradient_norm:clip_grad_norm_", "torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms]), norm_type)", "norms[0]", "norm", {},
    ),
}  # fmt: skip
TOWERS = {
    "images of a share see each other": (
        "parallel.towers:_between", "(copy >= start) & (copy <= end)", "(copy == start) | (copy == end)", "images",
    ),
    "rows have places of other images": ("parallel.towers:_part", "table[start:end]", "table[: end - start]", "images"),
    "cuts where only windows end": ("parallel.towers:_ends", "common & {*values}", "common | {*values}", "image"),
    "rows of the first process for all": ("parallel.collectives:gathered_rows", "rank * most", "0", "images"),
    "the gradient of rows is halved": (
        "parallel.collectives:_Gather.backward", "_sum_of_parts(grad, ctx.group)", "_sum_of_parts(grad, ctx.group) / 2", "images",
    ),
}  # fmt: skip


def found(pair):
    before, after = pair
    assert isinstance(before, float) and before < CLOSE
    # An error that says what is wrong is as good as a number.
    assert isinstance(after, str) or not after < 100 * CLOSE, after


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SEQUENCES)
def test_a_change_in_sequence_parallelism_is_found(ranks, name):
    *mutation, case = SEQUENCES[name]
    kernels = "torch" if case == UNREAD else "eager"
    given = {"case": case, "kernels": kernels}
    told = ranks.run("mutants:facts", 2, "sp=2", mutation=mutation, check="model", given=given)
    found(max(told, key=lambda pair: str(pair[1])))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", EXPERTS)
def test_a_change_in_expert_parallelism_is_found(ranks, tmp_path, name):
    *mutation, check, more = EXPERTS[name]
    size = 4 if check == "norm" else 2
    given = {"folder": str(tmp_path), **more}
    told = ranks.run("mutants:facts", size, mutation=mutation, check=check, given=given)
    found(max(told, key=lambda pair: str(pair[1])))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TOWERS)
def test_a_change_in_split_towers_is_found(ranks, name):
    *mutation, batch = TOWERS[name]
    told = ranks.run("mutants:facts", 2, "sp=2", mutation=mutation, check="tower", given={"batch": batch})
    found(max(told, key=lambda pair: str(pair[1])))
