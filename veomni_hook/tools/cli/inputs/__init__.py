"""What commands work on: families, source trees, releases and configs, and the options that name them."""
