"""`veomni-hook demo`: small models without and with the hook."""
