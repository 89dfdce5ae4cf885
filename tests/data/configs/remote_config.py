"""Patches by pattern what a remote repository brings; the numbers stay what they are."""

from veomni_hook import PatchConfig

config = PatchConfig("transformers_modules.*_pebble")
config.rewrite(
    "*RMSNorm.forward",
    pattern="torch.rsqrt({mean})",
    replacement="torch.rsqrt({mean} * 1.0)",
    description="times one",
)
