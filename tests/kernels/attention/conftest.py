from tests.kernels.attention.windows_on_a_cpu import slot, windows_on_a_cpu  # noqa: F401 - fixtures
