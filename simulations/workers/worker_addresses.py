"""Addresses of TFF workers on other machines, and the error for one that is lost.

Free of TensorFlow, so that flags can be checked before it is loaded.
"""

import ipaddress
import re

from mf_aggregators.kernel.errors import Error

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_EXAMPLE = "write host:port,host:port, as in 10.0.0.5:8000,[fd00::6]:8000"
LARGEST_PORT = 65535


class WorkerLostError(Error, ValueError):
    """A TFF worker does not answer; the message names it and says what to do."""


def parse(text: str) -> tuple[str, ...]:
    """Returns the addresses of a comma-separated list.

    Args:
      text: ``host:port`` with commas between; an IPv6 address stands in brackets.

    Returns:
      The addresses in the order of the list, host names in lower case and IPv6 addresses in
      their shortest form.

    Raises:
      ValueError: If the list is empty, an address is none, or one is there twice.
    """
    addresses: list[str] = []
    for part in text.split(","):
        address = _checked(part.strip())
        if address in addresses:
            raise ValueError(f"the worker {address} is listed twice: name each worker once.")
        addresses.append(address)
    return tuple(addresses)


def port_of(address: str) -> int:
    """Returns the port of an address from :func:`parse`."""
    return int(address.rpartition(":")[2])


def _checked(address: str) -> str:
    if not address:
        raise ValueError(f"a worker's address is empty: {_EXAMPLE}.")
    host, colon, port = address.rpartition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port):
        raise ValueError(f"the worker address {address!r} has no port: {_EXAMPLE}.")
    if not 1 <= int(port) <= LARGEST_PORT:
        raise ValueError(
            f"the worker address {address!r} has a port that is not between 1 and {LARGEST_PORT}."
        )
    return f"{_checked_host(host, address)}:{int(port)}"


def _checked_host(host: str, address: str) -> str:
    if host.startswith("[") and host.endswith("]"):
        try:
            return f"[{ipaddress.IPv6Address(host[1:-1])}]"
        except ValueError:
            raise ValueError(
                f"the worker address {address!r} has no IPv6 address in its brackets: {_EXAMPLE}."
            ) from None
    if ":" in host:
        raise ValueError(
            f"the worker address {address!r} is not host:port (an IPv6 address needs brackets, and "
            f"no scheme belongs before the host): {_EXAMPLE}."
        )
    host = host.lower()
    labels = host.removesuffix(".").split(".")
    if labels[-1].isdigit():
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise ValueError(
                f"the worker address {address!r} has no IPv4 address before its port: {_EXAMPLE}."
            ) from None
    if not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"the worker address {address!r} has no host name: {_EXAMPLE}.")
    return host
