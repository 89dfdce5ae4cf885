"""The config of a model whose code travels with its weights."""

from transformers import PretrainedConfig


class PebbleConfig(PretrainedConfig):
    model_type = "pebble"

    def __init__(self, hidden_size=16, vocab_size=32, **kwargs):
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        super().__init__(**kwargs)
