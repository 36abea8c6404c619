"""Mechanisms: a matrix, a way to take part, and a noise multiplier.

A :class:`Mechanism` is frozen, compared by value and printed in two lines. Only a mechanism has
guarantees, so that matrix, participation and noise of a guarantee cannot come from different runs.
A mechanism that was extended to more rounds (:meth:`Mechanism.extended`) has the mechanism of every
earlier number of rounds (its *horizons*).
"""

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping

from dp_accounting import dp_event
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from mf_aggregators import accounting, checkpoints
from mf_aggregators import participation as participations
from mf_aggregators.checkpoints import CheckpointError
from mf_aggregators.factorizations import ExtensionError, Factorization
from mf_aggregators.kernel import composition, losses, numbers
from mf_aggregators.kernel.claim import ONLY_IF, Claim, Guarantee, TakingPart, check
from mf_aggregators.kernel.integers import DEFAULT_LARGEST_COHORT, IntegerSums
from mf_aggregators.kernel.numbers import counted, rounded_down, stated_pair
from mf_aggregators.kernel.release import Release
from mf_aggregators.kernel.sensitivity import DEFAULT_NUM_COORDINATES, Unit, failure_probability
from mf_aggregators.noise import places
from mf_aggregators.noise.places import NoiseStorage
from mf_aggregators.observed import Observed
from mf_aggregators.participation import Participation, Sampler, SamplingScheme, SingleParticipation
from mf_aggregators.participation.certificate_search import Certification
from mf_aggregators.privacy import ledgers
from mf_aggregators.privacy.ledgers import GivenLedger, RoundTimes
from mf_aggregators.privacy.statements import RunFacts, Statement
from mf_aggregators.workloads import Workload

# calibrate raises the noise multiplier by this share first if errors of a computed C require it.
_ERRORS_OF_C = 1e-11
# Relative tolerance for the stated noise multipliers and sigmas of saved or extended runs.
_TOLERANCE = 1e-12
# The delta of the claim by which noise is released: releases do not depend on delta.
_ANY_DELTA = 0.5
# The most entries of a privacy loss distribution: more would take gigabytes.
_MOST_LOSSES = 5_000_000


