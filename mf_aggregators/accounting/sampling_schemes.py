"""Sampling schemes for banded mechanisms: by which random rule clients take part in a run.

BandMF's amplification (Thm 4) needs batches that were drawn in one way: the data are
split into as many parts as C has bands, round i draws from part i modulo that number
alone, and by a random rule within it (Alg. 2 and 6). A data centre can do that.

Two further schemes need no parts. Clients can follow them by themselves, because no client
has to know what another one does: secret coins under timers (arXiv 2602.09338), and one secret
round of each cycle (arXiv 2410.06266).

The schemes here say which rule, and check its sizes. What draws by them are the samplers of
``simulations``; what they are worth in privacy is computed by
``mf_aggregators.accounting.amplification``.

Devices that decide themselves when to take part, without a coin of known probability, follow
none of these schemes, and their participation is never amplified.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

from mf_aggregators import validation


@dataclasses.dataclass(frozen=True)
class _Scheme:
    """What all schemes have: sizes, checked against one another.

    Attributes:
      num_rounds: The rounds n of the run.
      num_bands: The bands of C.
      population: The number of clients (or examples) m.
      clients_per_round: The batch size B, expected or exact.
    """

    num_rounds: int
    num_bands: int
    population: int
    clients_per_round: int

    name: ClassVar[str]

    def __post_init__(self) -> None:
        validation.set_positive_integers(
            self, "num_rounds", "num_bands", "population", "clients_per_round"
        )
        if self.num_bands > self.num_rounds:
            raise ValueError(
                f"num_bands must be at most num_rounds, found {self.num_bands} bands for "
                f"{self.num_rounds} rounds."
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping that :func:`from_dict` takes back."""
        return {"name": self.name, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class _PartScheme(_Scheme):
    """Schemes that split the data into as many parts as C has bands."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_bands * self.clients_per_round > self.population:
            raise ValueError(
                f"a population of {self.population} is too small for {self.num_bands} parts of "
                f"at least {self.clients_per_round} clients, one part for each band: "
                f"{self.num_bands * self.clients_per_round} are needed. Use fewer bands (at most "
                f"{self.population // self.clients_per_round}) or fewer clients per round."
            )

    @property
    def most_participations(self) -> int:
        """The most rounds ceil(n / b) that draw from one part, and so that one client is in."""
        return math.ceil(self.num_rounds / self.num_bands)


@dataclasses.dataclass(frozen=True)
class _SeparatedScheme(_Scheme):
    """Schemes without parts, in which each client's rounds are some number of rounds apart.

    Attributes:
      separation: Two participations i and j of one client satisfy |i - j| >= separation; at
        least num_bands, so that they change different rows of C x.
    """

    separation: int

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.set_positive_integers(self, "separation")
        if self.separation < self.num_bands:
            raise ValueError(
                f"a separation of {self.separation} is below the {self.num_bands} bands: the rows "
                "that two participations of a client change would overlap. Use a separation of at "
                "least num_bands, or fewer bands."
            )
        if self.separation * self.clients_per_round > self.population:
            raise ValueError(
                f"a population of {self.population} is too small for {self.clients_per_round} "
                f"clients per round that take part at most once in {self.separation} rounds: "
                f"{self.separation * self.clients_per_round} are needed. Use a smaller separation "
                f"(at most {self.population // self.clients_per_round}) or fewer clients per round."
            )

    @property
    def most_participations(self) -> int:
        """The most rounds ceil(n / separation) that one client can be in."""
        return math.ceil(self.num_rounds / self.separation)


@dataclasses.dataclass(frozen=True)
class PoissonSampling(_PartScheme):
    """Each client of a round's part joins independently with probability B b / m (Cor. F.1).

    The parts have floor(m / b) or ceil(m / b) clients; batches vary in size around B.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation.
    """

    name: ClassVar[str] = "poisson"

    @property
    def sampling_probability(self) -> float:
        """The probability q = B b / m that a client of a round's part joins."""
        return self.clients_per_round * self.num_bands / self.population


@dataclasses.dataclass(frozen=True)
class FixedSizeSampling(_PartScheme):
    """Exactly B clients of a round's part, a uniformly random subset each time (Alg. 2).

    All parts have floor(m / b) clients; up to b - 1 clients are left out of the run.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round.
    """

    name: ClassVar[str] = "fixed_size"

    @property
    def part_size(self) -> int:
        """The clients floor(m / b) of each part."""
        return self.population // self.num_bands

    @property
    def sampling_probability(self) -> float:
        """The probability B / floor(m / b) that a client of a round's part is drawn."""
        return self.clients_per_round / self.part_size


@dataclasses.dataclass(frozen=True)
class Shuffling(_PartScheme):
    """A round's part is shuffled and cut into batches of B, afresh whenever it is used up.

    As in Cor. F.2 each pass over a part shows every client of it once. The parts have a
    multiple of B clients, floor(m / (b B)) B; fewer than b B clients are left out.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round.
    """

    name: ClassVar[str] = "shuffling"

    @property
    def batches_per_pass(self) -> int:
        """The batches floor(m / (b B)) of one pass over a part."""
        return self.population // (self.num_bands * self.clients_per_round)

    @property
    def part_size(self) -> int:
        """The clients floor(m / (b B)) B of each part."""
        return self.batches_per_pass * self.clients_per_round

    @property
    def num_passes(self) -> int:
        """The passes over a part that n rounds begin."""
        return math.ceil(self.most_participations / self.batches_per_pass)


@dataclasses.dataclass(frozen=True)
class MinSeparationSampling(_SeparatedScheme):
    """Each client whose timer allows it joins with a secret coin (b-min-sep, arXiv 2602.09338).

    A client that joined is not free to join again for separation - 1 rounds. In every round in
    which it is free, it joins with probability p, whatever happened before. Before round 0
    timers are in their stationary state: a client is free in round 0 with
    ``probability_free_at_first``, and for each of i = 1, ..., separation - 1 it is first free in
    round i with ``probability_of_first_wait``. So clients_per_round clients join in every round
    on average.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation.
      separation: Participations of a client are so many rounds apart; at least num_bands.
    """

    name: ClassVar[str] = "min_separation"

    @property
    def joining_probability(self) -> float:
        """The probability p = B / (m - B (separation - 1)) of the coin of a free client."""
        return self.clients_per_round / (
            self.population - self.clients_per_round * (self.separation - 1)
        )

    @property
    def probability_free_at_first(self) -> float:
        """The probability 1 / (1 + (separation - 1) p) that a client is free in round 0."""
        return 1.0 / (1.0 + (self.separation - 1) * self.joining_probability)

    @property
    def probability_of_first_wait(self) -> float:
        """The probability p / (1 + (separation - 1) p) of being free first in one given round.

        It is the same for each of the rounds 1 to separation - 1.
        """
        return self.joining_probability * self.probability_free_at_first


@dataclasses.dataclass(frozen=True)
class BallsInBins(_SeparatedScheme):
    """Each client is put once into one of ``separation`` bins at random (arXiv 2410.06266).

    It takes part in every round i with i modulo separation equal to its bin. Nobody is left
    out, and m / separation clients take part in every round on average. So that this is B but
    for the remainder of a division, either separation is floor(m / B) or B is
    floor(m / separation).

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation.
      separation: The number of bins, at least num_bands.
    """

    name: ClassVar[str] = "balls_in_bins"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            self.population // self.clients_per_round != self.separation
            and self.population // self.separation != self.clients_per_round
        ):
            raise ValueError(
                f"a population of {self.population} in {self.separation} bins has "
                f"{self.population / self.separation:.6g} clients in a round, not "
                f"{self.clients_per_round}. Use "
                f"a separation of {self.population // self.clients_per_round}, or "
                f"{self.population // self.separation} clients per round."
            )


