"""Patches two modules beside a modeling module, one by name and one by a pattern."""

from veomni_hook import PatchConfig

config = PatchConfig("transformers.models.tiny.processing_tiny")
config.rewrite("TinyProcessor.__call__", pattern='"none"', replacement='"nothing"')

named_by_pattern = PatchConfig("transformers.models.*.configuration_*")


@named_by_pattern.add_method("TinyConfig.kind")
def kind(self):
    return "patched"


configs = [named_by_pattern]
