"""Mechanisms: a matrix, a way to take part, and a noise multiplier.

A :class:`Mechanism` is frozen, compared by value and printed in two lines. A guarantee is asked of
it and of nothing else, so that matrix, participation and noise cannot be of different runs. One
that goes on after its last round (:meth:`Mechanism.extended`) knows every horizon that it had.
"""

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dp_accounting import dp_event
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from mf_aggregators import accounting, checkpoints, inputs
from mf_aggregators import participation as participations
from mf_aggregators.checkpoints import CheckpointError
from mf_aggregators.factorizations import ExtensionError, Factorization
from mf_aggregators.kernel import composition, losses, numbers
from mf_aggregators.kernel.claim import ONLY_IF, Claim, Guarantee, check
from mf_aggregators.kernel.integers import DEFAULT_LARGEST_COHORT, IntegerSums
from mf_aggregators.kernel.losses import DEFAULT_NUM_COORDINATES
from mf_aggregators.kernel.numbers import counted, rounded_down, stated_pair
from mf_aggregators.kernel.release import Release
from mf_aggregators.kernel.sensitivity import Unit
from mf_aggregators.noise import places
from mf_aggregators.noise.places import NoiseStorage
from mf_aggregators.observed import Observed
from mf_aggregators.participation import (
    Participation,
    Sampler,
    SamplingScheme,
    SingleParticipation,
)
from mf_aggregators.participation.certificate_search import Certification
from mf_aggregators.privacy import ledgers
from mf_aggregators.privacy.ledgers import GivenLedger, RoundTimes
from mf_aggregators.privacy.statements import RunFacts, Statement
from mf_aggregators.workloads import Workload

# The first share of the noise multiplier that is added for errors of a computed C.
_ERRORS_OF_C = 1e-11
# Relative tolerance for the stated noise multiplier of an extended run.
_TOLERANCE = 1e-12
# Releases do not depend on delta.
_ANY_DELTA = 0.5
# The most losses of a run: more would take gigabytes.
_MOST_LOSSES = 5_000_000