# A data centre draws batches from parts of the population.
PartScheme: TypeAlias = PoissonSampling | FixedSizeSampling | Shuffling
# Clients draw for themselves when they take part.
SeparatedScheme: TypeAlias = MinSeparationSampling | BallsInBins
# Any of them.
SamplingScheme: TypeAlias = PartScheme | SeparatedScheme

_PART_SCHEMES: Mapping[str, type[PartScheme]] = {
    PoissonSampling.name: PoissonSampling,
    FixedSizeSampling.name: FixedSizeSampling,
    Shuffling.name: Shuffling,
}
_SEPARATED_SCHEMES: Mapping[str, type[SeparatedScheme]] = {
    MinSeparationSampling.name: MinSeparationSampling,
    BallsInBins.name: BallsInBins,
}


def part_slice(scheme: PartScheme, part: int) -> slice:
    """Returns which places of a random order of all clients are a part.

    Args:
      scheme: A scheme that splits the data into parts.
      part: The part, from 0.

    Returns:
      The slice. Poisson's parts, of floor(m / b) or ceil(m / b) clients, leave nobody
      out; the others are of equal size.
    """
    if isinstance(scheme, PoissonSampling):
        return slice(
            part * scheme.population // scheme.num_bands,
            (part + 1) * scheme.population // scheme.num_bands,
        )
    return slice(part * scheme.part_size, (part + 1) * scheme.part_size)


