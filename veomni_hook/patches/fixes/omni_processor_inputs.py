"""Let processors of two families take empty lists as None, and ``audios=`` as ``audio=``.

The processors of Qwen2.5-Omni and Qwen3-Omni-MoE decide by ``is not None`` whether there are images, videos
and audio, so an empty list, which a collator of mixed samples passes, is processed and fails. Their keyword
is ``audio``, while other processors and older code use ``audios``. If a call has either, the method is called
again with what it expects.
"""

# The guard is text for another module, whose names it uses.
# ruff: noqa: F821
# mypy: disable-error-code="name-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="transformers.models.qwen*_omni*.processing_*",
    description="empty lists are None, and audios= is audio=",
)

# Of both families, oldest first: 5.2, then 5.17 and 5.23; of the second also 5.14 and 5.24.
_BODIES = [
    *("94f6adb0c0d2f27b", "c258d2f522d2667a", "0dba9f3685fff9d6"),
    *("69f9c08a91ba872d", "d001f159e077ca84", "e6825c63dc69281e", "ae0f3898341ba451", "e55f429ff452698b"),
]

config.add_import("veomni_hook.multimodal.processor_inputs", ["expected as veomni_expected"])


@config.insert_guard(
    "*Processor.__call__", fingerprints=_BODIES, description="empty lists are None, and audios= is audio="
)
def guard(self, text, images, videos, audio, kwargs):
    if (veomni_inputs := veomni_expected(images, videos, audio, kwargs)) is not None:
        return __class__.__call__(self, text, **veomni_inputs)
