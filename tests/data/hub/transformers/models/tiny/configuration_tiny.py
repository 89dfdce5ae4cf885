"""The configuration of the tiny model."""


class TinyConfig:
    tied = True
