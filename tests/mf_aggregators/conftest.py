"""What tests through TensorFlow Federated share."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_worker_outlives_the_tests() -> Iterator[None]:
    """Ends the workers of a module's tests, which keep gigabytes."""
    yield
    if "tensorflow_federated" in sys.modules:
        from mf_aggregators.tff import processes

        processes.end_workers()


@pytest.fixture
def _simulated_secure_sums() -> Iterator[None]:
    """Lets TFF compute secure sums, in the open."""
    import tensorflow_federated as tff

    before = tff.framework.get_context_stack().current
    tff.backends.test.set_sync_test_cpp_execution_context()
    yield
    tff.framework.set_default_context(before)