def size_of_part(scheme: PartScheme, part: int) -> int:
    """Returns how many clients a part has.

    Args:
      scheme: A scheme that splits the data into parts.
      part: The part, from 0.
    """
    places = part_slice(scheme, part)
    return int(places.stop - places.start)


def names() -> tuple[str, ...]:
    """Returns the names: poisson, fixed_size, shuffling, min_separation, balls_in_bins."""
    return (*_PART_SCHEMES, *_SEPARATED_SCHEMES)


def names_with_parts() -> tuple[str, ...]:
    """Returns the names of schemes that split the data into parts."""
    return tuple(_PART_SCHEMES)


def create(
    name: str,
    *,
    num_rounds: int,
    num_bands: int,
    population: int,
    clients_per_round: int,
    separation: int | None = None,
) -> SamplingScheme:
    """Returns a scheme by its name.

    Args:
      name: One of :func:`names`.
      num_rounds: The rounds n.
      num_bands: The bands b of C, 1 to n.
      population: The clients m, at least B b.
      clients_per_round: The batch size B, expected or exact.
      separation: For ``min_separation``, the least distance of two participations of a
        client, at least b and b by default. For ``balls_in_bins``, the number of bins, at
        least b and floor(m / B) by default. None for the others.

    Returns:
      The scheme.

    Raises:
      ValueError: If the name is unknown or the sizes do not fit one another.
    """
    if name in _PART_SCHEMES:
        if separation is not None:
            raise ValueError(
                f"the sampling scheme {name!r} takes no separation, found {separation}: its parts "
                "are as many as there are bands."
            )
        return _PART_SCHEMES[name](num_rounds, num_bands, population, clients_per_round)
    if name not in _SEPARATED_SCHEMES:
        raise ValueError(
            f"the sampling scheme {validation.shown(name)} is not one of {', '.join(names())}."
        )
    if separation is None:
        separation = num_bands
        if name == BallsInBins.name:
            positive = validation.positive_integer(clients_per_round, "clients_per_round")
            members = validation.positive_integer(population, "population")
            separation = max(members // positive, 1)
    return _SEPARATED_SCHEMES[name](
        num_rounds, num_bands, population, clients_per_round, separation
    )


def from_dict(description: Any) -> SamplingScheme:
    """Returns the scheme that ``to_dict`` described.

    Args:
      description: The mapping.

    Returns:
      The scheme.

    Raises:
      ValueError: If it describes none.
    """
    try:
        return create(**description)
    except TypeError as error:
        raise ValueError(
            f"{validation.shown(description)} describes no sampling scheme."
        ) from error
