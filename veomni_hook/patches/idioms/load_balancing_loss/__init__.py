"""The load-balancing loss of a mixture of experts."""
