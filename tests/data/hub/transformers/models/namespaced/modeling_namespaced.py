"""In a package without __init__."""


def which():
    return "upstream"
