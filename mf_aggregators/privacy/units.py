"""Who is protected least in a ledger: a client, or a person with several clients.

All clients of a person are zeroed together (``kernel.sensitivity``). A client that several people
share counts twice for each of them: with and without one person's part, its update may be two clip
norms apart.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mf_aggregators import inputs
from mf_aggregators.kernel import claim
from mf_aggregators.kernel.claim import Basis, Guarantee, Pattern
from mf_aggregators.kernel.ledger import observed_claim
from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.kernel.rows import strategy_of
from mf_aggregators.privacy import ledgers
from mf_aggregators.privacy.ledgers import Ledger, LedgerError

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
      guarantee: The guarantee of this client, without amplification. It holds only if participation
        did not depend on released models or on data.

    Raises:
      ValueError: If an attribute is of another type.
    """

    client_id: str
    rounds: tuple[int, ...]
    guarantee: Guarantee

    def __post_init__(self) -> None:
        inputs.check_types(self)


@dataclasses.dataclass(frozen=True)
class Person:
    """The person of a ledger who is protected least.

    Attributes:
      name: Who it is.
      clients: The person's clients.
      guarantee: What holds for the person, by the rounds of all these clients. It holds only if
        participation did not depend on released models or on data.
    """

    name: str
    clients: tuple[str, ...]
    guarantee: Guarantee


def worst_client(plan: Guarantee, ledger: Ledger) -> WorstClient | None:
    """Returns the client with the largest sensitivity for its own rounds.

    One client's contributions in the rounds of a pattern change it by at most
    ``sqrt(sum |X[i, j]|)`` over i, j in the pattern, with X = C^T C (BandMF Eq. 5 for a schema of
    this one pattern), and by exactly that where the signs of the entries fit together. So its
    epsilon is at most that of ``kernel.ledger.observed``, which is for every pattern of the
    observed separation and number of participations.

    Args:
      plan: What fixes the noise.
      ledger: Who took part in which round.

    Returns:
      The client, the first of several; None if nobody took part, or for more than 8,192 rounds,
      whose Gram matrix would not fit into memory.
    """
    found = _least_protected(plan, ledger.rounds_of_clients, ledger.num_rounds, Basis.LEDGER)
    if found is None:
        return None
    worst, guarantee = found
    rounds = tuple(ledger.rounds_of_clients[worst].tolist())
    return WorstClient(ledger.client_ids[worst], rounds, guarantee)


def people_of(
    given: Mapping[str, Iterable[str]] | str | os.PathLike[str],
) -> dict[str, tuple[str, ...]]:
    """Returns the clients of each person.

    Args:
      given: The clients of each person, by the person's name; or the file that
        ``ledgers.load_people`` reads.

    Raises:
      LedgerError: If the file cannot be read.
      ValueError: If a person has no client, or one twice.
    """
    if isinstance(given, (str, os.PathLike)):
        return ledgers.load_people(given)
    people = {person: tuple(clients) for person, clients in given.items()}
    for person, clients in people.items():
        if not clients or len(set(clients)) < len(clients):
            raise ValueError(f"the person {person!r} needs clients, each of them once.")
    return people


def _weights(people: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """How many clip norms a client counts for: 1, or 2 if several people share it."""
    found: dict[str, int] = {}
    for clients in people.values():
        found |= {each: 2 if each in found else 1 for each in clients}
    return found


def most_clients(people: Mapping[str, Sequence[str]]) -> int:
    """Returns the most clients of one person; a client that people share counts as two.

    Args:
      people: The clients of each person.
    """
    weights = _weights(people)
    return max(sum(weights[each] for each in own) for own in people.values())


def least_protected_person(
    plan: Guarantee, ledger: Ledger, people: Mapping[str, tuple[str, ...]]
) -> Person | None:
    """Returns the person with the largest sensitivity for the rounds of all clients together.

    Args:
      plan: What fixes the noise.
      ledger: A complete ledger of who took part.
      people: The clients of each person.

    Returns:
      The person, the first of several; None if nobody took part, or for more than 8,192 rounds.

    Raises:
      LedgerError: If a client of the ledger is nobody's.
    """
    rounds, weights = ledger.by_name(), _weights(people)
    if strangers := rounds.keys() - weights.keys():
        raise LedgerError(
            f"{len(strangers)} of {len(rounds)} clients that took part are nobody's: give each "
            "client a line with its person."
        )
    none = np.empty(0, np.int64)
    of_people = [
        np.sort(np.concatenate([np.repeat(rounds.get(each, none), weights[each]) for each in own]))
        for own in people.values()
    ]
    found = _least_protected(plan, of_people, ledger.num_rounds, Basis.PEOPLE)
    return None if found is None else Person(*list(people.items())[found[0]], found[1])


def _least_protected(
    plan: Guarantee, rounds_of_units: Sequence[IntArray], num_rounds: int, basis: Basis
) -> tuple[int, Guarantee] | None:
    """The index and the guarantee of the client or person with the largest sensitivity.

    The rounds of a person increase, and one stands there once for each client.
    """
    by_count: dict[int, list[int]] = {}
    for index, number in enumerate(map(len, rounds_of_units)):
        if number:
            by_count.setdefault(number, []).append(index)
    if not by_count or num_rounds > _MOST_ROUNDS_OF_GRAM:
        return None
    # Leave out the rows of C of later rounds.
    strategy = strategy_of(plan.claim.rows, num_rounds)
    leading = strategy.columns(tuple(range(num_rounds)))
    magnitudes = np.abs(leading.T @ leading)
    largest: list[tuple[float, int]] = []
    for indices in by_count.values():
        squared = _squared(magnitudes, np.stack([rounds_of_units[index] for index in indices]))
        at = int(np.argmax(squared))
        largest.append((-float(np.sqrt(squared[at])), indices[at]))
    _, worst = min(largest)
    pattern = Pattern(tuple(rounds_of_units[worst].tolist()))
    return worst, claim.check(observed_claim(plan, pattern, num_rounds, basis))


def _squared(magnitudes: FloatArray, patterns: IntArray) -> FloatArray:
    """For (N, c) patterns, the sums of |X| over all pairs of each."""
    at_a_time = max(1, _ENTRIES_AT_A_TIME // patterns.shape[1] ** 2)
    chunks = np.split(patterns, range(at_a_time, len(patterns), at_a_time))
    return np.concatenate(
        [
            magnitudes[chunk[:, :, np.newaxis], chunk[:, np.newaxis, :]].sum(axis=(1, 2))
            for chunk in chunks
        ]
    )
