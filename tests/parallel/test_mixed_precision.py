"""Mixed precision and frozen parts where processes share sequences, against one process that computes alike."""

import pytest


@pytest.mark.parametrize("kind", ["fsdp2", "autocast", "scaled"])
def test_two_processes_are_as_far_from_float32_as_one(ranks, kind):
    for told in ranks.run("mixed_cases:mixed", 2, "sp=2", kind=kind):
        one, two, broken = (told[name] for name in ("one", "two", "broken"))
        # What 16 bits cost is measured; sums in another order may cost a little more.
        bound = {name: 1.3 * far + 1e-4 for name, far in one.items()}
        assert {name: (far, one[name]) for name, far in two.items() if not far < bound[name]} == {}
        layers = [name for name in broken if "layers" in name]
        assert len(layers) > 10
        assert all(not broken[name] < 10 * bound[name] for name in layers)
        if kind == "fsdp2":  # two of bfloat16's numbers have an average of more bits
            assert [name for name in layers if not told["reduced"][name]] == []
        if kind == "scaled":  # the first steps were skipped, by both processes alike
            (scale, *_), _ = told["scales"]
            assert told["scales"] == [[scale] * 3, [scale] * 3]
            assert 1 < scale < 2**24


@pytest.mark.parametrize(
    "parts",
    [
        "embeddings",
        "all but the head",
        *(pytest.param(parts, marks=pytest.mark.slow) for parts in ("lower layer", "all but adapters")),
    ],
)
def test_gradients_of_what_is_not_frozen(ranks, parts):
    for told in ranks.run("mixed_cases:parts", 2, "sp=2", parts=parts):
        assert told["far"] < 1e-5
        assert told["broken"] > 0.1
        assert told["frozen"] > 0
