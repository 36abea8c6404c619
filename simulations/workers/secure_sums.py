"""TFF's simulation of secure sums, whose results are those of a secure protocol."""

import tensorflow_federated as tff


def simulate() -> None:
    """Lets TFF run computations with secure sums on this machine, from now on.

    Its usual context refuses them. What runs here is no protection: it shows what a server with
    a secure protocol would compute.
    """
    tff.backends.test.set_sync_test_cpp_execution_context()
