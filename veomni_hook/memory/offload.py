"""What checkpointed layers keep, on the host between forward and backward.

Forward:  copies run on a stream of their own. A tensor stays on the device until its copy is done, and a
          layer waits for the copies of the layer two before it: two layers' tensors are in flight.
Backward: a layer's inputs begin to come back when the backward of the layer behind it reaches attention,
          which takes longest and by then needs less memory, and what its attention computed when its own
          backward begins; in layers without attention, all when that of the layer behind begins.
Both directions share one stream, so host memory that a copy reads is not written before the copy is done.
Copies change no bit. Mutates: nothing. Tensors below `LEAST` bytes, and those that are no plain dense
tensors, stay where they are.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import torch

from veomni_hook import accelerator
from veomni_hook.errors import OffloadError
from veomni_hook.kernels.shared.operand_checks import not_plain
from veomni_hook.memory.host import BLOCK, BLOCKS, NO_BLOCK

__all__ = ["LEAST", "Kept", "Layer", "Moved"]

#: Bytes of the smallest tensor that is moved: the copy of a smaller one takes no less time.
LEAST = 1 << 22
_streams: dict[torch.device, Any] = {}
#: The layer that was left last, for the next one: (a reference to it).
_last: list[weakref.ref[Layer]] = []


class Moved:
    """A tensor of a device, with its copy on the host."""

    def __init__(self, tensor: torch.Tensor, form: torch.Tensor, layer: Layer) -> None:
        self.form, self.device, self.event = form, tensor.device, None
        self.tensor: torch.Tensor | None = None
        size = tensor.numel() * tensor.element_size()
        # Copies from and to an accelerator need page-locked memory to run beside its work.
        blocks = BLOCKS.take(size, most=layer.most, pinned=tensor.device.type in accelerator.TYPES)
        weakref.finalize(self, BLOCKS.give_back, blocks)
        self.blocks = blocks
        self.layer = layer
        #: On the device: until the copy is done, and again when it comes back.
        self.tensor = tensor
        self.version = tensor._version
        self.changed = False
        self.event = _copied(tensor, blocks, back=False)

    def leave(self) -> None:
        """Let go of the tensor on the device once its copy is done."""
        if self.tensor is not None:
            _await(self.event, self.device)
            # Whoever writes into it does not wait for the copy.
            self.changed = self.tensor._version != self.version
            self.tensor = None

    def fetch(self) -> None:
        """Begin to copy the tensor to the device."""
        if self.tensor is None:
            self.tensor = torch.empty_like(self.form, device=self.device)
            self.event = _copied(self.tensor, self.blocks, back=True)
            self.version = self.tensor._version

    def get(self) -> torch.Tensor:
        """Return the tensor on the device, with the values that it had.

        Raises:
            OffloadError: it was written to before its copy was done, or a copy failed.
        """
        self.layer.come()
        self.fetch()  # again, if it came before
        tensor, self.tensor = self.tensor, None
        assert tensor is not None  # noqa: S101 - it was fetched
        if self.changed or tensor._version != self.version:
            raise OffloadError(
                f"a layer's input {list(tensor.shape)} was changed in place after the layer had read it",
                where="VEOMNI_MEMORY=offload",
                fix="do not write to hidden states between layers: x = x + y in place of x += y",
            )
        _await(self.event, self.device)
        return tensor

    def __del__(self) -> None:
        if self.tensor is not None and self.event is not None:
            self.event.synchronize()  # nobody asked for it


class Kept:
    """What one call of a checkpointed layer keeps, on the device.

    ``unpack(pack(x))`` is a new tensor with the values of ``x``.
    """

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what is kept of ``tensor``."""
        return tensor

    def unpack(self, packed: Any) -> Any:
        """Return a tensor with the values of the one of which ``packed`` is kept; what is no tensor, itself.

        A new one: autograd gives it a history, which would keep the layer that is recomputed alive.
        """
        return packed.detach() if isinstance(packed, torch.Tensor) else packed

    def attend(self) -> None:
        """Note that the layer has attention."""

    def attended(self) -> None:
        """Note that the backward of the layer has reached its attention."""


