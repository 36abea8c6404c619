"""The client of a run that its own participations protect least."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mf_aggregators import inputs
from mf_aggregators.kernel import claim, numbers
from mf_aggregators.kernel.claim import Basis, Guarantee, Pattern
from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.kernel.rows import columns_of, strategy_of
from mf_aggregators.privacy.guarantees import INDEPENDENCE, observed_claim
from mf_aggregators.privacy.ledgers import Ledger

# The Gram matrix of more rounds than this takes more than half a gigabyte.
_MOST_ROUNDS_OF_GRAM = 8192
# Entries of the Gram matrix that are looked up together: bounds the memory.
_ENTRIES_AT_A_TIME = 1 << 24


@dataclasses.dataclass(frozen=True)
class WorstClient:
    """The client that is protected least, by its own participations.

    Attributes:
      client_id: Which client.
      rounds: The rounds that it took part in, from 0.
      sensitivity: The sensitivity of C for these rounds alone, at unit clipping.
      epsilon: The epsilon of this client, without amplification; infinity without noise. It holds
        only if participation did not depend on released models or on data.

    Raises:
      ValueError: If an attribute is of another type, or out of its range.
    """

    client_id: str
    rounds: tuple[int, ...]
    sensitivity: float
    epsilon: float

    def __post_init__(self) -> None:
        inputs.check_types(self)
        numbers.non_negative_number(self.sensitivity, "sensitivity")
        numbers.epsilon(self.epsilon)

    @classmethod
    def of_ledger(cls, plan: Guarantee, ledger: Ledger) -> "WorstClient | None":
        """Returns the client whose own participations can change C x the most.

        One client's contributions in the rounds of a pattern change it by at most
        ``sqrt(sum |X[i, j]|)`` over i, j in the pattern, with X = C^T C (BandMF Eq. 5 for a schema
        of this one pattern), and by exactly that where the signs of the entries fit together. So
        its epsilon is at most that of ``guarantees.observed``, which is for every pattern of the
        observed separation and number of participations.

        Args:
          plan: What fixes the noise.
          ledger: Who took part in which round.

        Returns:
          The client, the first of several; None if nobody took part, or for more than 8,192 rounds,
          whose Gram matrix would not fit into memory.
        """
        found = least_protected(plan, ledger.rounds_of_clients, ledger.num_rounds)
        if found is None:
            return None
        worst, alone = found
        rounds = tuple(ledger.rounds_of_clients[worst].tolist())
        return cls(ledger.client_ids[worst], rounds, alone.sensitivity.value, alone.epsilon)

    def to_dict(self, *, is_named: bool = False) -> dict[str, Any]:
        """Returns a JSON-able mapping; an infinite epsilon becomes None.

        Args:
          is_named: Whether it has the client's name and rounds, which tell it from all others.
        """
        name = {"client_id": self.client_id, "rounds": list(self.rounds)} if is_named else {}
        return {
            **name,
            "num_rounds": len(self.rounds),
            "sensitivity": self.sensitivity,
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
            **INDEPENDENCE,
        }


def least_protected(
    plan: Guarantee,
    rounds_of_units: Sequence[IntArray],
    num_rounds: int,
    basis: Basis = Basis.LEDGER,
) -> tuple[int, Guarantee] | None:
    """Returns the client or person whose own rounds can change C x the most, and its guarantee.

    Args:
      plan: What fixes the noise.
      rounds_of_units: For each client the rounds that it took part in, increasing; for each person
        those of all clients, where a round stands once for each client.
      num_rounds: The rounds that were released.
      basis: ``PEOPLE`` for people.

    Returns:
      Its index, the first of several; None if nobody took part, or for more than 8,192 rounds.
    """
    by_count: dict[int, list[int]] = {}
    for index, number in enumerate(map(len, rounds_of_units)):
        if number:
            by_count.setdefault(number, []).append(index)
    if not by_count or num_rounds > _MOST_ROUNDS_OF_GRAM:
        return None
    # Without the rows of C that only later rounds see.
    strategy = strategy_of(plan.claim.rows, num_rounds)
    leading = columns_of(strategy, tuple(range(num_rounds)))
    magnitudes = np.abs(leading.T @ leading)
    worst, largest = -1, -1.0
    for indices in by_count.values():
        squared = _squared(magnitudes, np.stack([rounds_of_units[index] for index in indices]))
        at = int(np.argmax(squared))
        found = float(np.sqrt(squared[at]))
        if found > largest or (found == largest and indices[at] < worst):
            worst, largest = indices[at], found
    pattern = Pattern(tuple(rounds_of_units[worst].tolist()))
    return worst, claim.check(observed_claim(plan, pattern, num_rounds, basis))


def _squared(magnitudes: FloatArray, patterns: IntArray) -> FloatArray:
    """For (N, c) patterns, the sums of |X| over all pairs of each."""
    count = patterns.shape[1]
    at_a_time = max(1, _ENTRIES_AT_A_TIME // count**2)
    sums = [
        magnitudes[chunk[:, :, np.newaxis], chunk[:, np.newaxis, :]].sum(axis=(1, 2))
        for chunk in (
            patterns[first : first + at_a_time] for first in range(0, len(patterns), at_a_time)
        )
    ]
    return np.concatenate(sums)
