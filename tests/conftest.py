"""What all tests share: no process outlives them."""

import sys


def pytest_sessionfinish() -> None:
    """Ends TFF's workers while Python is still whole."""
    if "tensorflow_federated" in sys.modules:
        from simulations import quiet

        quiet.end_workers()