@dataclasses.dataclass(frozen=True, eq=False)
class Mechanism:
    """The matrix, participation rule and noise multiplier of a run, which determine its guarantee.

    Use it when matrix, participation and noise multiplier of a run are fixed: guarantees,
    aggregators and statements are made from a mechanism.

    Two mechanisms are equal if they have the same matrix, bit for bit, and the same participation,
    noise multiplier and earlier horizons.

    Attributes:
      factorization: The strategy matrix C with its structure, for n rounds.
      participation: The schema that clients keep to, such as ``participation.MinSeparation``; or
        the scheme by which clients are drawn, such as ``participation.PoissonSampling``, for a
        guarantee that sampling amplifies.
      noise_multiplier: The standard deviation of Z divided by (clip norm times the sensitivity of C
        under the schema). With a sampling scheme, the largest column norm of C replaces the
        sensitivity. 0 for no noise.
      extends: If the run was extended, its mechanism before the extension: see :meth:`extended`.
        None for a run that was not extended.

    Raises:
      MemoryError: If the machine has too little for the C that guarantees are proved of.
      TypeError: If an attribute is of another type.
      ValueError: If the noise multiplier is negative or not finite; if the scheme is for another
        number of rounds or fewer bands than the factorization has; or if the mechanism does not
        extend ``extends``, or its noise multiplier is larger than the noise of ``extends`` gives.

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
    # The claim from which noise is released: its rows and sigma determine the noise.
    _released: Claim = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        Factorization.check_own(self.factorization)
        self.factorization.check_memory()
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
        sigma = multiplier * self.factorization.sensitivity(self.noise_reference).value
        if self.extends is not None:
            # An extended run keeps the sigma that was computed for its first number of rounds.
            sigma = min(sigma, self.horizons[0].sigma)
        rows, schema = self.factorization.noise_recursion(), self.noise_reference.as_schema()
        object.__setattr__(self, "_released", Claim(rows, schema, sigma, _ANY_DELTA))

    def __init_subclass__(cls, **options: object) -> None:
        raise TypeError("Mechanism has no subclasses: its guarantee would be stated for them.")

    @classmethod
    def of_one_schema(
        cls, factorization: Factorization, participation: Participation, noise_multiplier: float
    ) -> "Mechanism":
        """Returns the mechanism of a run with one schema before and after its extensions.

        Args:
          factorization: The matrix, which may be extended.
          participation: The schema.
          noise_multiplier: The noise multiplier for all rounds, under the schema.

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
        """The scheme by which clients are drawn; None if clients keep to a schema."""
        return self.participation if isinstance(self.participation, SamplingScheme) else None

    @property
    def noise_reference(self) -> Participation:
        """The schema that noise is scaled to: one participation if clients are drawn."""
        return self.participation if self.sampling is None else SingleParticipation()

    @property
    def horizons(self) -> "tuple[Mechanism, ...]":
        """The mechanisms before each extension of a run, the first one first, and this one last."""
        before = () if self.extends is None else self.extends.horizons
        return (*before, self)

    @property
    def earlier_participations(self) -> dict[int, Participation]:
        """The schemas before each extension, by the number of rounds then."""
        return {each.num_rounds: each.noise_reference for each in self.horizons[:-1]}

    @property
    def sigma(self) -> float:
        """The standard deviation of Z, in units of the largest norm of the vector that is summed.

        It is the same in all rounds.
        """
        return self._released.sigma

    def claim(self, delta: float) -> Claim:
        """Returns the claim from which the kernel proves guarantees.

        Args:
          delta: Above 0 and below 1.
        """
        part = self._taking_part
        return dataclasses.replace(self._released, delta=delta, taking_part=part, basis=None)

    @property
    def _taking_part(self) -> TakingPart:
        """The schema that clients keep to, or the scheme by which they are drawn."""
        if self.sampling is None:
            return self._released.taking_part
        return self.sampling.as_draws()

    def release(self, norm: float, sums: IntegerSums, **options: object) -> Release:
        """Returns the kernel's object that releases sums with this mechanism's noise.

        Args:
          norm: The largest norm of the vector that is summed.
          sums: The integer grid to which vectors are rounded.
          **options: Further arguments of ``kernel.release.Release``.
        """
        # The class checks its arguments.
        return Release(self.proved_horizons, norm, sums, **options)  # type: ignore[arg-type]

    @property
    def proved_horizons(self) -> tuple[Guarantee, ...]:
        """A guarantee for each of :attr:`horizons`, at an arbitrary delta, for releases.

        A release depends on rows and sigma, but not on delta or on which clients take part.
        """
        before = () if self.extends is None else self.extends.proved_horizons
        # Not of ``self.horizons``: the proof has to be of the rows and sigma that are stated.
        return (*before, check(self._released))

    def largest_cohort(self, asked: int | None, secure_aggregation_bits: int | None) -> int | None:
        """Returns the largest number of clients that a round may have.

        Args:
          asked: The user's number, which is returned unchanged; None for the default.
          secure_aggregation_bits: The width of a secure sum's integers; None for an open sum.

        Returns:
          By default, all clients of the run for a secure sum with a random number of clients,
            because a refused round would reveal that its batch was larger; otherwise None, for the
            default of ``kernel.integers``.
        """
        scheme = self.sampling
        if asked is not None or scheme is None or secure_aggregation_bits is None:
            return asked
        return scheme.largest_cohort if scheme.has_random_sizes else None

    def guarantee(self, delta: float, *, certification: Certification | None = None) -> Guarantee:
        """Returns the guarantee of a run if clients keep to the participation.

        Args:
          delta: Above 0 and below 1; with a sampling scheme, at least 1e-12.
          certification: How an epsilon is certified if clients draw for themselves; by default with
            seed 0, and cached in the user's cache.

        Returns:
          The guarantee: epsilon, rho, what an attacker can do, the certificate.

        Raises:
          ValueError: If delta is out of its range.

        Example:
          >>> import mf_aggregators as mfa
          >>> once = mfa.participation.SingleParticipation()
          >>> matrix = mfa.factorizations.identity(8)
          >>> mechanism = mfa.Mechanism(matrix, once, noise_multiplier=2.0)
          >>> guarantee = mechanism.guarantee(delta=1e-6)
          >>> round(guarantee.epsilon, 2), round(guarantee.rho, 3)
          (2.25, 0.125)
        """
        # Not ``self.claim``: the proof has to be of the rows and sigma of the release.
        part = self._taking_part
        whole = dataclasses.replace(self._released, delta=delta, taking_part=part, basis=None)
        proved = check(whole)
        if proved.run is None or proved.run.columns is None:
            return proved
        # The certificate has to be for the noise multiplier and columns that the kernel computed.
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
        """Returns the guarantee of a person with several clients, or if ids of devices change.

        The guarantee is without amplification. It holds if each client keeps to the participation,
        and no person has more clients. It covers a device's data in at most ``num_windows``
        windows.

        Args:
          delta: Above 0 and below 1.
          num_clients: The most clients of one person; with windows, the most devices of one person.
          window: The rounds W after which client ids change: a client is in one of the windows of
            rounds 0 to W - 1, W to 2 W - 1, and so on. None if ids do not change.
          num_windows: The number of windows in which one device takes part: 1 for the guarantee of
            a client in one window; None for a device in all windows, whose timer starts again in
            each.

        Returns:
          The guarantee, whose claim says who is protected.

        Raises:
          ValueError: If a number is out of its range.

        Example:
          >>> import mf_aggregators as mfa
          >>> once = mfa.participation.SingleParticipation()
          >>> matrix = mfa.factorizations.identity(8)
          >>> mechanism = mfa.calibrate(matrix, once, epsilon=8.0, delta=1e-6)
          >>> person = mechanism.unit_guarantee(1e-6, num_clients=2)  # a person with two devices
          >>> round(person.epsilon, 2)
          18.65
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
        """Compares a ledger, or the times of rounds, with the planned participation.

        A run whose clients kept to the planned participation has :meth:`guarantee`. The result also
        has the observed guarantee, which may be better, but holds only if participation did not
        depend on released models or on data.

        Args:
          ledger: Who took part in which round: a ``Ledger``, its file, a mapping from each client
            to its rounds, or a list with the clients of each released round (``Ledger.of``). If
            client names are not known: the times of the rounds and the timers of devices
            (``RoundTimes``).
          round_counts: The number of clients that the server counted in each round; or the file of
            these numbers, which ``ledgers.round_counts`` reads. A ledger that lacks lines shows too
            good a guarantee, so without these counts, or if the ledger differs from them, no
            guarantee better than the plan is stated.
          clients_per_round: The claimed cohort size, which is compared with the ledger; None for no
            comparison.
          sampling_seed: With a sampling scheme, the secret seed of the data sampler: every draw is
            then compared with the ledger. None if the seed is not known.
          sampler: Instead of the seed: the sampler that drew the clients, if it knows more than its
            scheme, such as clients that could not be asked.

        Returns:
          The comparison, which computes observed guarantees.

        Raises:
          LedgerError: If a file cannot be read.
          ValueError: If more rounds were released than the mechanism has, the ledger is broken, a
            seed is given although the ledger does not record a sampling scheme, the sampler is of
            another scheme, or times are given for a sampling scheme.

        Example:
          >>> import mf_aggregators as mfa
          >>> timers = mfa.participation.MinSeparation(separation=4)
          >>> matrix = mfa.factorizations.identity(8)
          >>> mechanism = mfa.Mechanism(matrix, timers, noise_multiplier=1.0)
          >>> mechanism.observed({"ada": [0, 4], "bo": [1]}).keeps_participation
          True
          >>> mechanism.observed({"ada": [0, 3], "bo": [1]}).keeps_participation
          False
        """
        observed = dataclasses.replace(
            Observed.of_run(self, ledger, sampling_seed, sampler),
            round_counts=ledgers.round_counts(round_counts),
            clients_per_round=clients_per_round,
        )
        # An incomplete ledger states the plan, so that has to be the plan of this mechanism.
        if observed.mechanism is not self:
            raise ValueError("the ledger was compared with another mechanism than this one.")
        return observed

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
        """Returns the mechanism of this run extended to more rounds, with the same noise.

        The rows of noise of the first n rounds stay the same, bit for bit.

        Args:
          num_rounds: The rounds of the whole run, above n.
          participation: The schema of the whole run, which has to allow all participations that the
            schemas before each extension allowed; by default, this mechanism's schema.
          workload: The workload of the whole run, for which further rows are optimised; by default,
            the prefix sum.
          num_parameters: The length of a row of noise, if an aggregator runs the mechanism: the
            noise multiplier is then reduced for the roundings of more rounds. None for no
            reduction.
          largest_cohort: The most clients in a round, as for ``mf_dp_aggregator``; None for its
            default without a secure sum.
          storage: Where the noise is kept, as for ``mf_dp_aggregator``.
          factorization: The factorization of the whole run, if it is known (from a checkpoint, for
            example); None extends this mechanism's factorization.

        Returns:
          The extended mechanism. Its noise multiplier is smaller, because the same noise is
          relative to a larger sensitivity.

        Raises:
          ExtensionError: If the factorization cannot be extended, or the roundings of rows of
            ``num_parameters`` would cost too much: the message names the number of rounds that is
            possible.
          ValueError: If the new schema forbids participations that an earlier one allowed, if a
            sampling scheme draws the clients (its guarantee is for a fixed number of rounds), or if
            the given factorization is for another number of rounds.

        Example:
          >>> import mf_aggregators as mfa
          >>> timers = mfa.participation.MinSeparation(separation=4)
          >>> matrix = mfa.factorizations.blt(8, 2)
          >>> mechanism = mfa.calibrate(matrix, timers, epsilon=4.0, delta=1e-6)
          >>> longer = mechanism.extended(12)
          >>> [round(each.guarantee(1e-6).epsilon, 2) for each in longer.horizons]
          [4.0, 5.3]
        """
        if self.sampling is not None:
            raise ValueError(
                f"the guarantee of {self.sampling.name} sampling is for all rounds of the scheme: "
                "a run with it cannot be extended."
            )
        schema = (
            self.noise_reference if participation is None else participations.check(participation)
        )
        if factorization is None:
            factorization = self.factorization.extended(
                num_rounds, participation=schema, workload=workload
            )
        elif factorization.num_rounds != num_rounds:
            raise ValueError(
                f"the factorization is for {factorization.num_rounds} rounds, not {num_rounds}."
            )
        sensitivity = factorization.sensitivity(schema).value
        # Rows of noise keep the standard deviation that they had before the extension.
        whole = Mechanism(factorization, schema, _divided(self, sensitivity), self)
        if num_parameters is None or self.horizons[0].noise_multiplier == 0.0:
            return whole
        size, made = num_parameters, factorization
        kept = NoiseStorage(storage)
        if kept is NoiseStorage.AUTO:
            # The storage that was chosen for the first rounds is kept.
            first = self.horizons[0].factorization.noise_recursion()
            kept = places.NoiseCost.of_run([first], size).storage
        sums = IntegerSums(DEFAULT_LARGEST_COHORT if largest_cohort is None else largest_cohort)

        def covered(each: Mechanism) -> float:
            check_charged(size, each.num_rounds)
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
                f"{str(error).rstrip('.')}; at most about {most} rounds are possible (to 1 %)."
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
        """Returns the privacy statement of a run that has not ended.

        Args:
          facts: Further facts of the run, for the statement.
          delta: Above 0 and below 1.
          certification: As :meth:`guarantee` takes it.
          plan: The result of :meth:`guarantee`, so that it is not proved again; None proves it.

        Returns:
          The statement, in words (``to_markdown``) and as JSON (``to_dict``).

        Example:
          >>> import mf_aggregators as mfa
          >>> from mf_aggregators.privacy import statements
          >>> once = mfa.participation.SingleParticipation()
          >>> matrix = mfa.factorizations.identity(8)
          >>> mechanism = mfa.calibrate(matrix, once, epsilon=8.0, delta=1e-6)
          >>> facts = statements.RunFacts(
          ...     mechanism="identity",
          ...     population=80,
          ...     clients_per_round=10,
          ...     clip=0.5,
          ...     public_data="none",
          ...     enforcement="A list on the server.",
          ... )
          >>> mechanism.statement(facts, 1e-6).status
          'running'
        """
        return Statement(
            facts=facts,
            plan=plan or self.guarantee(delta, certification=certification),
            earlier_plans=tuple(each.guarantee(delta) for each in self.horizons[:-1]),
        )

    def event(self) -> dp_event.DpEvent:
        """Returns the run as an event of dp-accounting, to be composed with other runs.

        ``accounting.composed_epsilon`` composes such events, with amplification if clients are
        drawn. ``accounting.event`` says how accountants of dp-accounting treat them, and for which
        neighbouring relation.

        Example:
          >>> import mf_aggregators as mfa
          >>> once = mfa.participation.SingleParticipation()
          >>> matrix = mfa.factorizations.identity(8)
          >>> mechanism = mfa.calibrate(matrix, once, epsilon=8.0, delta=1e-6)
          >>> two_runs = [mechanism.event(), mechanism.event()]
          >>> round(mfa.accounting.composed_epsilon(two_runs, delta=1e-6), 2)
          12.11
        """
        if self.sampling is not None:
            columns = self.factorization.columns_for(self.sampling)
            return accounting.event(self.sampling.run(self.noise_multiplier, columns))
        return accounting.event(self.noise_multiplier)

    def privacy_loss_distribution(
        self, *, interval: float = composition.INTERVAL
    ) -> PrivacyLossDistribution:
        """Returns the run's privacy loss distribution, for composition by dp-accounting.

        Losses are rounded up, so that their deltas, also after composition, are at least those of
        the run. Neighbouring data sets differ in one client whose updates are zeroed; this composes
        with adding or removing one client. For shuffled runs, and if clients draw for themselves,
        the losses are those of all participations of a client, without amplification.

        Args:
          interval: The step of the losses, which are multiples of it: the
            ``value_discretization_interval`` of the distributions to compose with.

        Returns:
          The distribution. Its probability of an infinite loss includes twice the probability that
          the drawn noise fails (``accounting.zcdp_delta``), which covers all deltas up to one half,
          and the rounding errors of composing a sampled run's rounds.

        Raises:
          TailError: If there is too little noise to account for (a ValueError).
          ValueError: If there is no noise, or the interval is out of its range.

        Example:
          >>> import mf_aggregators as mfa
          >>> once = mfa.participation.SingleParticipation()
          >>> matrix = mfa.factorizations.identity(8)
          >>> mechanism = mfa.Mechanism(matrix, once, noise_multiplier=2.0)
          >>> losses = mechanism.privacy_loss_distribution()
          >>> round(losses.get_epsilon_for_delta(1e-6), 2)
          2.25
        """
        interval = numbers.positive_number(interval, "interval")
        sigma = numbers.positive_number(self.noise_multiplier, "noise_multiplier")
        run = None
        if self.sampling is not None:
            run = self.sampling.run(sigma, self.factorization.columns_for(self.sampling))
            # The noise multiplier relative to all participations of a client together.
            sigma = sigma if run.composes_amplified else run.noise_multiplier
        if _MOST_LOSSES * interval < 0.5 / sigma**2 + 12.0 / sigma:
            raise ValueError(
                f"the losses of so little noise need more than {_MOST_LOSSES} steps of the "
                f"interval {interval:g}: use a larger interval."
            )
        if run is None:
            found, part, compositions = losses.gaussian_losses(sigma, interval), sigma, 0
        else:
            found, part = run.losses(interval), run.part_noise_multiplier
            compositions = run.draws.most_participations
        drawn = failure_probability(part, DEFAULT_NUM_COORDINATES)
        whole = failure_probability(part, DEFAULT_NUM_COORDINATES, compositions)
        infinite = drawn + whole
        with_infinite: PrivacyLossDistribution = (
            PrivacyLossDistribution.create_from_rounded_probability(
                {0: 1.0 - infinite}, infinite, interval
            )
        )
        return found.compose(with_infinite)

    def to_dict(self) -> dict[str, object]:
        """Returns all fields but the matrix as a JSON-able mapping, for :meth:`from_dict`.

        Example:
          >>> import mf_aggregators as mfa
          >>> once = mfa.participation.SingleParticipation()
          >>> matrix = mfa.factorizations.identity(8)
          >>> mechanism = mfa.Mechanism(matrix, once, noise_multiplier=2.0)
          >>> described = mechanism.to_dict()
          >>> described["mechanism"], described["horizons"][0]["noise_multiplier"]
          ('identity', 2.0)
          >>> mfa.Mechanism.from_dict(described, mechanism.factorization) == mechanism
          True
        """
        return {
            "mechanism": self.factorization.mechanism,
            "sigma": self.sigma,
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
    def from_dict(
        cls, description: Mapping[str, object], factorization: Factorization
    ) -> "Mechanism":
        """Returns the mechanism that :meth:`to_dict` described.

        Args:
          description: The mapping. Its sigma is kept: if this version finds another sensitivity of
            the matrix than the version that wrote it, the noise multipliers change. Without a
            sigma, the noise multipliers are kept.
          factorization: The matrix of the mechanism, for all rounds after its extensions.

        Raises:
          ValueError: If the description is broken, or belongs to another factorization.
        """
        mechanism: Mechanism | None = None
        try:
            horizons, stated = description["horizons"], description.get("sigma")
            sigma = None if stated is None else numbers.non_negative_number(stated, "sigma")
            if not isinstance(horizons, list):
                raise TypeError("its horizons are not a list")
            for horizon in horizons:
                described = horizon["participation"]
                is_schema = "schema" in described
                read = Participation.from_dict if is_schema else SamplingScheme.from_dict
                taking_part = read(described)
                reference = taking_part if is_schema else SingleParticipation()
                matrix = factorization.at_horizon(horizon["num_rounds"])
                multiplier = numbers.non_negative_number(
                    horizon["noise_multiplier"], "noise_multiplier"
                )
                sensitivity = matrix.sensitivity(reference).value
                if sigma is not None and not math.isclose(
                    multiplier * sensitivity, sigma, rel_tol=_TOLERANCE
                ):
                    if sigma > checkpoints.LARGEST_EARLIER_BOUND * multiplier * sensitivity:
                        raise ValueError("its sigma is above that of its noise multipliers")
                    multiplier = sigma / sensitivity
                mechanism = cls(matrix, taking_part, multiplier, mechanism)
        except (KeyError, TypeError) as error:
            raise ValueError(f"it does not describe a mechanism ({error})") from error
        if mechanism is None or mechanism.num_rounds != factorization.num_rounds:
            raise ValueError(f"its mechanism does not have {factorization.num_rounds} rounds")
        return mechanism

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        workload: Mapping[str, object] | None = None,
        overwrite: bool = True,
    ) -> None:
        """Saves the mechanism: a checkpoint of its factorization, and ``mechanism.json`` in it.

        Args:
          directory: The directory to create. ``checkpoints.load`` reads only the factorization from
            it.
          workload: The workload of the errors that the checkpoint states, as for
            ``checkpoints.save``.
          overwrite: Whether an existing checkpoint may be replaced.

        Raises:
          CheckpointError: As ``checkpoints.save`` raises it.
          ValueError: If the workload is not valid.

        Example:
          >>> import pathlib, tempfile
          >>> import mf_aggregators as mfa
          >>> once = mfa.participation.SingleParticipation()
          >>> matrix = mfa.factorizations.identity(8)
          >>> mechanism = mfa.Mechanism(matrix, once, noise_multiplier=2.0)
          >>> directory = pathlib.Path(tempfile.mkdtemp()) / "mechanism"
          >>> mechanism.save(directory)
          >>> sorted(path.name for path in directory.iterdir())
          ['arrays.npz', 'factorization.json', 'mechanism.json']
        """
        checkpoints.save(
            self.factorization,
            directory,
            workload=workload,
            participation=self.noise_reference,
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
    """Returns the mechanism with the least noise for a target epsilon or rho.

    Use it when you know the privacy budget and need the noise multiplier.

    Args:
      factorization: The strategy matrix.
      participation: The schema that clients keep to, or the scheme by which they are drawn.
      epsilon: The target epsilon, above 0, at ``delta``.
      delta: Above 0 and below 1; with a sampling scheme, at least 1e-12.
      rho: Instead of epsilon and delta: the target rho of approximate zCDP, which sampling does not
        amplify.
      certification: As :meth:`Mechanism.guarantee` takes it.

    Returns:
      The mechanism, whose epsilon (or rho) is the target or slightly less.

    Raises:
      TypeError: If neither epsilon with delta nor rho is given, or both are.
      ValueError: If no noise multiplier reaches the target, or an argument is out of its range.

    Example:
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> identity = mfa.factorizations.identity(100)
      >>> round(mfa.calibrate(identity, once, rho=0.5).noise_multiplier, 6)
      1.0
    """
    if (epsilon is None) != (delta is None) or (epsilon is None) == (rho is None):
        raise TypeError("give epsilon and delta, or rho: calibrate(..., epsilon=8.0, delta=1e-6).")
    # Checks that matrix and participation fit together before the search.
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
        # 1e-15 is more than the rounding error of the product.
        multiplier = found.noise_multiplier * (1.0 + share + 1e-15)
        share *= 2.0
    return dataclasses.replace(unknown, noise_multiplier=multiplier)


@dataclasses.dataclass(frozen=True)
class _Spent:
    """The epsilon that a run has spent so far, and its planned epsilon.

    Attributes:
      planned: The guarantee of the whole run, if it keeps to its participation.
      so_far: The guarantee of the rounds in the ledger. If its epsilon is smaller than the planned
        one, it holds only if participation did not depend on released models or on data. If the
        ledger may lack lines, the guarantee of all planned rounds.
      num_rounds: The rounds in the ledger.
      gap: The reason why the ledger may lack lines (``Observed.gap``); None if it is complete.
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
        better = f"no better one for the {self.num_rounds} so far, because {self.gap}"
        return f"{planned} as planned; {so_far} for all {rounds}{only_if}, and {better}"


