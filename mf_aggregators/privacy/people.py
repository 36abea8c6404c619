"""People with several clients: whose clients are whose, and who is protected least.

All clients of a person are zeroed together (``kernel.sensitivity``). A client that several people
share counts twice for each of them: with and without one person's part, its update may be two clip
norms apart.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Mapping

import numpy as np

from mf_aggregators.kernel.claim import Basis, Guarantee
from mf_aggregators.privacy import ledgers, worst_client
from mf_aggregators.privacy.ledgers import Ledger, LedgerError

# A file may begin with it.
HEADING = ("person", "client")


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


@dataclasses.dataclass(frozen=True)
class People:
    """Whose clients are whose.

    Attributes:
      clients: The clients of each person, by the person's name.

    Raises:
      ValueError: If a person has no client, or one twice.
    """

    clients: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        for person, clients in self.clients.items():
            if not clients or len(set(clients)) < len(clients):
                raise ValueError(f"the person {person!r} needs clients, each of them once.")

    @property
    def weights(self) -> dict[str, int]:
        """How many clip norms a client counts for: 1, or 2 if several people share it."""
        found: dict[str, int] = {}
        for clients in self.clients.values():
            found |= {each: 2 if each in found else 1 for each in clients}
        return found

    @property
    def most_clients(self) -> int:
        """The most clients of one person; a shared one counts as two."""
        weights = self.weights
        return max(sum(weights[each] for each in own) for own in self.clients.values())

    def least_protected(self, plan: Guarantee, ledger: Ledger) -> Person | None:
        """Returns the person whose clients together can change C x the most.

        Args:
          plan: What fixes the noise.
          ledger: A complete ledger of who took part.

        Returns:
          The person, the first of several; None if nobody took part, or for more than 8,192 rounds.

        Raises:
          LedgerError: If a client of the ledger is nobody's.
        """
        named = zip(ledger.client_ids, ledger.rounds_of_clients, strict=True)
        rounds = {client: each for client, each in named if len(each)}
        weights, people = self.weights, tuple(self.clients.items())
        if strangers := rounds.keys() - weights.keys():
            raise LedgerError(
                f"{len(strangers)} of {len(rounds)} clients that took part are nobody's: give each "
                "client a line with its person."
            )
        none = np.empty(0, np.int64)
        of_people = [
            np.sort(
                np.concatenate([np.repeat(rounds.get(each, none), weights[each]) for each in own])
            )
            for _, own in people
        ]
        found = worst_client.least_protected(plan, of_people, ledger.num_rounds, Basis.PEOPLE)
        return None if found is None else Person(*people[found[0]], found[1])


def people_of(given: Mapping[str, Iterable[str]] | str | os.PathLike[str]) -> People:
    """Returns whose clients are whose.

    Args:
      given: The clients of each person, by the person's name; or a file, which :func:`load` reads.

    Raises:
      LedgerError: As :func:`load` does.
      ValueError: If a person has no client, or one twice.
    """
    if isinstance(given, (str, os.PathLike)):
        return load(given)
    return People({person: tuple(clients) for person, clients in given.items()})


def load(path: str | os.PathLike[str]) -> People:
    """Reads whose clients are whose.

    Args:
      path: A text file in UTF-8, with or without a byte order mark, with a person, a comma and a
        client on each line, written like the lines of a ledger. The first line may be
        ``person,client``. Empty lines mean nothing.

    Returns:
      The clients of each person.

    Raises:
      LedgerError: If the file cannot be read, names nobody, or has a line of another form, a line
        twice, or a name with characters that cannot be seen.
    """
    file = pathlib.Path(path)
    clients: dict[str, list[str]] = {}
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
        for number, line in enumerate(lines, 1):
            fields = ledgers.fields_of_line(line.strip())
            if not line.strip() or (not clients and fields == HEADING):
                continue
            if fields is None:
                raise LedgerError(f"line {number} is not a person, a comma and a client")
            for name in fields:
                ledgers.check_name(name)
            person, client = fields
            if client in clients.setdefault(person, []):
                raise LedgerError(f"line {number} repeats an earlier one")
            clients[person].append(client)
        if not clients:
            raise LedgerError("it names nobody")
    except OSError as error:
        raise LedgerError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise LedgerError(f"{file} does not say whose clients are whose: {reason}.") from error
    return People({person: tuple(own) for person, own in clients.items()})
