"""Positions and boundaries that follow from the sizes of images, videos and sounds."""
