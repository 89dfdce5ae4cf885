"""Half of a circular pair."""

import transformers.models.pair_a.modeling_pair_a as partner


def which():
    return "upstream b"


def both():
    return which(), partner.which()
