"""Half of a circular pair."""

import transformers.models.pair_b.modeling_pair_b as partner


def which():
    return "upstream a"


def both():
    return which(), partner.which()
