"""Participation schemas as numbers: in which sets of rounds one client may take part.

A separation of b means that any two participations i, j of one client satisfy ``|i - j| >= b``
(BandMF, Def. 1), so that b = 1 allows every round. A pattern is the set of rounds of one client.
"""

import dataclasses
import math
from typing import final

import numpy as np

from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray


@dataclasses.dataclass(frozen=True)
class Schema:
    """A participation schema. ``Schema(1, 1)`` is single participation.

    Attributes:
      most: The most participations k of one client; None for as many as fit.
      separation: The least distance b of two participations of one client, in rounds.
      is_even: Whether adjacent participations are exactly b rounds apart, (k, b)-participation.

    Raises:
      TypeError: If ``separation`` or ``most`` is no int, or ``is_even`` is no bool.
      ValueError: If a number is below 1.
    """

    most: int | None
    separation: int
    is_even: bool = False

    def __init_subclass__(cls) -> None:
        raise TypeError("Schema takes no subclasses: guarantees are proved for Schema itself.")

    def __post_init__(self) -> None:
        values = {"separation": self.separation, "most": 1 if self.most is None else self.most}
        for name, value in values.items():
            if type(value) is not int:
                raise TypeError(f"{name} must be an int, found {numbers.shown(value)}.")
            numbers.positive_integer(value, name)
        if type(self.is_even) is not bool:
            raise TypeError(f"is_even must be a bool, found {numbers.shown(self.is_even)}.")

    def __str__(self) -> str:
        if self == Schema(1, 1):
            return "at most one participation"
        most = "" if self.most is None else f"at most {self.most} "
        apart = f"{self.separation} round{'' if self.separation == 1 else 's'} apart"
        if self.is_even:
            return f"{most}participations, adjacent ones exactly {apart}"
        return f"{most}participations at least {apart}"

    def most_in(self, num_rounds: int) -> int:
        """Returns the most of n rounds that one client can take part in.

        Args:
          num_rounds: n, at least 1.

        Raises:
          ValueError: If n is not a positive integer.
        """
        num_rounds = numbers.positive_integer(num_rounds, "num_rounds")
        fitting = -(-num_rounds // self.separation)
        return fitting if self.most is None else min(fitting, self.most)

    def separation_in(self, num_rounds: int) -> int:
        """Returns the least distance b of two participations; n if no client returns in n rounds.

        Args:
          num_rounds: n, at least 1.

        Raises:
          ValueError: If n is not a positive integer.
        """
        return self.separation if self.most_in(num_rounds) > 1 else num_rounds

    def starts_in(self, num_rounds: int) -> range:
        """Returns the first rounds of the maximal patterns of (k, b)-participation.

        A pattern that starts at round b or later and has no room for all its participations is
        a subset of the pattern that starts b rounds earlier.

        Args:
          num_rounds: n, at least 1.
        """
        separation = self.separation_in(num_rounds)
        full = num_rounds - (self.most_in(num_rounds) - 1) * separation
        return range(max(full, separation))

    def allows_separations(
        self, participations: int, smallest: int | None, largest: int | None
    ) -> bool:
        """Returns whether the schema allows the observed participation of clients.

        Args:
          participations: The most participations of one client.
          smallest: The smallest distance of adjacent participations; None if nobody returned.
          largest: The largest distance; None if nobody returned, or if it is not known.
        """
        if participations <= 1 or smallest is None:
            return True
        if self.is_even and not smallest == largest == self.separation:
            return False
        return smallest >= self.separation and participations <= (self.most or math.inf)

    def allows(self, narrower: "Schema", num_rounds: int) -> bool:
        """Returns whether every pattern of another schema is one of this schema.

        Args:
          narrower: The other schema.
          num_rounds: n; participations in these rounds count.

        Raises:
          ValueError: If n is not a positive integer.
        """
        most = narrower.most_in(num_rounds)
        # If only the first and the last round fit, a least separation is an exact one.
        largest = narrower.separation if narrower.is_even else num_rounds - 1
        return most == 1 or self.allows_separations(most, narrower.separation, largest)

    def largest_sum(self, weights: FloatArray) -> float:
        """Returns the largest sum of weights over a pattern (BandMF Alg. 3).

        Args:
          weights: (n,) non-negative numbers.
        """
        most, separation = self.most_in(len(weights)), self.separation_in(len(weights))
        if self.is_even:
            starts = self.starts_in(len(weights))
            return float(max(np.sum(weights[start::separation][:most]) for start in starts))
        is_limited = most < -(-len(weights) // separation)
        return float(largest_sums(weights, separation, most if is_limited else None)[-1])


@final
@dataclasses.dataclass(frozen=True)
class Unit:
    """Clients that are zeroed together: each of them keeps to a schema.

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
        numbers.set_positive_integers(self, "num_clients", "window", "num_windows")

    @property
    def schema(self) -> Schema:
        """The schema of one client."""
        return Schema(self.most, self.separation, self.is_even)

    def schema_in(self, num_rounds: int) -> Schema:
        """Returns a schema of all rounds that allows every pattern of a client or device.

        Args:
          num_rounds: n, at least 1.
        """
        if self.window is None or self.window >= num_rounds:
            return self.schema
        windows = -(-num_rounds // self.window)
        chosen = min(self.num_windows or windows, windows)
        most = chosen * self.schema.most_in(self.window)
        return Schema(most, self.separation, self.is_even) if chosen == 1 else Schema(most, 1)

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


def largest_sums(weights: FloatArray, separation: int, most: int | None) -> FloatArray:
    """Returns the largest sums of entries along the first axis that are b or more apart.

    F[i], the largest sums from entry i on, follow from F[i + 1] and F[i + b], so that b of them
    are kept. Those of b entries are computed at once, from the last ones on.

    Args:
      weights: (n, ...) non-negative numbers.
      separation: b.
      most: k; None for as many as fit.

    Returns:
      (k + 1, ...) sums of at most 0, 1, ..., k entries; (1, ...) without a limit.
    """
    chunks, shape = -(-len(weights) // separation), weights.shape[1:]
    filled = np.zeros((chunks * separation, *shape))
    filled[: len(weights)] = weights
    sums = np.zeros((1 if most is None else most + 1, separation, *shape))
    # One entry more is taken of those that begin b further on.
    fewer, more = (sums, sums) if most is None else (sums[:-1], sums[1:])
    for chunk in filled.reshape(chunks, separation, *shape)[::-1]:
        taken = np.maximum.accumulate((chunk + fewer)[:, ::-1], axis=1)[:, ::-1]
        more[...] = np.maximum(taken, more[:, :1])
    return np.asarray(sums[:, 0])


def pattern_sum(column: FloatArray, separation: int, most: int) -> FloatArray:
    """Returns the sum of a Toeplitz matrix's columns 0, b, 2 b, ..., k of them.

    Args:
      column: (n,) the first column.
      separation: b.
      most: k, with (k - 1) b < n.

    Returns:
      (n,): entry t is the sum of ``column[t - j b]`` over j < k with j b <= t.
    """
    # Sums over windows of 1, 2, 4, ... participations, put together by the bits of k.
    window, width, done = np.array(column), separation, 0
    total = np.zeros_like(window)
    while most:
        if most % 2:
            total[done:] += window[: len(window) - done]
            done += width
        further = window.copy()
        further[width:] += window[:-width]
        window, width, most = further, 2 * width, most // 2
    return total


def pattern_sum_adjoint(values: FloatArray, separation: int, most: int) -> FloatArray:
    """Returns the adjoint of :func:`pattern_sum`: entry t sums ``values[t + j b]`` over j < k.

    Args:
      values: (n,) floats.
      separation: The separation b.
      most: The number k of participations.
    """
    return pattern_sum(values[::-1], separation, most)[::-1]
