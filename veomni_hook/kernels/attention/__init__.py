"""Attention that torch's fused attention cannot compute: with sinks, or with a softcap.

Called as ``kernel(query, key, value, attention_mask, module, scaling, dropout)``, with ``softcap`` last where
the variant has one: ``query [batch, heads, queries, head_dim]``, ``key`` and ``value`` with fewer heads, the
dense mask ``[batch, 1, queries, keys]`` of upstream's eager attention or None, and the attention module.
Returns ``[batch, queries, heads, head_dim]`` and None in the place of the weights. `variants` declares the
op.
"""
