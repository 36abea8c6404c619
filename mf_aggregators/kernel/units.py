"""Units of protection other than one client: a client in a window, a device, a person.

Client ids may change every W rounds. A client is then in one window alone, of rounds 0 to W - 1,
W to 2 W - 1, and so on, and keeps to its schema there. A device is a client in each of several
windows. A person has several clients or devices. All contributions of a unit are zeroed together.

**Theorem.** Let s_v be at least the sensitivity of the columns of window v, and p_vw = p_wv at
least the largest sum of |X[i, j]| over a pattern of window v and one of window w, X = C^T C, with
p_vv = s_v^2. A device that is in the windows of a set T has at most the root of the sum of p_vw
over T x T. Since |<C x_v, C x_w>| <= s_v s_w, p_vw is never taken above s_v s_w. m units together
have at most m times the sensitivity of one, and exactly that if the one is reached: all of them
contribute the same. Contributions of different windows share rows of C x, so that the squares of
s_v alone do not add up to a bound.
"""

import dataclasses
from typing import final

import numpy as np

from mf_aggregators.kernel import numbers, sensitivity, strategies
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.rows import NoiseRecursion
from mf_aggregators.kernel.schemas import Schema, largest_sums
from mf_aggregators.kernel.sensitivity import Sensitivity

# C and C^T C of more rounds take more than a quarter of a gigabyte.
_MOST_ROUNDS = 4096


@final
@dataclasses.dataclass(frozen=True)
class Unit:
    """Clients whose contributions are zeroed together, each of which keeps to a schema.

    Attributes:
      most: As in ``Schema``, of one client; within its window if there are windows.
      separation: As in ``Schema``, likewise.
      is_even: As in ``Schema``, likewise.
      num_clients: The most clients of one person; with windows, the most devices.
      window: The rounds W after which client ids change; None if they stay.
      num_windows: In how many windows one device is: 1 for a client in a window, None for all. A
        device's participations in different windows may be next to each other.

    Raises:
      TypeError: As ``Schema`` does.
      ValueError: If a number is below 1.
    """

    most: int | None
    separation: int
    is_even: bool = False
    num_clients: int = 1
    window: int | None = None
    num_windows: int | None = None

    def __post_init__(self) -> None:
        assert self.schema
        for name in ("num_clients", "window", "num_windows"):
            if getattr(self, name) is not None or name == "num_clients":
                numbers.set_positive_integers(self, name)

    @property
    def schema(self) -> Schema:
        """The schema of one client."""
        return Schema(self.most, self.separation, self.is_even)

    @property
    def who(self) -> str:
        """Who is protected, as in ``each person with at most 2 clients``."""
        single = self.num_windows == 1
        changing = f"whose client id changes every {self.window} rounds"
        if self.window is None:
            one, several = "each client", "clients"
        elif single:
            one = f"each client in a window of {self.window} rounds"
            several = f"clients in a window of {self.window} rounds"
        else:
            windows = "" if self.num_windows is None else f", in {self.num_windows} windows"
            one, several = (f"{each}, {changing}{windows}" for each in ("each device", "devices"))
        return one if self.num_clients == 1 else f"each person with {self.num_clients} {several}"

    def __str__(self) -> str:
        within = "" if self.window is None else " in a window"
        return f"{self.schema} of one client{within}"


def of_unit(rows: NoiseRecursion, num_rounds: int, unit: Unit) -> Sensitivity:
    """Bounds the sensitivity of the first rounds for a unit.

    Args:
      rows: As in ``sensitivity.of_rows``.
      num_rounds: As there.
      unit: The unit.

    Returns:
      The sensitivity of the computed C, exact or an upper bound, and its ``error``.

    Raises:
      NotProved: As ``sensitivity.of_rows`` does.
    """
    num_rounds = numbers.positive_integer(num_rounds, "num_rounds")
    if unit.window is None or unit.window >= num_rounds:
        one = sensitivity.of_rows(rows, num_rounds, unit.schema)
    else:
        one = _of_windows(rows, num_rounds, unit, unit.window)
    return Sensitivity(
        one.value * unit.num_clients,
        is_exact=one.is_exact,
        theorem=one.theorem,
        error=one.error * unit.num_clients,
    )


def _of_windows(rows: NoiseRecursion, num_rounds: int, unit: Unit, length: int) -> Sensitivity:
    """The sensitivity of a client in a window, or of a device in several windows."""
    schema, num_windows = unit.schema, -(-num_rounds // length)
    chosen = min(unit.num_windows or num_windows, num_windows)
    most = chosen * schema.most_in(length)
    # A schema of all rounds that allows every pattern of the windows.
    wider = Schema(most, schema.separation, schema.is_even) if chosen == 1 else Schema(most, 1)
    bound = sensitivity.of_rows(rows, num_rounds, wider)
    bound = Sensitivity(
        bound.value,
        is_exact=bound.is_exact and most == 1,
        theorem=bound.theorem,
        error=bound.error,
    )
    if num_rounds > _MOST_ROUNDS or most == 1:
        return bound
    found = strategies.strategy(rows, num_rounds)
    columns = strategies.columns(found, tuple(range(num_rounds)))
    starts = range(0, num_rounds, length)
    own = [sensitivity.of_matrix(columns[:, i : i + length], schema) for i in starts]
    largest, pairs = np.array(own), np.diag(np.square(own))
    if chosen > 1:
        pairs = np.minimum(_pairs(columns, schema, length), np.outer(largest, largest))
        np.fill_diagonal(pairs, np.square(largest))
    # The sum of each window with the largest sums of the other chosen windows.
    others = np.sort(pairs - np.diag(np.diagonal(pairs)), axis=1)[:, num_windows - chosen + 1 :]
    sums = np.sort(np.diagonal(pairs) + np.sum(others, axis=1))[num_windows - chosen :]
    value = float(np.sqrt(np.sum(sums)))
    is_exact = all(each.is_exact for each in own) and not np.any(others)
    roundings = value * sensitivity.roundings(columns, num_rounds, most)
    theorem = f"windows of {length} rounds: {own[int(np.argmax(largest))].theorem}"
    error = most * found.error + roundings
    by_windows = Sensitivity(value, is_exact=is_exact, theorem=theorem, error=error)
    is_better = by_windows.value + by_windows.error <= bound.value + bound.error
    return by_windows if is_exact or is_better else bound


def _pairs(columns: FloatArray, schema: Schema, length: int) -> FloatArray:
    """For two windows each, the largest sum of |X| over a pattern of one and one of the other."""
    num_windows = -(-columns.shape[1] // length)
    size = num_windows * length
    magnitudes = np.zeros((size, size))
    magnitudes[: columns.shape[1], : columns.shape[1]] = np.abs(columns.T @ columns)
    of_rows = np.stack(
        [_largest(each, schema) for each in magnitudes.reshape(num_windows, length, size)]
    )
    found = np.stack([_largest(each.T, schema) for each in np.split(of_rows, num_windows, axis=1)])
    return np.minimum(found, found.T)


def _largest(weights: FloatArray, schema: Schema) -> FloatArray:
    """For each column of (W, m) weights, its largest sum over a pattern of W rounds."""
    length = len(weights)
    separation, most = schema.separation_in(length), schema.most_in(length)
    levels = None if most == -(-length // separation) else most
    return np.asarray(largest_sums(weights, separation, levels)[-1])