@dataclasses.dataclass(frozen=True, eq=False)
class Mechanism:
    """A factorization, who may take part in which rounds, and how much noise there is.

    Use it when matrix, participation and noise multiplier of a run are fixed: guarantees,
    aggregators and statements are made from it.

    Two are equal if a run of one is a run of the other: the same matrix, bit for bit, the same
    participation, noise multiplier, and horizons before.

    Attributes:
      factorization: The strategy matrix C with its structure, for n rounds.
      participation: The schema that clients keep to, as one of ``participation.MinSeparation``; or
        the scheme by which they are drawn, as ``participation.PoissonSampling``, for a guarantee
        that sampling amplifies.
      noise_multiplier: The standard deviation of Z over (clip norm times the sensitivity of C under
        the schema); with a sampling scheme, times the largest column norm of C. 0 for no noise.
      extends: The mechanism of the horizon before, of a run that went on after its last round: see
        :meth:`extended`. None for others.

    Raises:
      TypeError: If an attribute is of another type.
      ValueError: If the noise multiplier is negative or not finite, the scheme is not for the
        rounds and the bands of the factorization, or an extension does not follow on ``extends`` or
        is stated to have more noise than there is.

    Example:
      >>> import mf_aggregators as mfa
      >>> timers = mfa.participation.MinSeparation(separation=4)
      >>> mechanism = mfa.calibrate(
      ...     mfa.factorizations.banded(16, num_bands=4), timers, epsilon=8.0, delta=1e-6
      ... )
      >>> print(mechanism)
      banded factorization for 16 rounds, noise multiplier 0.6529
      participations at least 4 rounds apart
      >>> guarantee = mechanism.guarantee(delta=1e-6)
      >>> print(str(guarantee).splitlines()[0])
      (8, 1e-06)-DP for each client over 16 rounds: participations at least 4 rounds apart
      >>> guarantee.assumptions[0].sentence
      'Every client keeps to the stated participation.'
    """

    factorization: Factorization
    participation: Participation
    noise_multiplier: float
    extends: "Mechanism | None" = None
    # The claim that noise is released by: rows and sigma.
    _released: Claim = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        Factorization.check_own(self.factorization)
        multiplier = numbers.non_negative_number(self.noise_multiplier, "noise_multiplier")
        object.__setattr__(self, "noise_multiplier", multiplier)
        if isinstance(self.participation, SamplingScheme):
            object.__setattr__(self, "participation", SamplingScheme.accounted(self.participation))
            self.factorization.check_scheme(self.participation)
        else:
            object.__setattr__(self, "participation", participations.check(self.participation))
        if self.extends is not None and type(self.extends) is not Mechanism:
            raise TypeError(f"extends must be a Mechanism, found {numbers.shown(self.extends)}.")
        _check_extends(self)
        sigma = multiplier * self.factorization.sensitivity(self.schema).value
        if self.extends is not None:
            # A run that was extended draws its noise for its first horizon.
            sigma = min(sigma, self.horizons[0].sigma)
        rows, schema = self.factorization.noise_recursion(), self.schema.as_schema()
        object.__setattr__(self, "_released", Claim(rows, schema, sigma, _ANY_DELTA))

    def __init_subclass__(cls, **options: Any) -> None:
        raise TypeError("Mechanism has no subclasses: its guarantee would be stated for them.")

    @classmethod
    def of_one_schema(
        cls, factorization: Factorization, participation: Participation, noise_multiplier: float
    ) -> "Mechanism":
        """Returns the mechanism of a run that kept to one schema in all of its horizons.

        Args:
          factorization: The matrix, which may extend others.
          participation: The schema.
          noise_multiplier: That of the whole run, under the schema.

        Raises:
          ValueError: As the constructor does.
        """
        stddev = noise_multiplier * factorization.sensitivity(participation).value
        before: Mechanism | None = None
        for rounds in factorization.horizons:
            horizon = factorization.at_horizon(rounds)
            multiplier = stddev / horizon.sensitivity(participation).value
            before = cls(horizon, participation, multiplier, before)
        return cls(factorization, participation, noise_multiplier, before)

    @property
    def num_rounds(self) -> int:
        """The number of rounds n."""
        return self.factorization.num_rounds

    @property
    def sampling(self) -> SamplingScheme | None:
        """The scheme by which clients are drawn; None for those who keep to a schema."""
        return self.participation if isinstance(self.participation, SamplingScheme) else None

    @property
    def schema(self) -> Participation:
        """The schema that noise is relative to: one participation if clients are drawn."""
        return self.participation if self.sampling is None else SingleParticipation()

    @property
    def horizons(self) -> "tuple[Mechanism, ...]":
        """The mechanism of every horizon that a run had, the first one first, this one last."""
        before = () if self.extends is None else self.extends.horizons
        return (*before, self)

    @property
    def earlier_participations(self) -> dict[int, Participation]:
        """The schema of each horizon before this one, by its number of rounds."""
        return {each.num_rounds: each.schema for each in self.horizons[:-1]}

    @property
    def sigma(self) -> float:
        """The standard deviation of Z, in units of the largest norm of the vector that is summed.

        It is that of the whole run.
        """
        return self._released.sigma

    def claim(self, delta: float) -> Claim:
        """Returns the claim that guarantees are proved of.

        Args:
          delta: Above 0 and below 1.
        """
        return dataclasses.replace(self._released, delta=delta, **self._drawn)

    @property
    def _drawn(self) -> dict[str, Any]:
        """The parts of a claim that say how clients are drawn; nothing where a schema is kept."""
        if self.sampling is None:
            return {}
        return {"taking_part": self.sampling.as_draws(), "basis": None}

    def release(self, norm: float, sums: IntegerSums, **options: Any) -> Release:
        """Returns the release of this mechanism's noise.

        Args:
          norm: The largest norm of the vector that is summed.
          sums: The grid of vectors.
          **options: Further ones of ``kernel.release.Release``.
        """
        return Release(self.proved_horizons, norm, sums, **options)

    @property
    def proved_horizons(self) -> tuple[Guarantee, ...]:
        """The guarantee of every horizon that noise is released by, the first one first.

        A release depends on its rows and sigma, and not on delta or on who takes part.
        """
        return tuple(check(each._released) for each in self.horizons)

    def largest_cohort(self, asked: int | None, secure_aggregation_bits: int | None) -> int | None:
        """Returns the most clients that a round may have, by default.

        Args:
          asked: A number that is returned unchanged; None for the default.
          secure_aggregation_bits: The width of a secure sum's integers; None for an open sum.

        Returns:
          All clients of the run for a secure sum whose number of clients is drawn at random: a
          refused round would tell that its batch was larger than this. None for the default of
          ``kernel.integers`` else.
        """
        scheme = self.sampling
        if asked is not None or scheme is None or secure_aggregation_bits is None:
            return asked
        return scheme.largest_cohort if scheme.has_random_sizes else None

    def guarantee(self, delta: float, *, certification: Certification | None = None) -> Guarantee:
        """Returns the guarantee of a run that keeps to the participation.

        Args:
          delta: Above 0 and below 1; with a sampling scheme, at least 1e-12.
          certification: How an epsilon is certified where clients draw for themselves; by default
            with seed 0, kept in the user's cache.

        Returns:
          The guarantee: epsilon, rho, what an attacker can do, the certificate.

        Raises:
          ValueError: If delta is out of its range.
        """
        # Not by ``claim``: rows and sigma have to be those of the release.
        whole = dataclasses.replace(self._released, delta=delta, **self._drawn)
        proved = check(whole)
        if proved.run is None or proved.run.columns is None:
            return proved
        # The certificate is for the noise multiplier and the columns that the kernel computes.
        found = (certification or Certification.default()).amplified(proved.run, delta)
        return check(dataclasses.replace(whole, certificate=found.certificate))

    def unit_guarantee(
        self,
        delta: float,
        *,
        num_clients: int = 1,
        window: int | None = None,
        num_windows: int | None = None,
    ) -> Guarantee:
        """Returns the guarantee of a person with several clients, or if client ids change.

        It is without amplification, and holds if each client keeps to the participation and nobody
        has more clients. Data of a device in other windows are covered only if they are in
        ``num_windows``.

        Args:
          delta: Above 0 and below 1.
          num_clients: The most clients of one person; with windows, the most devices.
          window: The rounds W after which client ids change: a client is in one of the windows of
            rounds 0 to W - 1, W to 2 W - 1, and so on. None if ids stay.
          num_windows: In how many windows one device is: 1 for the guarantee of a client in one
            window; None for a device in all of them, whose timer starts again in each.

        Returns:
          The guarantee, which says who is protected.

        Raises:
          ValueError: If a number is out of its range.
        """
        whole = check(self.claim(delta))
        unit = Unit(whole.schema, num_clients, window, num_windows)
        return check(whole.without_draws(taking_part=unit))

    def observed(
        self,
        ledger: GivenLedger | RoundTimes,
        *,
        round_counts: Iterable[int] | str | os.PathLike[str] | None = None,
        clients_per_round: float | None = None,
        sampling_seed: int | None = None,
        sampler: Sampler | None = None,
    ) -> Observed:
        """Compares a ledger with the participation, for the observed guarantee of a run.

        A run that kept it has :meth:`guarantee`. An observed guarantee, which may be better, holds
        only if participation did not depend on released models or on data.

        Args:
          ledger: Who took part in which round: a ``Ledger``, its file, a mapping from each client
            to its rounds, or a list with the clients of each released round (``Ledger.of``); or,
            where nobody knows that, the times of the rounds and the timers of devices.
          round_counts: How many clients each round summed, by the server's own count; or the file
            of these numbers, which ``ledgers.round_counts`` reads. A ledger that lacks lines
            has too good a guarantee: without these counts, or if the ledger has others, nothing
            better than the plan is stated.
          clients_per_round: The cohort size that is claimed of the run, which the ledger is
            compared with; None for none.
          sampling_seed: With a sampling scheme, the secret seed of the data sampler: then every
            draw is compared with the ledger. None if it is not known.
          sampler: In the place of the seed: the sampler that drew, for one that knows more than its
            scheme, such as whom it could not ask.

        Returns:
          What was observed, of which a guarantee can be asked.

        Raises:
          LedgerError: If a file cannot be read.
          ValueError: If more rounds were released than there are, the ledger is broken, a seed is
            given for one that does not record a sampling scheme, or the sampler is of another
            scheme; or times are given for a sampling scheme.
        """
        return dataclasses.replace(
            Observed.of_run(self, ledger, sampling_seed, sampler),
            round_counts=ledgers.round_counts(round_counts),
            clients_per_round=clients_per_round,
        )

    def extended(
        self,
        num_rounds: int,
        participation: Participation | None = None,
        *,
        workload: Workload | int | None = None,
        num_parameters: int | None = None,
        largest_cohort: int | None = None,
        storage: str = NoiseStorage.AUTO.value,
        factorization: Factorization | None = None,
    ) -> "Mechanism":
        """Returns the mechanism of an extended run: the same noise, for more rounds.

        The rows of noise of the rounds that there are stay as they are, bit for bit.

        Args:
          num_rounds: The rounds of the whole run, above n.
          participation: The schema of the whole run, which has to allow what every horizon before
            allowed; that of this one by default.
          workload: The workload of the whole run, for further rows that are optimised; the prefix
            sum by default.
          num_parameters: The numbers of a row of noise, for a run that an aggregator makes:
            roundings of more rounds then take their share. None leaves it out.
          largest_cohort: The most clients in a round, as ``mf_dp_aggregator`` is told; None for
            what it takes without a secure sum.
          storage: Where the noise is kept, as ``mf_dp_aggregator`` is told.
          factorization: That of the whole run, where it is known, as from a checkpoint; None has
            it follow from this one's.

        Returns:
          The mechanism, with the noise multiplier that is left relative to the larger sensitivity.

        Raises:
          ExtensionError: If the factorization cannot have more rounds, or roundings of rows of
            ``num_parameters`` would take too much: the message names how many rounds are possible.
          ValueError: If the whole forbids what a horizon before allowed, clients are drawn by a
            sampling scheme, which is for all of its rounds, or the factorization that is given is
            for other rounds.
        """
        if self.sampling is not None:
            raise ValueError(
                f"the scheme {self.sampling.name} draws clients for all of its rounds, which its "
                "guarantee rests on: a run with it cannot be extended."
            )
        schema = self.schema if participation is None else participations.check(participation)
        if factorization is None:
            factorization = self.factorization.extended(
                num_rounds, participation=schema, workload=workload
            )
        elif factorization.num_rounds != num_rounds:
            raise ValueError(
                f"the factorization is for {factorization.num_rounds} rounds, not {num_rounds}."
            )
        sensitivity = factorization.sensitivity(schema).value
        # Its rows of noise have the standard deviation that they began with.
        whole = Mechanism(factorization, schema, _divided(self, sensitivity), self)
        if num_parameters is None or self.horizons[0].noise_multiplier == 0.0:
            return whole
        size, made = num_parameters, factorization
        kept = NoiseStorage(storage)
        if kept is NoiseStorage.AUTO:
            # The choice for the first horizon holds for all.
            first = self.horizons[0].factorization.noise_recursion()
            kept = places.NoiseCost.of_run([first], size).storage
        sums = IntegerSums(DEFAULT_LARGEST_COHORT if largest_cohort is None else largest_cohort)

        def covered(each: Mechanism) -> float:
            inputs.check_charged(size, each.num_rounds)
            return each.release(1.0, sums, is_on_disk=kept is NoiseStorage.DISK).covered(size)

        try:
            multiplier = covered(whole) / sensitivity
        except ValueError as error:

            def is_possible(rounds: int) -> bool:
                part = made.leading(rounds)
                with contextlib.suppress(ValueError):
                    covered(self.extended(rounds, schema, factorization=part))
                    return True
                return False

            most = _most_rounds(self.num_rounds, num_rounds, is_possible)
            raise ExtensionError(
                f"{str(error).rstrip('.')}; at most {most} rounds are possible, to within 1 %."
            ) from error
        return dataclasses.replace(whole, noise_multiplier=multiplier)

    def statement(
        self,
        facts: RunFacts,
        delta: float,
        *,
        certification: Certification | None = None,
        plan: Guarantee | None = None,
    ) -> Statement:
        """Returns the privacy statement of a run that is under way.

        Args:
          facts: What is to be said of the run besides.
          delta: Above 0 and below 1.
          certification: As :meth:`guarantee` takes it.
          plan: What :meth:`guarantee` returned, which is not proved again then.

        Returns:
          The statement, in words (``to_markdown``) and as JSON (``to_dict``).
        """
        return Statement(
            facts=facts,
            plan=plan or self.guarantee(delta, certification=certification),
            earlier_plans=tuple(each.guarantee(delta) for each in self.horizons[:-1]),
        )

    def event(self) -> dp_event.DpEvent:
        """Returns the run as an event of dp-accounting, to be composed with other runs.

        ``accounting.composed_epsilon`` composes such events, amplified where clients are drawn;
        ``accounting.event`` says for which neighbouring relation accountants of dp-accounting take
        them, and what for.
        """
        if self.sampling is not None:
            columns = self.factorization.columns_for(self.sampling)
            return accounting.event(self.sampling.run(self.noise_multiplier, columns))
        return accounting.event(self.noise_multiplier)

    def privacy_loss_distribution(
        self, *, interval: float = composition.INTERVAL
    ) -> PrivacyLossDistribution:
        """Returns the privacy losses of a run, to be composed by dp-accounting with other ones.

        Losses are rounded up, so that every delta of them and of what they compose to is at least
        that of the run. Neighbouring data sets differ in a client whose updates are zeroed: that is
        adding or removing one. Shuffled runs and those of clients who draw for themselves have the
        losses of all participations of a client, without amplification.

        Args:
          interval: What losses are multiples of: ``value_discretization_interval`` of what they
            are to be composed with.

        Returns:
          The losses. They are infinite also with twice the probability by which the noise that is
          drawn may fail (``accounting.zcdp_delta``), which covers all deltas of up to one half, and
          with what composing rounds of a sampled run may lose to rounding.

        Raises:
          TailError: If so little noise cannot be accounted for: a ValueError.
          ValueError: If there is no noise, or the interval is out of its range.
        """
        interval = numbers.positive_number(interval, "interval")
        sigma = numbers.positive_number(self.noise_multiplier, "noise_multiplier")
        run = None
        if self.sampling is not None:
            run = self.sampling.run(sigma, self.factorization.columns_for(self.sampling))
            # Of all participations of a client together.
            sigma = sigma if run.composes_amplified else run.noise_multiplier
        if _MOST_LOSSES * interval < 0.5 / sigma**2 + 12.0 / sigma:
            raise ValueError(
                f"losses of so little noise take more than {_MOST_LOSSES} multiples of the "
                f"interval {interval:g}: use a larger interval."
            )
        if run is None:
            found, part, compositions = losses.gaussian_losses(sigma, interval), sigma, 0
        else:
            found, part = run.losses(interval), run.part_noise_multiplier
            compositions = run.draws.most_participations
        drawn = losses.failure_probability(part, DEFAULT_NUM_COORDINATES)
        whole = losses.failure_probability(part, DEFAULT_NUM_COORDINATES, compositions)
        infinite = drawn + whole
        with_infinite: PrivacyLossDistribution = (
            PrivacyLossDistribution.create_from_rounded_probability(
                {0: 1.0 - infinite}, infinite, interval
            )
        )
        return found.compose(with_infinite)

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping of all but the matrix, which :meth:`from_dict` takes back."""
        return {
            "mechanism": self.factorization.mechanism,
            "horizons": [
                {
                    "num_rounds": each.num_rounds,
                    "participation": each.participation.to_dict(),
                    "noise_multiplier": each.noise_multiplier,
                }
                for each in self.horizons
            ],
        }

    @classmethod
    def from_dict(cls, description: Mapping[str, Any], factorization: Factorization) -> "Mechanism":
        """Returns the mechanism that :meth:`to_dict` described.

        Args:
          description: The mapping.
          factorization: Its matrix, of the last horizon.

        Raises:
          ValueError: If the description is broken, or of another factorization.
        """
        mechanism: Mechanism | None = None
        try:
            horizons = description["horizons"]
            for horizon in horizons:
                described = horizon["participation"]
                mechanism = cls(
                    factorization.at_horizon(horizon["num_rounds"]),
                    participations.from_dict(described)
                    if "schema" in described
                    else SamplingScheme.from_dict(described),
                    horizon["noise_multiplier"],
                    mechanism,
                )
        except (KeyError, TypeError) as error:
            raise ValueError(f"it describes no mechanism ({error})") from error
        if mechanism is None or mechanism.num_rounds != factorization.num_rounds:
            raise ValueError(f"it describes none of {factorization.num_rounds} rounds")
        return mechanism

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        workload: Mapping[str, Any] | None = None,
        overwrite: bool = True,
    ) -> None:
        """Writes the mechanism: a checkpoint of its factorization with ``mechanism.json`` in it.

        Args:
          directory: The directory to create. ``checkpoints.load`` reads its factorization alone.
          workload: What the stated errors are for, as ``checkpoints.save`` takes it.
          overwrite: Whether a checkpoint that is there already may be replaced.

        Raises:
          CheckpointError: As ``checkpoints.save`` raises it.
          ValueError: If the workload is none.
        """
        checkpoints.save(
            self.factorization,
            directory,
            workload=workload,
            participation=self.schema,
            overwrite=overwrite,
            mechanism=self.to_dict(),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mechanism):
            return NotImplemented
        return (
            self.participation == other.participation
            and self.noise_multiplier == other.noise_multiplier
            and self.factorization.has_same_matrix(other.factorization)
            and self.extends == other.extends
        )

    def __hash__(self) -> int:
        return hash((self.num_rounds, self.participation, self.noise_multiplier))

    def __str__(self) -> str:
        extends = "" if self.extends is None else f", extending {self.extends.num_rounds}"
        kind = f"{self.factorization.mechanism} factorization for {self.num_rounds} rounds{extends}"
        return (
            f"{kind}, noise multiplier {rounded_down(self.noise_multiplier)}\n{self.participation}"
        )


def calibrate(
    factorization: Factorization,
    participation: Participation,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    rho: float | None = None,
    certification: Certification | None = None,
) -> Mechanism:
    """Returns the mechanism of least noise for a target.

    Use it when a budget is given, and the noise is asked for.

    Args:
      factorization: The strategy matrix.
      participation: The schema that clients keep to, or the scheme by which they are drawn.
      epsilon: The target, above 0, with ``delta``.
      delta: Above 0 and below 1; with a sampling scheme, at least 1e-12.
      rho: In the place of both: the target of approximate zCDP, which sampling does not amplify.
      certification: As :meth:`Mechanism.guarantee` takes it.

    Returns:
      The mechanism, whose guarantee is the target or a little less.

    Raises:
      TypeError: If neither target is given, or both are.
      ValueError: If no noise multiplier gives the target, or an argument is out of its range.

    Example:
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> identity = mfa.factorizations.identity(100)
      >>> round(mfa.calibrate(identity, once, rho=0.5).noise_multiplier, 6)
      1.0
    """
    if (epsilon is None) != (delta is None) or (epsilon is None) == (rho is None):
        raise TypeError("give epsilon and delta, or rho: calibrate(..., epsilon=8.0, delta=1e-6).")
    # Checks that matrix and participation fit before a search.
    unknown = Mechanism(factorization, participation, 0.0)
    scheme, share = unknown.sampling, _ERRORS_OF_C
    columns = None if scheme is None else factorization.columns_for(scheme)
    limit = epsilon if rho is None else rho
    assert limit is not None
    at = _ANY_DELTA if delta is None else delta
    if rho is not None:
        multiplier = accounting.noise_multiplier_of_zcdp(rho)
        if scheme is not None:
            multiplier *= scheme.run(1.0, columns).norm_of_all * (1.0 + share)
    elif scheme is None:
        multiplier = accounting.noise_multiplier(limit, at)
    else:
        target = numbers.positive_number(limit, "epsilon")
        if columns is not None:
            certification = certification or Certification.default()
        multiplier = scheme.calibrated(target, at, columns, certification)

    found = dataclasses.replace(unknown, noise_multiplier=multiplier)
    if scheme is not None:
        return found
    proved = found.guarantee(at)
    # Errors of a computed C may take more than the margin of the noise multiplier.
    while (proved.epsilon if rho is None else proved.rho) > limit:
        proved = proved.at(at, found.sigma * (1.0 + share))
        # Above it by more than products are rounded.
        multiplier = found.noise_multiplier * (1.0 + share + 1e-15)
        share *= 2.0
    return dataclasses.replace(unknown, noise_multiplier=multiplier)


@dataclasses.dataclass(frozen=True)
class _Spent:
    """The privacy that a run has spent.

    Attributes:
      planned: The guarantee of the whole run, if it keeps to its participation.
      so_far: That of the rounds in the ledger. A smaller epsilon than the planned one holds only if
        participation did not depend on released models or on data. If the ledger may lack lines,
        that of all planned rounds.
      num_rounds: The rounds in the ledger.
      gap: Why the ledger may lack lines (``Observed.gap``); None for a complete one.
    """

    planned: Guarantee
    so_far: Guarantee
    num_rounds: int
    gap: str | None

    def __str__(self) -> str:
        planned, so_far = (
            stated_pair(each.epsilon, each.delta) for each in (self.planned, self.so_far)
        )
        only_if = f", {ONLY_IF}" if self.so_far.is_observed else ""
        if self.gap is None:
            rounds = counted(self.num_rounds, "round")
            return f"{planned} as planned; {so_far} so far, in {rounds}{only_if}"
        rounds = counted(self.so_far.num_rounds, "planned round")
        better = f"nothing better of the {self.num_rounds} so far, because {self.gap}"
        return f"{planned} as planned; {so_far} for all {rounds}{only_if}, and {better}"


def spent(
    mechanism: Mechanism, ledger: GivenLedger | RoundTimes, delta: float, **options: Any
) -> _Spent:
    """Returns the planned epsilon of a run, and that of the rounds in its ledger.

    Use it when a run is under way, and its epsilon so far is asked for.

    Args:
      mechanism: That of the run.
      ledger: As ``Mechanism.observed`` takes it. A mapping, or a text, is taken for a ledger of all
        rounds.
      delta: Above 0 and below 1.
      **options: As there. Without ``round_counts``, so far nothing better than the plan is stated.

    Raises:
      LedgerError: If a file cannot be read, or the ledger is broken.
      ValueError: If delta is out of its range, or more rounds were released than there are.

    Example:
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> mechanism = mfa.Mechanism(mfa.factorizations.banded(8, num_bands=4), once, 2.0)
      >>> print(mfa.spent(mechanism, [["ada", "bo"]], 1e-6, round_counts=[2]).planned.epsilon > 1.0)
      True
    """
    found = mechanism.observed(ledger, **options)
    is_drawn = mechanism.sampling is not None and found.keeps_participation is True
    rounds, gap = found.participation.num_rounds, None if is_drawn else found.gap
    return _Spent(mechanism.guarantee(delta), found.guarantee(delta), rounds, gap)


def load(directory: str | os.PathLike[str]) -> Mechanism:
    """Reads a saved mechanism (:meth:`Mechanism.save`), or that of a training run.

    Use it when a run has ended, or goes on, and its guarantee is asked for again.

    Nothing signs the files of a run. What its ``privacy.json`` plans is believed unless the matrix
    beside it contradicts it, or the ``config.json``, where that is there. The epsilon that it
    states is proved again, except one that is proved by Monte Carlo: :meth:`Mechanism.guarantee`
    does that.

    Args:
      directory: The directory, or that of the run, whose ``privacy.json`` says what was planned.

    Returns:
      The mechanism, with all horizons of a run that was extended.

    Raises:
      CheckpointError: If the directory is a checkpoint of a factorization alone; or a file is
        missing, altered or of a newer format, or says what the factorization is not; or files of a
        run contradict one another; or its epsilon is not proved; or its noise came from a fixed
        seed, so that it guarantees nothing.

    Example:
      >>> import pathlib, tempfile
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> mechanism = mfa.Mechanism(mfa.factorizations.identity(8), once, noise_multiplier=2.0)
      >>> directory = pathlib.Path(tempfile.mkdtemp()) / "mechanism"
      >>> mechanism.save(directory)
      >>> mfa.load(directory) == mechanism
      True
    """
    factorization, described, path = checkpoints.load_with_mechanism(directory)
    try:
        found = Mechanism.from_dict(described, factorization)
        for each, horizon in zip(found.horizons, described["horizons"], strict=True):
            if "epsilon" in horizon and (each.sampling is None or each.sampling.has_groups):
                each.guarantee(horizon["delta"]).prove(horizon["epsilon"])
        return found
    except ValueError as error:
        raise CheckpointError(f"{path} is broken: {str(error).rstrip('.')}.") from error


def _most_rounds(possible: int, impossible: int, is_possible: Callable[[int], bool]) -> int:
    """The most rounds that are found to be possible, by bisection to 1 % of them."""
    while impossible - possible > 1 + possible // 100:
        middle = max(possible + 1, math.isqrt(possible * impossible))
        if is_possible(middle):
            possible = middle
        else:
            impossible = middle
    return possible


def _check_extends(mechanism: Mechanism) -> None:
    """Checks that the horizons of a mechanism are those of its factorization."""
    factorization, before = mechanism.factorization, mechanism.extends
    horizons = () if before is None else before.horizons
    if tuple(each.num_rounds for each in horizons) != factorization.horizons:
        raise ValueError(
            f"the factorization extends {list(factorization.horizons)} rounds, and the mechanism "
            f"{[each.num_rounds for each in horizons]}: use Mechanism.extended, which makes both."
        )
    if before is None:
        return
    if mechanism.sampling is not None or before.sampling is not None:
        raise ValueError("a run whose clients a sampling scheme draws cannot be extended.")
    if not before.factorization.has_same_matrix(factorization.at_horizon(before.num_rounds)):
        raise ValueError("the factorization does not extend that of the horizon before.")
    _check_extended({each.num_rounds: each.schema for each in horizons}, mechanism.schema)
    found = _divided(before, factorization.sensitivity(mechanism.schema).value)
    if mechanism.noise_multiplier > found * (1.0 + _TOLERANCE):
        raise ValueError(
            f"the whole run is stated to have the noise multiplier {mechanism.noise_multiplier!r}, "
            f"and its noise, which stays what it was, has {found!r} for the rounds and "
            "participations of the whole: state that one, or less."
        )


def _divided(before: Mechanism, sensitivity: float) -> float:
    """The noise multiplier of a whole run that is extended.

    The leading part of its strategy matrix C' is the C that the run began with. So whoever released
    the rows of C^-1 Z, and goes on with those of C'^-1 Z for the same Z, has run the mechanism of
    C' from its first round on, and the standard deviation of Z stays what it was. It is the
    guarantee of all rounds, also where what was released had a part in the decision to go on:
    docs/privacy-proofs.md says why.
    """
    return before.horizons[0].sigma / sensitivity


def _check_extended(earlier: Mapping[int, Participation], whole: Participation) -> None:
    """Checks that each horizon of an extended run allows all participations of the one before.

    Then the extended horizon allows whatever clients did who kept the timer in force in each round:
    a timer looks at all earlier rounds of its client, so that by induction over the horizons, these
    and the next one together keep the schema of the horizon that the round belongs to.

    Args:
      earlier: The schema of each horizon that was extended, by its number of rounds.
      whole: The schema of the extended horizon.

    Raises:
      TypeError: If one of them is no schema.
      ValueError: If a horizon forbids what the one before it allowed, so that the run may have
        broken it already; or a number of rounds is not a positive integer.
    """
    schemas = [*sorted(earlier.items()), (None, participations.check(whole))]
    for (num_rounds, before), (following, after) in itertools.pairwise(schemas):
        assert num_rounds is not None
        if not participations.check(after).allows(before, num_rounds):
            name = "extended horizon" if following is None else f"horizon of {following} rounds"
            raise ValueError(
                f"the horizon of {num_rounds} rounds allows {before}, and the {name} {after}: what "
                f"took place already may be more than the {name} allows. Keep the separation, and "
                "at least as many participations."
            )
