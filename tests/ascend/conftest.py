from tests.ascend.fixtures import called, on_ascend, operators  # noqa: F401 - fixtures
