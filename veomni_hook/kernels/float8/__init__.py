"""Linear layers whose products are computed in float8: the setting ``precision``.

`reference` is the definition in PyTorch; `triton` quantises on a GPU, with its code in `device`. `products`
has the two products of a layer, `linear` the layer with its gradients; `layers` says which layers of a model
these are, `setting` what is in force.
"""
