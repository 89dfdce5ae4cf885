"""Host memory for tensors of a device: blocks of one size, page-locked where a device copies by itself.

Blocks are kept for the next step. A tensor takes as many as it needs, so nothing is lost to shapes that
change, and what is held is known: blocks in use and blocks that wait.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import Lock

import torch

from veomni_hook.errors import OffloadError
from veomni_hook.kernels.shared.changed import changed

__all__ = ["BLOCK", "BLOCKS", "NO_BLOCK", "Blocks", "free_bytes"]

#: Bytes of a block, a power of two: torch rounds page-locked memory up to one.
BLOCK = 1 << 24
#: The share of the free memory that is taken where no bound is given: the processes of a machine divide it.
_SHARE = 0.8


#: In place of a block that is only counted.
NO_BLOCK = torch.empty(0, dtype=torch.uint8)


@dataclass(eq=False)
class Blocks:
    """Blocks of host memory.

    Attributes:
        held: the number of blocks that exist.
        aside: whether no block has memory.
    """

    held: int = 0
    aside: bool = False
    _free: list[torch.Tensor] = field(default_factory=list)
    _most: int | None = None
    # A graph may be freed in any thread.
    _lock: Lock = field(default_factory=Lock)

    def take(self, size: int, *, most: int, pinned: bool) -> list[torch.Tensor]:
        """Return blocks for ``size`` bytes, ``most`` bytes being the bound of all that exist; 0: a share.

        Raises:
            OffloadError: they would exceed the bound, or the system has no more memory.
        """
        number = -(-size // BLOCK)
        with self._lock:
            blocks = [self._free.pop() for _ in range(min(number, len(self._free)))]
            try:
                while len(blocks) < number:
                    blocks.append(self._new(most, pinned=pinned))
            except BaseException:
                self._free += blocks
                raise
        return blocks

    def give_back(self, blocks: Sequence[torch.Tensor]) -> None:
        """Let others take these blocks; on a device's stream, copies from them come first."""
        with self._lock:
            for block in blocks:
                is_real = type(block) is torch.Tensor and block is not NO_BLOCK
                if is_real is not self.aside:
                    self._free.append(block)

    def set_aside(self) -> AbstractContextManager[None]:
        """Let the block's code begin without blocks, and forget those that it took: none has memory.

        Those of page-locked memory are only counted. Others are fakes: they are memory of the same device.
        """
        return changed(vars(self), {"held": 0, "_free": [], "_most": None, "aside": True})

    def release(self) -> None:
        """Give the blocks that nobody uses back to the system."""
        with self._lock:
            self.held -= len(self._free)
            self._free.clear()
            self._most = None
        if torch.cuda.is_available() and (empty := getattr(torch._C, "_host_emptyCache", None)) is not None:
            empty()

    def _new(self, most: int, *, pinned: bool) -> torch.Tensor:
        if not most:
            if self._most is None:
                processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))  # that share the machine
                self._most = int(_SHARE * free_bytes()) // processes
            most = self._most
        if (self.held + 1) * BLOCK > most:
            what = f"what checkpointed layers keep needs more than {most / 2**30:.1f} GiB of host memory"
            raise _no_room(what)
        if self.aside and pinned:
            self.held += 1
            return NO_BLOCK
        try:
            block = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=pinned)
        except (RuntimeError, MemoryError) as error:
            raise _no_room(
                f"the host gives no more memory beyond {self.held * BLOCK / 2**30:.1f} GiB"
            ) from error
        self.held += 1
        return block


#: All blocks of this process.
BLOCKS = Blocks()


def _no_room(what: str) -> OffloadError:
    return OffloadError(
        what,
        where="VEOMNI_MEMORY=offload",
        fix="set offload=…GiB to what the host can spare, use shorter sequences, or leave offload out",
    )


def free_bytes() -> int:
    """Return the bytes of memory that this machine, or the control group of this process, has free."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    known = _read("/proc/meminfo", "MemAvailable:")
    free = free if known is None else 1024 * known
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    return free if limit is None or used is None else max(0, min(free, limit - used))


def _read(path: str, word: str = "") -> int | None:
    """Return the number in a file of the system, behind a word; None if there is none."""
    try:
        with open(path, encoding="ascii") as file:
            for line in file:
                if line.startswith(word):
                    number = line.removeprefix(word).split()[0]
                    return int(number) if number.isdigit() else None
    except OSError:
        pass
    return None
