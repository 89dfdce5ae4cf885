"""Layers whose products are computed in float8: the setting ``precision``.

`reference` is the definition in PyTorch; `triton` quantises on a GPU, with its code in `device`. `products`
has the products of a linear layer, `linear` the layer with its gradients; `layers` says which layers and
experts of a model these are, `setting` what is in force. Products of experts are in
`veomni_hook.kernels.moe_experts`.
"""
