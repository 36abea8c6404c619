"""Sampling schemes for banded mechanisms: how a data centre draws the batches of a run.

BandMF's amplification (Thm 4) needs batches that were drawn in one way: the data are
split into as many parts as C has bands, round i draws from part i modulo that number
alone, and by a random rule within it (Alg. 2 and 6). The schemes here say which rule, and
check its sizes. What draws by them are the data samplers of ``simulations``; what they
are worth in privacy is computed by ``mf_aggregators.accounting.amplification``.

Devices that decide themselves when to take part follow none of these schemes, and their
participation is never amplified.
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
      num_bands: The bands b of C, and the parts that the data are split into.
      population: The number of clients (or examples) m.
      clients_per_round: The batch size B, expected or exact.
    """

    num_rounds: int
    num_bands: int
    population: int
    clients_per_round: int

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for field in ("num_rounds", "num_bands", "population", "clients_per_round"):
            validation.positive_integer(getattr(self, field), field)
        if self.num_bands > self.num_rounds:
            raise ValueError(
                f"num_bands must be at most num_rounds, found {self.num_bands} bands for "
                f"{self.num_rounds} rounds."
            )
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

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping that :func:`from_dict` takes back."""
        return {"name": self.name, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class PoissonSampling(_Scheme):
    """Each client of a round's part joins independently with probability B b / m (Cor. F.1).

    The parts have floor(m / b) or ceil(m / b) clients; batches vary in size around B.
    """

    name: ClassVar[str] = "poisson"

    @property
    def sampling_probability(self) -> float:
        """The probability q = B b / m that a client of a round's part joins."""
        return self.clients_per_round * self.num_bands / self.population


@dataclasses.dataclass(frozen=True)
class FixedSizeSampling(_Scheme):
    """Exactly B clients of a round's part, a uniformly random subset each time (Alg. 2).

    All parts have floor(m / b) clients; up to b - 1 clients are left out of the run.
    """

    name: ClassVar[str] = "fixed_size"

    @property
    def part_size(self) -> int:
        """The clients floor(m / b) of each part."""
        return self.population // self.num_bands


@dataclasses.dataclass(frozen=True)
class Shuffling(_Scheme):
    """A round's part is shuffled and cut into batches of B, afresh whenever it is used up.

    As in Cor. F.2 each pass over a part shows every client of it once. The parts have a
    multiple of B clients, floor(m / (b B)) B; fewer than b B clients are left out.
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


SamplingScheme: TypeAlias = PoissonSampling | FixedSizeSampling | Shuffling

_SCHEMES: Mapping[str, type[SamplingScheme]] = {
    PoissonSampling.name: PoissonSampling,
    FixedSizeSampling.name: FixedSizeSampling,
    Shuffling.name: Shuffling,
}


def part_slice(scheme: SamplingScheme, part: int) -> slice:
    """Returns which places of a random order of all clients are a part.

    Args:
      scheme: The scheme.
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


def size_of_part(scheme: SamplingScheme, part: int) -> int:
    """Returns how many clients a part has.

    Args:
      scheme: The scheme.
      part: The part, from 0.
    """
    places = part_slice(scheme, part)
    return int(places.stop - places.start)


def names() -> tuple[str, ...]:
    """Returns the names of the schemes: poisson, fixed_size, shuffling."""
    return tuple(_SCHEMES)


def create(
    name: str, *, num_rounds: int, num_bands: int, population: int, clients_per_round: int
) -> SamplingScheme:
    """Returns a scheme by its name.

    Args:
      name: ``poisson``, ``fixed_size`` or ``shuffling``.
      num_rounds: The rounds n.
      num_bands: The bands b of C, 1 to n.
      population: The clients m, at least B b.
      clients_per_round: The batch size B.

    Returns:
      The scheme.

    Raises:
      ValueError: If the name is unknown or the sizes do not fit one another.
    """
    if name not in _SCHEMES:
        raise ValueError(f"the sampling scheme {name!r} is not one of {', '.join(_SCHEMES)}.")
    return _SCHEMES[name](num_rounds, num_bands, population, clients_per_round)


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
        raise ValueError(f"{description!r} describes no sampling scheme.") from error
