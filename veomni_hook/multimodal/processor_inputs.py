"""What a processor is given, as upstream's code expects it.

`veomni_hook.patches.fixes.omni_processor_inputs` inserts the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from veomni_hook.errors import InputError

__all__ = ["expected"]

_OTHER_NAME = "audios"


def expected(
    images: object, videos: object, audio: object, others: Mapping[str, object]
) -> dict[str, Any] | None:
    """Return the keyword arguments that a processor expects instead of those it was given.

    Args:
        images, videos, audio: what was given. An empty list or tuple means that there is none.
        others: the other keyword arguments, which are not changed. ``audios`` means ``audio``.

    Returns:
        All keyword arguments; None if those given are as expected.

    Raises:
        InputError: both ``audio`` and ``audios`` were given; it is a ValueError.
    """
    rest = dict(others)
    modalities = {"images": images, "videos": videos, "audio": audio}
    if _OTHER_NAME in rest:
        if audio is not None:
            raise InputError(
                f"the processor was given both audio= and {_OTHER_NAME}=",
                where="its call",
                fix="pass audio= alone",
            )
        modalities["audio"] = rest.pop(_OTHER_NAME)
    empty = {name for name, value in modalities.items() if isinstance(value, list | tuple) and not value}
    found = {name: None if name in empty else value for name, value in modalities.items()}
    unchanged = len(rest) == len(others) and all(found[name] is modalities[name] for name in modalities)
    return None if unchanged else {**found, **rest}
