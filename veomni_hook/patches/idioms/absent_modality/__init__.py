"""Towers of images, videos and sounds, where a forward calls them only if a batch has some."""
