"""What models call."""


def double(x):
    return 2 * x