def spent(
    mechanism: Mechanism, ledger: GivenLedger | RoundTimes, delta: float, **options: object
) -> _Spent:
    """Returns the planned epsilon of a run, and the epsilon of the rounds in its ledger.

    Use it when a run is not finished, to know its epsilon so far.

    Args:
      mechanism: The mechanism of the run.
      ledger: As for ``Mechanism.observed``. A mapping, or a text file, counts as the ledger of all
        rounds.
      delta: Above 0 and below 1.
      **options: Further arguments of ``Mechanism.observed``. Without ``round_counts``, the epsilon
        so far is never better than the plan.

    Raises:
      LedgerError: If a file cannot be read, or the ledger is broken.
      ValueError: If delta is out of its range, or more rounds were released than the mechanism has.

    Example:
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> mechanism = mfa.Mechanism(mfa.factorizations.banded(8, num_bands=4), once, 2.0)
      >>> print(mfa.spent(mechanism, [["ada", "bo"]], 1e-6, round_counts=[2]).planned.epsilon > 1.0)
      True
    """
    # The method checks its arguments.
    found = mechanism.observed(ledger, **options)  # type: ignore[arg-type]
    is_drawn = mechanism.sampling is not None and found.keeps_participation is True
    rounds, gap = found.participation.num_rounds, None if is_drawn else found.gap
    return _Spent(mechanism.guarantee(delta), found.guarantee(delta), rounds, gap)


