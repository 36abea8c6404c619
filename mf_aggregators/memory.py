"""How much memory is available, and checks before a lot of it is allocated.

Memory counts only once it is used. So without these checks, what is too large for the machine ends
in the kernel's killing this process or another one.
"""

import contextlib
import math
import pathlib
import re
from collections.abc import Iterator

from mf_aggregators.kernel.numbers import Error

try:
    import resource
except ImportError:  # Not on Windows.
    resource = None  # type: ignore[assignment]

_MEMINFO = pathlib.Path("/proc/meminfo")
_STATUS = pathlib.Path("/proc/self/status")
_CONTROL_GROUP = pathlib.Path("/sys/fs/cgroup")
_KILOBYTE = 1024
# Smaller amounts are not checked.
_ALWAYS_THERE = 1 << 26


class _InsufficientMemoryError(Error, MemoryError):
    """More memory is needed than there is; the message says how much."""


def _available_bytes() -> float:
    """Returns how much memory this process can still use; infinity where that is unknown.

    It is the lesser of the memory that the machine has available, and of what is left to the
    control group of a container.
    """
    machine = _bytes_by_name(_MEMINFO)
    free = machine.get("MemAvailable", math.inf) + machine.get("SwapFree", 0.0)
    try:
        most = (_CONTROL_GROUP / "memory.max").read_text()
        used = (_CONTROL_GROUP / "memory.current").read_text()
        statistics = (_CONTROL_GROUP / "memory.stat").read_text()
        # Files that are kept in memory can be dropped.
        reclaimable = dict(line.split() for line in statistics.splitlines()).get("inactive_file", 0)
        return max(0.0, min(free, float(most) - float(used) + float(reclaimable)))
    except (OSError, ValueError):
        # No such group, or its limit is the word max.
        return free


def check(needed_bytes: float, what: str, advice: str) -> None:
    """Checks that there is memory for something, before any of it is allocated.

    Args:
      needed_bytes: A lower estimate of what it needs, any number from 0.
      what: What needs it, for the message: the beginning of a sentence.
      advice: What to do if there is too little: a half-sentence in the imperative.

    Raises:
      MemoryError: If less is available.
    """
    if needed_bytes <= _ALWAYS_THERE:
        return
    available = _available_bytes()
    if needed_bytes > available:
        raise _InsufficientMemoryError(
            f"{what} needs {_readable(needed_bytes)} of memory at least, and "
            f"{_readable(available)} are available: {advice}."
        )


def check_rounds(num_rounds: int, bytes_per_round: float, what: str) -> None:
    """Checks that there is memory for an object that grows with the rounds.

    Args:
      num_rounds: The rounds n, at least 1.
      bytes_per_round: A lower estimate; n times as much where n x n matrices are made.
      what: What needs it, such as ``the tree``.

    Raises:
      MemoryError: If there is too little.
    """
    check(num_rounds * bytes_per_round, f"{what} for {num_rounds} rounds", "use fewer rounds")


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """A context in which allocating more than is available raises MemoryError.

    Without it, the kernel grants such memory and kills a process when it is used. Programs that are
    started in it inherit the limit.
    """
    available = _available_bytes()
    if resource is None or not math.isfinite(available):
        yield
        return
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(_bytes_by_name(_STATUS).get("VmData", 0.0) + available)
    limit = min([limit, *(each for each in (before, most) if each != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def _bytes_by_name(path: pathlib.Path) -> dict[str, float]:
    """The numbers of the lines "Name: number kB" of a file of /proc, in bytes."""
    found = {}
    with contextlib.suppress(OSError):
        for name, value in re.findall(r"^(\w+):\s*(\d+) kB$", path.read_text(), re.MULTILINE):
            found[name] = float(value) * _KILOBYTE
    return found


def _readable(number: float) -> str:
    # Integers of any size may be asked for.
    return f"{min(number, 10**300) / 1e9:.3g} GB"
