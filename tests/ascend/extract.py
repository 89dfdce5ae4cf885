"""The schemas of the operators that kernels call, as releases of torch_npu have them: `schemas.json`.

``python -m tests.ascend.extract`` fetches the wheels and writes it anew; tests read it and need no wheel.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tests.ascend.wheel import fetch, schemas

TABLE = Path(__file__).with_name("schemas.json")
#: One release of every minor version since the first that is supported, and the last post release of the oldest.
RELEASES = (
    *("2.7.1", "2.7.1.post11", "2.8.0", "2.8.0.post5", "2.9.0", "2.9.1", "2.10.0", "2.11.0", "2.12.0"),
    *("2.13.0", "2.14.0"),
)
#: The release whose operators the double has.
DOUBLED = "2.13.0"
OPERATORS = (
    "npu_add_rms_norm", "npu_cross_entropy_loss", "npu_cross_entropy_loss_backward", "npu_fusion_attention",
    "npu_fusion_attention_grad", "npu_grouped_matmul", "npu_moe_gating_top_k_softmax",
    "npu_moe_token_permute", "npu_moe_token_unpermute", "npu_rms_norm", "npu_rms_norm_backward",
    "npu_rotary_mul", "npu_swiglu", "npu_swiglu_backward",
)  # fmt: skip


def extract() -> str:
    """Return the table as text: of each operator its schemas, each with the releases that have it."""
    table: dict[str, dict[str, list[str]]] = {name: {} for name in OPERATORS}
    for release in RELEASES:
        known = schemas(fetch(release))
        for name in OPERATORS:
            if name in known:
                table[name].setdefault(known[name], []).append(release)
    return json.dumps(table, indent=1) + "\n"


@cache
def _table() -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def schema_of(operator: str, release: str = DOUBLED) -> str | None:
    """Return the schema that a release has for an operator, or None."""
    return next((text for text, releases in _table()[operator].items() if release in releases), None)


if __name__ == "__main__":
    TABLE.write_text(extract(), encoding="utf-8")
