"""The idiom of the attention mask under ``torch.compile``."""
