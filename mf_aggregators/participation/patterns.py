"""Participation patterns of a schema, one by one."""

from collections.abc import Iterator

from mf_aggregators.kernel.schemas import Schema


def maximal_patterns(schema: Schema, num_rounds: int) -> Iterator[tuple[int, ...]]:
    """Yields the patterns to which no round can be added, in ascending order of rounds.

    Every pattern of the schema is a subset of one of them.

    Args:
      schema: The schema.
      num_rounds: n.

    Yields:
      Ascending rounds.
    """
    most, separation = schema.most_in(num_rounds), schema.separation_in(num_rounds)
    if schema.is_even:
        for start in schema.starts_in(num_rounds):
            yield tuple(range(start, num_rounds, separation))[:most]
    else:
        yield from _spread_patterns((), False, separation, most, num_rounds)


def _spread_patterns(
    rounds: tuple[int, ...], has_room: bool, separation: int, most: int, num_rounds: int
) -> Iterator[tuple[int, ...]]:
    """Yields the maximal patterns of a least separation that begin with ``rounds``.

    ``has_room`` says whether another round fits before the last of ``rounds``: then only patterns
    of k rounds are maximal.
    """
    earliest = rounds[-1] + separation if rounds else 0
    if len(rounds) == most or earliest >= num_rounds:
        if len(rounds) == most or not has_room:
            yield rounds
        return
    for i in range(earliest, num_rounds):
        with_room = has_room or i >= earliest + separation
        fitting = 1 + (num_rounds - 1 - i) // separation
        if with_room and len(rounds) + fitting < most:
            break
        yield from _spread_patterns((*rounds, i), with_room, separation, most, num_rounds)
