"""Built-in specs of modules that all models share: ``<name>.py`` covers ``transformers.<name>``."""
