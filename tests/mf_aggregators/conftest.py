"""What tests through TensorFlow Federated share."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def _simulated_secure_sums() -> Iterator[None]:
    """Lets TFF compute secure sums, in the open."""
    import tensorflow_federated as tff

    before = tff.framework.get_context_stack().current
    tff.backends.test.set_sync_test_cpp_execution_context()
    yield
    tff.framework.set_default_context(before)
