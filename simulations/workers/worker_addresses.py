"""Parses addresses of remote TFF workers; has the error for a worker that is lost.

This module does not import TensorFlow, so that flags can be checked before TensorFlow is loaded.
"""

import ipaddress
import re

from mf_aggregators.kernel.numbers import Error

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_ADDRESS = re.compile(rf"(\[[0-9a-f:.]+\]|{_LABEL}(?:\.{_LABEL})*\.?):([0-9]{{1,5}})")
_EXAMPLE = "write host:port,host:port, as in 10.0.0.5:8000,[fd00::6]:8000"
LARGEST_PORT = 65535


class WorkerLostError(Error, ValueError):
    """Error for a TFF worker that does not answer; the message names the worker and a remedy."""


def parse(text: str) -> tuple[str, ...]:
    """Returns the addresses of a comma-separated list.

    Args:
      text: Addresses ``host:port`` separated by commas, with IPv6 addresses in brackets.

    Returns:
      The addresses in the order of the list, host names in lower case and IPv6 addresses in
      their shortest form.

    Raises:
      ValueError: If the list is empty, has an invalid address, or has an address twice.
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
    found = _ADDRESS.fullmatch(address.lower())
    host, port = (found[1], int(found[2])) if found else ("", 0)
    try:
        if host.startswith("["):
            host = f"[{ipaddress.IPv6Address(host[1:-1])}]"
        elif host.rpartition(".")[2].isdigit():
            host = str(ipaddress.IPv4Address(host))
    except ValueError:
        host = ""
    if not host or not 1 <= port <= LARGEST_PORT:
        raise ValueError(
            f"the worker address {address!r} is not host:port, with a port from 1 to "
            f"{LARGEST_PORT} and an IPv6 address in brackets: {_EXAMPLE}."
        )
    return f"{host}:{port}"
