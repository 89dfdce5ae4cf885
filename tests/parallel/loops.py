"""Calls of `shard` and `gather` in the base models of a few families, until an idiom writes them."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap

from veomni_hook.parallel import sequence


def patch(module_name: str, class_name: str) -> None:
    module = sys.modules[module_name]
    cls = getattr(module, class_name)
    lines = textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward))).splitlines()
    out = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        if re.match(r"\s+for .*self\.layers", line):
            out.append(
                f"{indent}hidden_states, position_embeddings = veomni_sequence.shard(self, hidden_states, "
                "position_embeddings)"
            )
        out.append(line)
        if re.match(r"\s+hidden_states = self\.norm\(hidden_states\)", line):
            out.append(f"{indent}hidden_states = veomni_sequence.gather(self, hidden_states)")
    source = "\n".join(line for line in out if "@auto_docstring" not in line)
    module.__dict__["veomni_sequence"] = sequence
    scope: dict[str, object] = {}
    exec(
        compile("from __future__ import annotations\n" + source, f"<{class_name}>", "exec"),
        module.__dict__,
        scope,
    )
    cls.forward = scope["forward"]