def load(directory: str | os.PathLike[str]) -> Mechanism:
    """Loads a mechanism that :meth:`Mechanism.save` wrote, or the mechanism of a training run.

    Use it when you resume a run, or compute the guarantee of a run again.

    Files of a run are not signed. The plan in ``privacy.json`` is trusted, unless the run's matrix
    or ``config.json`` (if there is one) contradicts it. The stated epsilon is proved again, except
    an epsilon that needs a Monte Carlo test, which :meth:`Mechanism.guarantee` proves.

    Args:
      directory: The saved mechanism, or the directory of a run with its ``privacy.json``.

    Returns:
      The mechanism; if the run was extended, with all mechanisms before its extensions.

    Raises:
      CheckpointError: If the directory has a factorization but no mechanism; if a file is missing,
        altered, of a newer format, or contradicts the factorization; if files of a run contradict
        one another; if the stated epsilon is not proved; or if the noise came from a fixed seed, so
        that the run has no guarantee.

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
        horizons = described["horizons"]
        assert isinstance(horizons, list)
        for each, horizon in zip(found.horizons, horizons, strict=True):
            if "epsilon" in horizon and (each.sampling is None or each.sampling.has_groups):
                proved, stated = each.guarantee(horizon["delta"]), horizon["epsilon"]
                if described["sigma"] is not None and stated is not None:
                    # Version 2.0.0 states more than is proved of its noise for some matrices.
                    stated = min(numbers.epsilon(stated), proved.epsilon)
                proved.prove(stated)
        return found
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is broken: {str(error).rstrip('.')}.") from error


def check_charged(num_parameters: int, num_rounds: int) -> None:
    """Raises ValueError if a run draws more numbers than guarantees are stated for.

    Args:
      num_parameters: The numbers of a row: the model's parameters, and one more where the clip
        norm adapts.
      num_rounds: The rows.
    """
    if num_parameters * num_rounds > DEFAULT_NUM_COORDINATES:
        raise ValueError(
            f"noise of {num_parameters} numbers in each of {num_rounds} rounds is of "
            f"{num_parameters * num_rounds:.3g} numbers, and guarantees are stated for at most "
            f"2^40 ({DEFAULT_NUM_COORDINATES:.2g}): use a smaller model or fewer rounds."
        )


def _most_rounds(possible: int, impossible: int, is_possible: Callable[[int], bool]) -> int:
    """Finds the largest possible number of rounds, by bisection to within 1 %."""
    while impossible - possible > 1 + possible // 100:
        middle = max(possible + 1, math.isqrt(possible * impossible))
        if is_possible(middle):
            possible = middle
        else:
            impossible = middle
    return possible


def _check_extends(mechanism: Mechanism) -> None:
    """Checks that a mechanism and its factorization were extended at the same numbers of rounds."""
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
        raise ValueError("a run with a sampling scheme cannot be extended.")
    if not before.factorization.has_same_matrix(factorization.at_horizon(before.num_rounds)):
        raise ValueError("the factorization does not extend that of the previous horizon.")
    _check_extended(
        {each.num_rounds: each.noise_reference for each in horizons}, mechanism.noise_reference
    )
    found = _divided(before, factorization.sensitivity(mechanism.noise_reference).value)
    if mechanism.noise_multiplier > found * (1.0 + _TOLERANCE):
        raise ValueError(
            f"the noise multiplier of the extended run is {mechanism.noise_multiplier!r}, and its "
            f"noise, which an extension does not change, is only enough for {found!r}: give at "
            "most that."
        )


def _divided(before: Mechanism, sensitivity: float) -> float:
    """Returns the noise multiplier of an extended run, relative to its larger sensitivity.

    The leading part of the extended strategy matrix C' is the C with which the run began. So a
    server that released the rows of C^-1 Z, and continues with the rows of C'^-1 Z for the same Z,
    has run the mechanism of C' from the first round on, with the same standard deviation of Z. The
    guarantee holds for all rounds, even if the decision to extend depended on releases:
    docs/privacy-proofs.md has the proof.
    """
    return before.horizons[0].sigma / sensitivity


def _check_extended(earlier: Mapping[int, Participation], whole: Participation) -> None:
    """Checks that each schema of an extended run allows all participations of the one before.

    Then the last schema allows all participations of clients that kept, in each round, the timer
    that was in force. A timer looks at all earlier rounds of its client. So by induction over the
    extensions, the earlier rounds and the next one together keep the schema in force.

    Args:
      earlier: The schema before each extension, by the number of rounds then.
      whole: The schema of the whole run.

    Raises:
      TypeError: If one of these is not a schema.
      ValueError: If a schema forbids participations that the one before it allowed, so that the run
        may have broken it already; or if a number of rounds is not a positive integer.
    """
    schemas = [*sorted(earlier.items()), (None, participations.check(whole))]
    for (num_rounds, before), (following, after) in itertools.pairwise(schemas):
        assert num_rounds is not None
        if not participations.check(after).allows(before, num_rounds):
            name = "extended horizon" if following is None else f"horizon of {following} rounds"
            raise ValueError(
                f"the horizon of {num_rounds} rounds allows {before}, and the {name} {after}: past "
                f"participations may break the {name}. Keep the separation, and at least as many "
                "participations."
            )
