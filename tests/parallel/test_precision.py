"""What differs in float32 from one process is rounding: in float64 nothing does."""

import pytest

from tests.parallel.test_linear_attention import DIVIDED


@pytest.mark.parametrize(
    ("family", "batch", "length"),
    [
        pytest.param("qwen3_next", "plain", 128, marks=DIVIDED),
        pytest.param("qwen3_next", "padded", 63, marks=(DIVIDED, pytest.mark.slow)),
        pytest.param("llama", "packed", 63, marks=pytest.mark.slow),
    ],
)
def test_gradients_differ_by_rounding(ranks, family, batch, length):
    told = ranks.run("facts_of_precision:facts", 2, "sp=2", family=family, batch=batch, length=length)[0]
    assert told["dtypes"] == ["torch.float64"]
    assert {name: far for name, far in told["tensors"].items() if not far["float64"] < 1e-11} == {}
    # In float32, decays whose states are soon forgotten have gradients of small norm, which one process has with
    # errors of 1e-4 and more. Those of several processes are no larger, up to the rounding of other sums.
    bounds = {name: 2 * far["whole"] + 1e-6 for name, far in told["tensors"].items()}
    assert {name: far for name, far in told["tensors"].items() if not far["split"] < bounds[name]} == {}
