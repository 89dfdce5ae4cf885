"""One rank of `test_failure`: its experts fail, or it is killed, while the other rank waits for rows."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

import veomni_hook.install  # noqa: F401 - in front of transformers, as in a script


def main() -> None:
    dist.init_process_group("gloo")
    from tests.parallel.experts import layers

    experts = layers.own(layers.whole())
    dispatch = layers.DISPATCHERS["veomni"](experts, *layers.meshes())
    if dist.get_rank() == 1:

        def fail(*_: object) -> None:
            if sys.argv[1:] == ["killed"]:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("these experts fail")

        dispatch.experts_forward = fail
    dispatch(*layers.routed(8, 2, dist.get_rank()))
    torch.zeros(())


if __name__ == "__main__":
    main()
