"""`veomni-hook cache`: what is stored."""