class Layer(Kept):
    """What one call of a layer keeps on the host; ``most``: the bound of host memory, see `Blocks.take`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.moved: list[weakref.ref[Moved]] = []
        self.came = False
        #: How many tensors were moved before attention; None without attention.
        self.inputs: int | None = None
        self.before = _last[0] if _last else None
        if (before := self._before()) is not None and (earlier := before._before()) is not None:
            earlier.leave()
        _last[:] = [weakref.ref(self)]

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | Moved:
        """Return ``tensor`` itself if it stays, or what brings it back."""
        if not_plain(tensor) is not None or tensor.numel() * tensor.element_size() < LEAST:
            return tensor
        form = torch.empty_like(tensor, device="meta")
        if form.stride() != tensor.stride():  # its elements do not fill a part of its storage
            return tensor
        moved = Moved(tensor.detach(), form, self)
        self.moved.append(weakref.ref(moved))
        return moved

    def unpack(self, packed: Any) -> Any:
        """Return a tensor with the values of the one that `pack` got; what is no tensor, itself."""
        return packed.get() if isinstance(packed, Moved) else super().unpack(packed)

    def leave(self) -> None:
        """Let go of the tensors on the device."""
        for moved in self._alive():
            moved.leave()

    def come(self) -> None:
        """Fetch what this layer keeps, once; what the layer before it keeps comes now, or with attention."""
        if self.came:
            return
        self.came = True
        for moved in self._alive():
            moved.fetch()
        if self.inputs is None:
            self.attended()
        elif (before := self._before()) is not None:
            before.leave()

    def attend(self) -> None:
        """Note that the layer has attention."""
        if self.inputs is None:
            self.inputs = len(self.moved)

    def attended(self) -> None:
        """Fetch the inputs of the layer before."""
        if (before := self._before()) is not None:
            for moved in before._alive(before.inputs):
                moved.fetch()

    def _before(self) -> Layer | None:
        return None if self.before is None else self.before()

    def _alive(self, number: int | None = None) -> list[Moved]:
        """Return those of the first ``number`` tensors, or of all, that are still needed."""
        return [moved for moved in (reference() for reference in self.moved[:number]) if moved is not None]


def _copied(tensor: torch.Tensor, blocks: list[torch.Tensor], *, back: bool) -> Any:
    """Copy a tensor into blocks, or ``back``; return the event behind the copies, None without a stream.

    Raises:
        OffloadError: a copy failed.
    """
    if blocks and blocks[0] is NO_BLOCK:
        return None
    # The bytes in the order in which they lie.
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    home = accelerator.module(tensor.device)
    try:
        with _beside(home, tensor.device):
            for place, block in enumerate(blocks):
                part = flat[place * BLOCK : (place + 1) * BLOCK]
                there = block[: part.numel()]
                source, target = (there, part) if back else (part, there)
                target.copy_(source, non_blocking=True)
            if home is None:
                return None
            event = home.Event()
            event.record(_streams[tensor.device])
            return event
    except RuntimeError as error:
        raise OffloadError(
            f"a copy of {flat.numel():,} bytes between {tensor.device} and the host failed",
            where="VEOMNI_MEMORY=offload",
            fix="the step is lost, its numbers are not used; see the error above, or leave offload out",
        ) from error


def _beside(home: Any, device: torch.device) -> Any:
    """Return the context of the stream for copies, which has waited for the work on ``device`` so far."""
    if home is None:
        return nullcontext()
    if device not in _streams:
        _streams[device] = home.Stream(device)
    stream = _streams[device]
    stream.wait_stream(home.current_stream(device))
    return home.stream(stream)


def _await(event: Any, device: torch.device) -> None:
    """Let the work on ``device`` wait for an event; the host does not wait."""
    if event is not None:
        accelerator.module(device).current_stream(device).wait_event(event)
