"""The router of a mixture-of-experts layer: the experts of each token, and their weights.

Guards come after the projection, which stays upstream's. They ask with ``slot.kernel(router, router_logits)``
and call ``kernel(router_logits, ...)``, which returns ``(weights, indices)``, both ``[tokens, top_k]``.
Upstream also casts and scales the weights afterwards. `variants` declares the op.
"""
