"""Names its module in a way that its text does not show."""

from veomni_hook import PatchConfig

family = "tiny"
config = PatchConfig(f"transformers.models.{family}.processing_{family}")
config.rewrite("TinyProcessor.__call__", pattern='"none"', replacement='"nothing"')
