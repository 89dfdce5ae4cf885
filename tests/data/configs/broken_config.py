"""Cannot be imported."""

raise RuntimeError("this config is broken")
