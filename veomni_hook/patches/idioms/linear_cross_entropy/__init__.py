"""The loss of language models and sequence classifiers, with the head that it follows."""
