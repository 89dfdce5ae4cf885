"""Decays of linear attention, from a projection, a rate and a bias."""
