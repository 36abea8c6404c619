"""What tests of commands share."""

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The flag of a cache that plans of all tests fill."""
    return f"--cache_dir={tmp_path_factory.mktemp('cache')}"
