"""Planning: which mechanism suits a population, a timer, a memory budget and a privacy target.

Every mechanism that fits is compared by its effective RMSE (BandMF Eq. 11): the root mean
square error of its prefix sums at sensitivity 1, times the noise multiplier that the target
needs, over the clients per round. That is the standard deviation that the noise gives to a
model parameter after a round, on average over rounds, for SGD with clip norm and learning
rate one.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mf_aggregators import (
    accounting,
    band_choice,
    factorization_cache,
    factorizations,
    lower_bounds,
    noise_recursions,
    noise_storage,
    sampling_schemes,
    validation,
    workloads,
)
from mf_aggregators import participation as participations
from mf_aggregators.factorizations import Factorization
from mf_aggregators.noise_storage import NoiseCost
from mf_aggregators.participation import (
    FixedEpochOrder,
    Participation,
    SingleParticipation,
)

# Dense optimisation takes minutes above these.
_MOST_ROUNDS_OF_BANDED = 4096
_MOST_ROUNDS_OF_OPTIMAL = 4096
# Searches over Toeplitz coefficients take minutes above this.
_MOST_ROUNDS_OF_BANDED_INVERSE = 20_000
_BUFFERS = (2, 4)
_BANDS_OF_INVERSE = (16, 64)
_BYTES_OF_FLOAT = 4
# Fewer bands than the most, for those who look for less memory.
_FEWER_BANDS = (4, 16, 64)
# Errors that differ by less than this do not decide; what is cheaper does.
_TIE = 0.005

# BandMF App. I: log(rate) = slope log(effective RMSE) + offset, rounded to powers of a base.
_RATE_SLOPE = -0.95
_RATE_OFFSET = -4.64
_RATE_BASE = 1.7


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a run is given.

    Attributes:
      num_rounds: The rounds n.
      population: The clients m.
      clients_per_round: The cohort or batch size B.
      participation: The schema that participation timers enforce; None where a data
        sampler draws the batches.
      sampling: ``poisson``, ``fixed_size`` or ``shuffling``; None for participation timers.
      epsilon: The privacy target.
      delta: Of the target.
      model_size: The parameters d of the model.
      noise_memory: Bytes of noise that a mechanism may have to keep between rounds; None for
        no limit.

    Raises:
      ValueError: If a value is out of its range, both or none of participation and
        sampling are given, or the population cannot fill the rounds.
    """

    num_rounds: int
    population: int
    clients_per_round: int
    participation: Participation | None
    sampling: str | None
    epsilon: float
    delta: float
    model_size: int
    noise_memory: float | None = None

    def __post_init__(self) -> None:
        for field in ("num_rounds", "population", "clients_per_round", "model_size"):
            validation.positive_integer(getattr(self, field), field)
        validation.positive_number(self.epsilon, "epsilon")
        validation.delta(self.delta)
        if self.delta >= 1.0 / self.population:
            raise ValueError(
                f"delta {self.delta:g} is not below 1 / {self.population} clients: a mechanism "
                "that publishes one client's data outright would satisfy it."
            )
        if self.noise_memory is not None:
            validation.non_negative_number(self.noise_memory, "noise_memory")
        if (self.participation is None) == (self.sampling is None):
            raise ValueError("a plan needs a participation schema or a sampling scheme, not both.")
        if self.participation is None:
            band_choice.most_bands(self.num_rounds, self.population, self.clients_per_round)
        else:
            participations.check_fits(self.participation, self.num_rounds)
            participations.check_population(
                self.participation, self.num_rounds, self.population, self.clients_per_round
            )


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mechanism for a setting.

    Attributes:
      mechanism: As ``mf-factorize --mechanism`` spells it.
      num_bands: The bands of ``banded``, ``toeplitz`` and ``banded_inverse``, else None.
      options: The flags of ``mf-factorize`` that make it, without the common ones.
      participation: The schema that its noise is scaled for.
      sampling: The sampling scheme that amplifies it, if any.
      rmse: Root mean square error over rounds at sensitivity 1 and noise multiplier 1.
      max_error: The largest error of a round, likewise.
      noise_multiplier: What the target needs, relative to the sensitivity under
        ``participation``, which for an amplified candidate is that of one participation.
      effective_rmse: rmse times noise multiplier over clients per round (BandMF Eq. 11).
      max_effective_error: max_error times noise multiplier over clients per round.
      over_lower_bound: rmse over what no factorization can be below under the schema; None
        for an amplified candidate, whose noise multiplier belongs to its bands.
      kept_bytes: Noise that the mechanism has to keep between rounds, for all parameters in
        single precision.
      cost: What its noise costs for the model with the storage that is chosen for it, which
        may keep more of it on disk to be faster.
      factorization: The matrix.
    """

    mechanism: str
    num_bands: int | None
    options: tuple[tuple[str, Any], ...]
    participation: Participation
    sampling: sampling_schemes.SamplingScheme | None
    rmse: float
    max_error: float
    noise_multiplier: float
    effective_rmse: float
    max_effective_error: float
    over_lower_bound: float | None
    kept_bytes: int
    cost: NoiseCost
    factorization: Factorization = dataclasses.field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """The mechanism with its options, for a reader."""
        words = [str(value) for _, value in self.options if not isinstance(value, bool)]
        return " ".join([self.mechanism, *words])

    @property
    def server_learning_rate(self) -> float:
        """The server learning rate that BandMF App. I's rule suggests."""
        return server_learning_rate(self.effective_rmse)


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A mechanism that does not fit.

    Attributes:
      mechanism: Its name.
      reason: Why.
    """

    mechanism: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """The mechanisms that fit a setting, the least error first.

    Attributes:
      setting: The setting.
      candidates: Those that fit, by increasing effective RMSE.
      left_out: Those that do not.
      recommended: One of the candidates.
      reason: Why, in one sentence.
    """

    setting: Setting
    candidates: tuple[Candidate, ...]
    left_out: tuple[LeftOut, ...]
    recommended: Candidate
    reason: str


def server_learning_rate(effective_rmse: float) -> float:
    """Returns the server learning rate suggested for an effective RMSE (BandMF App. I).

    A linear fit of logarithms over StackOverflow next-word prediction with federated SGD
    with server momentum 0.95 and clip norm 1, rounded to a power of 1.7 as there: a place
    to begin tuning elsewhere.

    Args:
      effective_rmse: As in :class:`Candidate`.

    Returns:
      The learning rate.

    Raises:
      ValueError: If the error is not above zero.
    """
    error = validation.positive_number(effective_rmse, "effective_rmse")
    fitted = _RATE_SLOPE * math.log(error) + _RATE_OFFSET
    return float(_RATE_BASE ** round(fitted / math.log(_RATE_BASE)))


def make(
    setting: Setting,
    *,
    cache_directory: pathlib.Path | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> Plan:
    """Compares the mechanisms that fit a setting.

    Args:
      setting: What the run is given.
      cache_directory: Where factorizations are kept between calls; None for nowhere.
      progress: Is told what is being computed.

    Returns:
      The plan.

    Raises:
      ValueError: If no mechanism fits, or the privacy target cannot be met.
    """
    candidates: list[Candidate] = []
    left_out: list[LeftOut] = []
    proposals = _with_timers if setting.sampling is None else _with_sampling
    for found in proposals(setting, cache_directory, progress):
        if isinstance(found, LeftOut):
            left_out.append(found)
            continue
        limit = setting.noise_memory
        if limit is not None and found.kept_bytes > limit:
            left_out.append(
                LeftOut(
                    found.name,
                    f"keeps {found.kept_bytes / 1e9:.3g} GB of noise between rounds, more than "
                    f"{limit / 1e9:.3g} GB",
                )
            )
            continue
        candidates.append(found)
    if not candidates:
        raise ValueError(
            "no mechanism fits: allow more noise memory, a smaller model or fewer rounds."
        )
    candidates.sort(key=lambda candidate: candidate.effective_rmse)
    recommended = _recommended(candidates)
    return Plan(
        setting, tuple(candidates), tuple(left_out), recommended, _reason(candidates, recommended)
    )


def _recommended(candidates: list[Candidate]) -> Candidate:
    ties = [
        candidate
        for candidate in candidates
        if candidate.effective_rmse <= (1.0 + _TIE) * candidates[0].effective_rmse
    ]
    return min(ties, key=lambda candidate: candidate.cost.seconds_per_round)


def _reason(candidates: list[Candidate], recommended: Candidate) -> str:
    if len(candidates) == 1:
        return f"{recommended.name} is the only mechanism that fits."
    best = candidates[0]
    if recommended is not best:
        return (
            f"{recommended.name} has an effective RMSE within {100 * _TIE:g} % of the least, that "
            f"of {best.name}, and its noise costs {recommended.cost.seconds_per_round:.2g} instead "
            f"of {best.cost.seconds_per_round:.2g} seconds a round."
        )
    second = candidates[1]
    share = 100.0 * (second.effective_rmse / best.effective_rmse - 1.0)
    return (
        f"{best.name} has the smallest effective RMSE of the {len(candidates)} mechanisms that "
        f"fit, {best.effective_rmse:.4g}; the next, {second.name}, has {share:.1f} % more."
    )


_Proposals = Iterator[Candidate | LeftOut]


def _with_timers(
    setting: Setting, cache_directory: pathlib.Path | None, progress: Callable[[str], None]
) -> _Proposals:
    """Mechanisms for devices with participation timers: one noise multiplier for all."""
    schema = setting.participation
    assert schema is not None
    rounds = setting.num_rounds
    multiplier = accounting.noise_multiplier(setting.epsilon, setting.delta)
    bound = lower_bounds.compute(_workload(rounds), schema)
    for mechanism, options, compute in _for_schema(setting, schema, cache_directory):
        if compute is None:
            yield LeftOut(_label(mechanism, options), str(options["reason"]))
            continue
        progress(_label(mechanism, options))
        factorization = _fetch(cache_directory, mechanism, options, rounds, schema, compute)
        yield _candidate(
            setting,
            mechanism,
            options,
            factorization,
            schema,
            multiplier,
            None if bound is None else bound.rmse,
        )


def _with_sampling(
    setting: Setting, cache_directory: pathlib.Path | None, progress: Callable[[str], None]
) -> _Proposals:
    """Mechanisms of a data centre: amplified banded ones, and a fixed order of epochs."""
    assert setting.sampling is not None
    rounds, batch = setting.num_rounds, setting.clients_per_round
    most = band_choice.most_bands(rounds, setting.population, batch)
    single = SingleParticipation()
    for num_bands in band_choice.powers_of_two(most):
        if num_bands > 1 and rounds > _MOST_ROUNDS_OF_BANDED:
            yield LeftOut(
                f"banded {num_bands}",
                f"is optimised for at most {_MOST_ROUNDS_OF_BANDED} rounds",
            )
            continue
        progress(f"banded {num_bands}, amplified")
        scheme = sampling_schemes.create(
            setting.sampling,
            num_rounds=rounds,
            num_bands=num_bands,
            population=setting.population,
            clients_per_round=batch,
        )
        candidate = _candidate(
            setting,
            "identity" if num_bands == 1 else "banded",
            {} if num_bands == 1 else {"num_bands": num_bands},
            band_choice.banded_matrix(rounds, num_bands, cache_directory),
            single,
            band_choice.noise_multiplier(scheme, setting.epsilon, setting.delta, cache_directory),
            None,
        )
        yield dataclasses.replace(candidate, num_bands=num_bands, sampling=scheme)
    if rounds > _MOST_ROUNDS_OF_OPTIMAL:
        yield LeftOut("optimal", f"is optimised for at most {_MOST_ROUNDS_OF_OPTIMAL} rounds")
        return
    # A fixed order of all batches: everybody returns after an epoch, and nothing is amplified.
    schema = FixedEpochOrder(math.ceil(rounds / most), most)
    progress("optimal for a fixed order of epochs")
    factorization = _fetch(
        cache_directory,
        "optimal",
        {},
        rounds,
        schema,
        lambda: factorizations.optimal(
            workloads.prefix_sum(rounds), schema, relative_gap=band_choice.RELATIVE_GAP
        ),
    )
    bound = lower_bounds.compute(_workload(rounds), schema)
    yield _candidate(
        setting,
        "optimal",
        {},
        factorization,
        schema,
        accounting.noise_multiplier(setting.epsilon, setting.delta),
        None if bound is None else bound.rmse,
    )


_Compute = Callable[[], Factorization]


def _for_schema(
    setting: Setting, schema: Participation, cache_directory: pathlib.Path | None
) -> Iterator[tuple[str, dict[str, Any], _Compute | None]]:
    """Mechanism, options, and how to compute it, or None and a reason among the options."""
    rounds = setting.num_rounds
    yield "identity", {}, lambda: factorizations.identity(rounds)
    for decoder in ("online", "full"):
        yield (
            "tree",
            {"decoder": decoder},
            lambda decoder=decoder: factorizations.tree_aggregation(rounds, decoder),  # type: ignore[misc]
        )
    for num_buffers in _BUFFERS:
        yield (
            "blt",
            {"num_buffers": num_buffers},
            lambda buffers=num_buffers: factorizations.blt(rounds, buffers, schema),  # type: ignore[misc]
        )
    separation = _separation(schema, rounds)
    for num_bands in sorted({min(bands, rounds) for bands in _BANDS_OF_INVERSE}):
        options: dict[str, Any] = {"num_bands": num_bands}
        if rounds > _MOST_ROUNDS_OF_BANDED_INVERSE:
            options["reason"] = f"is optimised for at most {_MOST_ROUNDS_OF_BANDED_INVERSE} rounds"
            yield "banded_inverse", options, None
        else:
            yield (
                "banded_inverse",
                options,
                lambda bands=num_bands: factorizations.banded_inverse(rounds, bands, schema),  # type: ignore[misc]
            )
    affordable = _affordable_bands(setting, separation)
    if affordable < separation:
        yield (
            "banded",
            {
                "num_bands": separation,
                "reason": f"keeps more noise than allowed; bands that fit: {affordable}",
            },
            None,
        )
    yield (
        "toeplitz",
        {"num_bands": affordable},
        lambda: factorizations.toeplitz(rounds, affordable, schema),
    )
    for num_bands in sorted({bands for bands in _FEWER_BANDS if bands < affordable} | {affordable}):
        options = {"num_bands": num_bands}
        if rounds > _MOST_ROUNDS_OF_BANDED:
            options["reason"] = f"is optimised for at most {_MOST_ROUNDS_OF_BANDED} rounds"
            yield "banded", options, None
        elif num_bands > 1:
            yield (
                "banded",
                options,
                # The optimum for this schema as well, and kept for others and for sampling.
                lambda bands=num_bands: band_choice.banded_matrix(  # type: ignore[misc]
                    rounds, bands, cache_directory
                ),
            )
    if schema.most_participations(rounds) == 1 and rounds <= _MOST_ROUNDS_OF_OPTIMAL:
        yield (
            "optimal",
            {},
            lambda: factorizations.optimal(
                workloads.prefix_sum(rounds), relative_gap=band_choice.RELATIVE_GAP
            ),
        )


def _separation(schema: Participation, num_rounds: int) -> int:
    if isinstance(schema, SingleParticipation) or schema.most_participations(num_rounds) == 1:
        return num_rounds
    return min(schema.separation, num_rounds)


def _affordable_bands(setting: Setting, most: int) -> int:
    """The most bands whose noise fits into the memory, at least 1: b bands keep b - 1 rows."""
    if setting.noise_memory is None:
        return most
    rows = int(setting.noise_memory // (_BYTES_OF_FLOAT * setting.model_size))
    return min(most, rows + 1)


def _fetch(
    cache_directory: pathlib.Path | None,
    mechanism: str,
    options: dict[str, Any],
    num_rounds: int,
    schema: Participation,
    compute: _Compute,
) -> Factorization:
    # Banded matrices, which do not depend on the schema, come from the cache already.
    if mechanism in ("identity", "tree", "banded"):
        return compute()
    description = {
        "mechanism": mechanism,
        "num_rounds": num_rounds,
        "participation": participations.to_dict(schema),
        **options,
    }
    if mechanism == "optimal":
        description["relative_gap"] = band_choice.RELATIVE_GAP
    return factorization_cache.fetch(cache_directory, description, compute)


def _label(mechanism: str, options: dict[str, Any]) -> str:
    words = [str(value) for name, value in options.items() if name != "reason"]
    return " ".join([mechanism, *words])


def _candidate(
    setting: Setting,
    mechanism: str,
    options: dict[str, Any],
    factorization: Factorization,
    schema: Participation,
    multiplier: float,
    bound: float | None,
) -> Candidate:
    variances = factorization.per_round_variance(_workload(setting.num_rounds), schema)
    rmse = float(np.sqrt(np.mean(variances)))
    max_error = float(np.sqrt(np.max(variances)))
    recursion = factorization.noise_recursion()
    return Candidate(
        mechanism=mechanism,
        num_bands=options.get("num_bands"),
        options=tuple(options.items()),
        participation=schema,
        sampling=None,
        rmse=rmse,
        max_error=max_error,
        noise_multiplier=multiplier,
        effective_rmse=rmse * multiplier / setting.clients_per_round,
        max_effective_error=max_error * multiplier / setting.clients_per_round,
        over_lower_bound=None if bound is None else rmse / bound,
        kept_bytes=(
            _BYTES_OF_FLOAT * setting.model_size * noise_recursions.floats_per_parameter(recursion)
        ),
        cost=noise_storage.choose(recursion, setting.model_size),
        factorization=factorization,
    )


def _workload(num_rounds: int) -> workloads.Workload:
    return workloads.describe({"name": "prefix_sum"}, num_rounds)
