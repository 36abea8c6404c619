"""The privacy guarantee of a run: as planned, and as observed.

A plan names a participation schema, and the noise is scaled to the sensitivity of C under it.
A run that kept its plan has the planned guarantee, also if clients decided from released models
whether to take part. The participations that were observed define a schema of their own, by their
separations and their largest number per client, and the same noise is measured against the
sensitivity under that one. The observed guarantee may be the better one, and holds only if
participation did not depend on released models or on data (docs/privacy-proofs.md, section 4). A
run that broke its plan has only the observed guarantee.
"""

import dataclasses
import functools
import math
import types
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from dp_accounting import dp_event

from mf_aggregators import accounting, caches, catalogue, inputs, memory
from mf_aggregators.accounting import trade_offs
from mf_aggregators.factorizations import Factorization
from mf_aggregators.kernel import claim, integer_rows, validation
from mf_aggregators.kernel.arrays import FloatArray, IntArray
from mf_aggregators.kernel.blocks import Blocks
from mf_aggregators.kernel.certificate import Certificate
from mf_aggregators.kernel.claim import Basis, Claim, Limit, Pattern
from mf_aggregators.kernel.dominating_pairs import LARGEST_ROUNDING, StrategyColumns
from mf_aggregators.kernel.draws_of_clients import AllParticipations
from mf_aggregators.kernel.gaussian import DEFAULT_NUM_COORDINATES
from mf_aggregators.kernel.integer_rows import IntegerRows, Rounding
from mf_aggregators.kernel.numbers import counted, stated_pair
from mf_aggregators.kernel.schemas import Schema
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SamplingScheme,
    SingleParticipation,
    accounted,
)
from mf_aggregators.participation.monte_carlo import search
from mf_aggregators.participation.monte_carlo.certification import Certification
from mf_aggregators.participation.monte_carlo.columns import columns_of_encoder
from mf_aggregators.printed_guarantees import FALSE_POSITIVE_RATES, rate_field

# Relative rounding error of a product of floats and an exponential.
_ROUNDING = 1e-12
# e to more than this overflows.
_LARGEST_EXPONENT = 700.0
# Arrays of (n, n) that columns without bands are found with.
_ARRAYS_OF_COLUMNS = 6
# Steps of Z. Accounting charges what roundings move; more than these would be half of the noise.
_MOST_ROUNDING = 1024.0
# Results of :func:`_largest_rounding`: a plan asks several times for each factorization.
_ROUNDINGS: weakref.WeakKeyDictionary[Factorization, float] = weakref.WeakKeyDictionary()
# The assumption of every guarantee that follows from observed participations, as the end of a
# sentence.
ONLY_IF = "only if participation did not depend on released models or on data"
# The same as a field of JSON objects.
INDEPENDENCE: Mapping[str, str] = types.MappingProxyType(
    {"participation_independent_of_releases": f"An observed guarantee holds {ONLY_IF}."}
)


@dataclasses.dataclass(frozen=True)
class PartOfClient:
    """What holds for a part of a client's data: an example, or one of several people who share it.

    With or without the part, the client sends an update within the clip norm, and these two are up
    to two clip norms apart. So all of its participations change C x by up to twice what the noise
    multiplier is relative to, also after rounding and where clip norms adapt
    (docs/privacy-proofs.md).

    Attributes:
      noise_multiplier: Half of that of whole clients, without amplification.
      epsilon: The epsilon that follows; infinity where that is too little noise to state one.
      delta: The delta that it is for, that of whole clients.
      amplified_epsilon: Where the guarantee of whole clients is amplified, what follows from
        applying it twice: twice its epsilon. None where nothing is amplified, or nothing follows.
      amplified_delta: The delta that it is for: that of whole clients times 1 + e^epsilon.
    """

    noise_multiplier: float
    epsilon: float
    delta: float
    amplified_epsilon: float | None = None
    amplified_delta: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping; what is infinite, for lack of noise, becomes None."""
        return {
            **dataclasses.asdict(self),
            "noise_multiplier": _finite_or_none(self.noise_multiplier),
            "epsilon": _finite_or_none(self.epsilon),
        }


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """A guarantee that the kernel has proved, and the words for how clients take part.

    Its numbers are those of ``proved``, which ``kernel.claim.check`` alone makes.

    Attributes:
      participation: The participation schema that it assumes or that was observed.
      proved: The guarantee under zero-out adjacency, for each client.
      sampling: How clients are drawn, if the guarantee is amplified by that.
      seed: For schemes without groups, the seed of the bounds on what an attacker can do.

    Raises:
      TypeError: If ``proved`` was not made by the kernel.
      ValueError: If it is for another participation.
    """

    participation: Participation
    proved: claim.Guarantee
    sampling: SamplingScheme | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.proved) is not claim.Guarantee:
            raise TypeError(f"the kernel proves guarantees, found {validation.shown(self.proved)}.")
        proved, drawn = self.proved.claim.taking_part, self.sampling
        stated = self.participation.as_schema() if drawn is None else drawn.as_draws()
        if not isinstance(proved, (Limit, Pattern)) and stated != proved:
            raise ValueError(f"the guarantee is for {proved}, and not for {self.participation}.")

    def __init_subclass__(cls) -> None:
        raise TypeError("Guarantee has no subclasses.")

    @property
    def epsilon(self) -> float:
        """The epsilon of (epsilon, delta)-DP; infinity if there is too little noise for any."""
        return self.proved.epsilon

    @property
    def delta(self) -> float:
        """The delta that epsilon is for."""
        return self.proved.delta

    def at(self, delta: float) -> "Guarantee":
        """Returns the guarantee of the same run at another delta, without a certificate.

        Args:
          delta: Above 0 and below 1.
        """
        other = dataclasses.replace(self.proved.claim, delta=delta, epsilon=None, certificate=None)
        return dataclasses.replace(self, proved=claim.check(other))

    @property
    def rho(self) -> float:
        """The rho of approximate zero-concentrated DP, never amplified; infinity for no noise."""
        return self.proved.rho

    @property
    def zcdp_rho(self) -> float:
        """The same."""
        return self.rho

    @property
    def sigma(self) -> float:
        """The standard deviation of Z in clip norms."""
        return self.proved.sigma

    @property
    def noise_multiplier(self) -> float:
        """The standard deviation of Z over (clip norm times sensitivity)."""
        return self.proved.noise_multiplier

    @property
    def assumptions(self) -> tuple[claim.Assumption, ...]:
        """The conditions that it rests on."""
        return self.proved.assumptions

    @property
    def num_rounds(self) -> int:
        """The number of rounds whose noisy sums were released."""
        return self.proved.num_rounds

    @property
    def sensitivity(self) -> float:
        """The sensitivity of C under the schema; its largest column norm if clients are drawn."""
        return self.proved.sensitivity.value

    @property
    def sensitivity_is_exact(self) -> bool:
        """False if the sensitivity is an upper bound."""
        return self.proved.sensitivity.is_exact

    @property
    def certificate(self) -> Certificate | None:
        """The proof by Monte Carlo that the epsilon rests on; None without one."""
        return self.proved.claim.certificate

    @property
    def columns(self) -> StrategyColumns | None:
        """C, if an amplified guarantee depends on its entries."""
        return self.proved.claim.columns

    @property
    def together(self) -> AllParticipations:
        """All participations of a client together, if clients are drawn."""
        return self.proved.together

    @property
    def is_by_rule(self) -> bool:
        """Whether it holds because a stopping rule ends the run by the ledger."""
        return isinstance(self.proved.claim.taking_part, Limit)

    @property
    def is_observed(self) -> bool:
        """Whether it holds only if participation did not depend on released models or on data."""
        return claim.Assumption.INDEPENDENCE in self.assumptions

    def __str__(self) -> str:
        stated = stated_pair(self.epsilon, self.delta)
        # The participation that was proved, whatever became of the words for it.
        who = self.proved.claim.taking_part if self.sampling is None else self.sampling
        ifs = " ".join(each.sentence for each in self.assumptions)
        if self.is_by_rule:
            return f"{stated} for each client, by a stopping rule\nif: {ifs}"
        secret = ", if nobody learns who was drawn" if self.is_amplified else ""
        rounds = counted(self.num_rounds, "round")
        return f"{stated} for each client over {rounds}: {who}{secret}{self.only_if}\nif: {ifs}"

    @property
    def only_if(self) -> str:
        """The assumption of an observed guarantee, after a comma; nothing for others."""
        return f", {ONLY_IF}" if self.is_observed else ""

    @property
    def independence(self) -> Mapping[str, str]:
        """The assumption of an observed guarantee as a field; none for others."""
        return INDEPENDENCE if self.is_observed else {}

    @property
    def zcdp_delta(self) -> float:
        """The delta0 of (rho, delta0)-approximate zCDP; 0 where rho is 0 or infinite."""
        if self.zcdp_rho == 0.0 or math.isinf(self.zcdp_rho):
            return 0.0
        return accounting.zcdp_delta(
            self.unamplified_noise_multiplier, disjoint_participations=self.together.disjoint
        )

    @property
    def unamplified_noise_multiplier(self) -> float:
        """The noise multiplier of all participations of a client, towards who knows the rounds."""
        return self.noise_multiplier / self.together.norm

    @property
    def is_amplified(self) -> bool:
        """Whether it rests on draws that nobody knows."""
        return self.sampling is not None

    def part_of_client(self) -> PartOfClient:
        """Returns what holds for a part of a client's data, at the same delta."""
        whole = self.proved.claim if self.sampling is None else _without_draws(self)
        half = claim.check(dataclasses.replace(whole, sigma=0.5 * whole.sigma, epsilon=None))
        part = PartOfClient(half.noise_multiplier, half.epsilon, self.delta)
        if math.isinf(half.noise_multiplier):
            return part
        # Without the part, and before that without the client: a triangle of two guarantees.
        if not self.is_amplified or self.epsilon > _LARGEST_EXPONENT:
            return part
        delta = self.delta * (1.0 + math.exp(self.epsilon)) * (1.0 + _ROUNDING)
        if delta >= 1.0:
            return part
        return dataclasses.replace(
            part, amplified_epsilon=2.0 * self.epsilon, amplified_delta=delta
        )

    def event(self) -> dp_event.DpEvent:
        """Returns the run as an event of dp-accounting: see ``Mechanism.event``."""
        if self.sampling is not None:
            return self.sampling.event_of(self.noise_multiplier, self.columns)
        if math.isinf(self.noise_multiplier):
            return dp_event.NoOpDpEvent()
        return accounting.event(self.noise_multiplier)

    @functools.cached_property
    def log_moments(self) -> tuple[tuple[int, float], ...]:
        """Orders a and log E_Q (P/Q)^a of the dominating pair, for real normal noise.

        They bound what an attacker can do, for schemes without groups; other schemes have none.
        """
        if self.sampling is None:
            return ()
        return self.sampling.log_moments(
            self.noise_multiplier, self.columns, DEFAULT_NUM_COORDINATES
        )

    @functools.cached_property
    def divergences(self) -> tuple[tuple[float, float], ...]:
        """Pairs of an epsilon and a bound on the hockey-stick divergence of P from Q.

        They are for the same schemes, noise and purpose as :attr:`log_moments`, and computed by
        Monte Carlo when they are first asked for.
        """
        if self.sampling is None:
            return ()
        return self.sampling.divergences(
            self.noise_multiplier, self.columns, self.seed, DEFAULT_NUM_COORDINATES
        )

    def true_positive_rate(self, false_positive_rate: float | FloatArray) -> float | FloatArray:
        """Returns the highest true positive rate that an attacker can have.

        ``accounting.trade_offs`` says what the attacker knows and decides.

        Args:
          false_positive_rate: From 0 to 1, or an array of them; others raise a ValueError.

        Returns:
          A rate of the argument's shape; 1 where epsilon is infinite.
        """
        if math.isinf(self.epsilon):
            return trade_offs.true_positive_rate(0.0, false_positive_rate)
        if self.sampling is None:
            return trade_offs.true_positive_rate(self.noise_multiplier, false_positive_rate)
        return trade_offs.sampled_true_positive_rate(
            self.sampling.as_draws(),
            self.noise_multiplier,
            false_positive_rate,
            guarantees=[(self.epsilon, self.delta)],
            log_moments=self.log_moments,
            divergences=self.divergences,
            together=self.together,
        )

    def attacker(self, prefix: str = "") -> dict[str, float | None]:
        """Returns the true positive rates that are stated, from 0 to 1, as fields of a report.

        Args:
          prefix: What the names of the fields begin with: by default they are
            ``true_positive_rate_at_0.01`` and its like.
        """
        found = np.asarray(self.true_positive_rate(np.asarray(FALSE_POSITIVE_RATES)))
        return {
            rate_field(rate, prefix): float(most)
            for rate, most in zip(FALSE_POSITIVE_RATES, found, strict=True)
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping; what is infinite, for lack of noise, becomes None."""
        return {
            "participation": (
                {"schema": "stopping_rule"} if self.is_by_rule else self.participation.to_dict()
            ),
            "num_rounds": self.num_rounds,
            "sensitivity": self.sensitivity,
            "sensitivity_is_exact": self.sensitivity_is_exact,
            "noise_multiplier": _finite_or_none(self.noise_multiplier),
            "zcdp_rho": _finite_or_none(self.zcdp_rho),
            "zcdp_delta": self.zcdp_delta if math.isfinite(self.zcdp_rho) else None,
            "epsilon": _finite_or_none(self.epsilon),
            "delta": self.delta,
            **self.attacker(),
            "sampling": None if self.sampling is None else self.sampling.to_dict(),
            "certificate": None if self.certificate is None else self.certificate.to_dict(),
            "assumptions": {each.value: each.sentence for each in self.assumptions},
            **self.independence,
        }


@dataclasses.dataclass(frozen=True)
class ObservedParticipation:
    """The participations that were observed, over all clients.

    Attributes:
      num_rounds: The number of rounds that were released.
      num_clients: How many clients took part at all; None if that is not known.
      separation: The smallest distance |i - j| between two participations of one
        client; None if none took part twice.
      max_participations: The largest number of participations of one client.
      keeps_sampling: Whether a data sampler drew every batch by its scheme; None where none
        was planned, or nobody checked: only whoever holds the sampler's seed can find out.
      largest_separation: The largest distance between adjacent participations of one client;
        None if none took part twice, or if it is not known.
      conditions: Under which conditions it follows, as sentences, where nobody saw who took part
        (``round_times``); None for a ledger.
      gap: Why the ledger is not shown to be complete (``ledgers.gap``); None if it is, and for
        times.

    Raises:
      ValueError: If a number is no integer of its range, a client took part more than once and no
        separation is given, or so many participations do not fit into the rounds.
    """

    num_rounds: int
    num_clients: int | None
    separation: int | None
    max_participations: int
    keeps_sampling: bool | None = None
    largest_separation: int | None = None
    conditions: str | None = None
    gap: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_rounds", 0), ("max_participations", 0)):
            found = validation.integer_at_least(getattr(self, name), least, name)
            object.__setattr__(self, name, found)
        for name, least in (("num_clients", 0), ("separation", 1), ("largest_separation", 1)):
            if getattr(self, name) is not None:
                found = validation.integer_at_least(getattr(self, name), least, name)
                object.__setattr__(self, name, found)
        inputs.check_types(self)
        if self.separation is None and self.max_participations > 1:
            raise ValueError(
                f"a client took part {self.max_participations} times: give the separation, which "
                "is 1 where it is not known."
            )
        # A schema that has no room for them would count fewer participations.
        if self.max_participations > 1 and self.separation is not None:
            least = (self.max_participations - 1) * self.separation + 1
            if self.num_rounds < least:
                raise ValueError(
                    f"{self.max_participations} participations {self.separation} rounds apart need "
                    f"{least} rounds, and num_rounds is {self.num_rounds}."
                )
            if self.largest_separation is not None and self.largest_separation < self.separation:
                raise ValueError(
                    f"largest_separation, {self.largest_separation}, is below the smallest, "
                    f"{self.separation}."
                )

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping; who was drawn by a sampler is a secret and not in it."""
        if self.keeps_sampling:
            return {"num_rounds": self.num_rounds, "keeps_sampling": True}
        return {
            "num_rounds": self.num_rounds,
            "num_clients": self.num_clients,
            "separation": self.separation,
            "largest_separation": self.largest_separation,
            "max_participations": self.max_participations,
            "keeps_sampling": self.keeps_sampling,
            **({} if self.conditions is None else {"conditions": self.conditions}),
            **({} if self.gap is None else {"ledger_gap": self.gap}),
        }

    def schema(self) -> Participation:
        """Returns the narrowest schema of these separations and number of participations."""
        if self.separation is None:
            return SingleParticipation()
        if self.separation == self.largest_separation:
            return FixedEpochOrder(self.max_participations, self.separation)
        return MinSeparation(self.separation, self.max_participations)


def observed_participation(
    rounds_of_clients: Iterable[Sequence[int] | IntArray], num_rounds: int
) -> ObservedParticipation:
    """Measures the participations that a ledger shows.

    Args:
      rounds_of_clients: For each client, the rounds that it took part in, from 0,
        increasing.
      num_rounds: The number of rounds that were released.

    Returns:
      The smallest and the largest separation, and the largest count.

    Raises:
      ValueError: If a client's rounds are not increasing or not among the rounds
        that were released: such a ledger cannot be trusted.
    """
    num_rounds = validation.integer_at_least(num_rounds, 0, "num_rounds")
    of_clients = [np.asarray(rounds, dtype=np.int64) for rounds in rounds_of_clients if len(rounds)]
    if not of_clients:
        return ObservedParticipation(num_rounds, 0, None, 0, largest_separation=None)
    # At once: a run may ask for hundreds of thousands of clients in every round.
    sizes = np.array([len(rounds) for rounds in of_clients])
    together = np.concatenate(of_clients)
    clients = np.repeat(np.arange(len(sizes)), sizes)
    is_out = (together < 0) | (together >= num_rounds)
    if np.any(is_out):
        rounds = of_clients[clients[np.argmax(is_out)]]
        raise ValueError(
            f"a client took part in rounds {rounds[0]} to {rounds[-1]}, counted from 0, and "
            f"{num_rounds} rounds were released: the ledger is broken."
        )
    is_of_one = clients[1:] == clients[:-1]
    separations = np.diff(together)[is_of_one]
    if np.any(separations <= 0):
        earlier = np.flatnonzero(is_of_one)[np.argmax(separations <= 0)]
        raise ValueError(
            f"a client took part in round {together[earlier]} and then in round "
            f"{together[earlier + 1]}, counted from 0: the ledger is broken."
        )
    return ObservedParticipation(
        num_rounds,
        len(of_clients),
        int(separations.min()) if len(separations) else None,
        int(sizes.max()),
        largest_separation=int(separations.max()) if len(separations) else None,
    )


def planned(
    factorization: Factorization,
    participation: Participation,
    noise_multiplier: float,
    delta: float,
    most: float | None = None,
) -> Guarantee:
    """Returns the guarantee of a run that keeps its participation schema.

    Args:
      factorization: What makes the noise.
      participation: The schema that the run will enforce.
      noise_multiplier: Relative to the sensitivity under that schema; zero for none.
      delta: Above 0 and below 1.
      most: The standard deviation of the noise that is drawn, in clip norms, where it may be less;
        None where it follows from the noise multiplier.

    Returns:
      The guarantee for all rounds of the factorization; its epsilon is infinite for so little
      noise that none is stated.

    Raises:
      ValueError: If the noise multiplier or delta is out of its range.
    """
    bound = catalogue.check_own(factorization).sensitivity(participation).value
    sigma = validation.non_negative_number(noise_multiplier, "noise_multiplier") * bound
    return _proved(
        participation,
        Claim(
            factorization.noise_recursion(),
            participation.as_schema(),
            sigma if most is None else min(sigma, most),
            delta,
        ),
    )


def sampled(
    factorization: Factorization,
    scheme: SamplingScheme,
    noise_multiplier: float,
    delta: float,
    *,
    certification: Certification | None = None,
) -> Guarantee:
    """Returns the amplified guarantee of a run whose clients take part by a scheme.

    For schemes with groups it is that of BandMF Thm 4; for the others, Monte Carlo certifies it
    (``participation.monte_carlo``).

    Args:
      factorization: What makes the noise: lower triangular, of at most the scheme's bands.
      scheme: How every batch is drawn, for the rounds of the factorization.
      noise_multiplier: Relative to the largest column norm of C; zero for none.
      delta: At least 1e-12 and below 1.
      certification: How an epsilon is certified for schemes without groups; by default with seed
        0, cached for the user.

    Returns:
      The guarantee for all rounds.

    Raises:
      ValueError: If the theorem's hypotheses do not hold, see :func:`check_bands`; or an argument
        is out of its range.
    """
    scheme = accounted(scheme)
    _check_structure(catalogue.check_own(factorization), scheme)
    draws = scheme.as_draws()
    bound = factorization.sensitivity(SingleParticipation()).value
    columns = columns_of(factorization, scheme)
    certification = certification or default_certification()
    multiplier = validation.non_negative_number(noise_multiplier, "noise_multiplier")
    whole = Claim(
        factorization.noise_recursion(), draws, multiplier * bound, delta, columns=columns
    )
    if columns is not None:
        # What the kernel divides, so that a certificate is for the same number.
        multiplier = claim.check(whole).noise_multiplier
    found = scheme.amplified(multiplier, delta, columns, certification, DEFAULT_NUM_COORDINATES)
    whole = dataclasses.replace(whole, certificate=found.certificate)
    return _proved(scheme.schema(), whole, scheme, certification.seed)


def _proved(
    participation: Participation,
    claimed: Claim,
    sampling: SamplingScheme | None = None,
    seed: int = 0,
) -> Guarantee:
    return Guarantee(participation, claim.check(claimed), sampling, seed)


def default_certification(*, show_progress: bool = False) -> Certification:
    """Returns how epsilons are certified for schemes without groups: seed 0, in the user's cache.

    Args:
      show_progress: Whether to show progress bars on standard error.
    """
    return Certification(directory=caches.find(search.FOLDER), show_progress=show_progress)


def columns_of(factorization: Factorization, scheme: SamplingScheme) -> StrategyColumns | None:
    """Returns the columns of C that an amplified guarantee depends on, and what roundings move.

    Args:
      factorization: C, lower triangular of at most the scheme's bands. Of a tree, the columns are
        those of the square matrix whose inverse makes its rows of noise, and none is longer than
        those of C (``tree_aggregation``), which noise is scaled to.
      scheme: How clients take part.

    Returns:
      The columns, for schemes without groups; None for others.

    Raises:
      ValueError: If roundings move more than is accounted for.
    """
    if not scheme.depends_on_matrix:
        return None
    num_bands = factorization.streamed_bands() or factorization.num_rounds
    entries = columns_of_encoder(factorization.encode_streamed, factorization.num_rounds, num_bands)
    rounding = max(LARGEST_ROUNDING, _largest_rounding(factorization))
    if factorization.strategy_bands() is not None:
        return StrategyColumns(entries, rounding)
    norm = factorization.sensitivity(SingleParticipation()).value
    return StrategyColumns(entries, rounding, norm)


def check_bands(factorization: Factorization, scheme: SamplingScheme) -> None:
    """Raises ValueError unless C is lower triangular, of the scheme's rounds and at most its bands.

    Rows of noise must follow from the b - 1 rows of noise before as well, unless b is all rounds.
    Where they follow from earlier rows of Z, or from a state, the roundings of a participation stay
    in all later rows (``kernel.integer_rows``), not in b alone.

    Args:
      factorization: C.
      scheme: How clients take part.
    """
    _check_structure(factorization, scheme)
    if scheme.depends_on_matrix:
        _largest_rounding(factorization)


def _check_structure(factorization: Factorization, scheme: SamplingScheme) -> None:
    """Checks all that :func:`check_bands` does, except the size of roundings."""
    num_rounds = factorization.num_rounds
    if scheme.num_rounds != num_rounds:
        raise ValueError(
            f"the sampling scheme is for {scheme.num_rounds} rounds, and the factorization for "
            f"{num_rounds}."
        )
    if scheme.shares_rows:
        memory.check_rounds(num_rounds, _ARRAYS_OF_COLUMNS * 8 * num_rounds, "the columns of C")
    bands = (
        factorization.streamed_bands()
        if scheme.depends_on_matrix
        else factorization.strategy_bands()
    )
    if bands is None or bands > scheme.num_bands:
        found = "is not square and lower triangular" if bands is None else f"has {bands} bands"
        raise ValueError(
            f"the strategy matrix of {factorization.mechanism} {found}: amplification by sampling "
            f"needs a lower-triangular matrix of at most {scheme.num_bands} bands (BandMF Thm 4)."
        )
    recursion = factorization.noise_recursion()
    reaches_far = (
        recursion.draws_earlier_rows_of_z
        or recursion.num_state_vectors > 0
        or recursion.num_earlier_rows >= bands
    )
    if reaches_far and bands < num_rounds:
        raise ValueError(
            f"the noise of {factorization.mechanism} is made from rows of Z or of noise that lie "
            f"further back than its {bands} bands, and so would its roundings reach: for "
            "amplification by sampling, use a banded mechanism with bands for at most half of the "
            "rounds."
        )


def observed(
    plan: Guarantee, factorization: Factorization, participation: ObservedParticipation
) -> Guarantee:
    """Returns the guarantee that follows from the observed participations.

    Rows of C after the last released round were never released, so the sensitivity is
    that of the leading part of C. Unless a data sampler drew the participations, the guarantee
    holds only if they did not depend on released models or on data.

    Args:
      plan: What :func:`planned` or :func:`sampled` returned for the run; it fixes the noise.
      factorization: What made the noise.
      participation: The observed participations.

    Returns:
      The guarantee for the rounds that were released; epsilon 0 if there were none. With
      min-separation sampling and balls in bins it is that of all rounds.

    Raises:
      ValueError: If more rounds were released than the factorization has.
    """
    rounds = participation.num_rounds
    if rounds > factorization.num_rounds:
        raise ValueError(
            f"{rounds} rounds were released, and the factorization is for "
            f"{factorization.num_rounds}: the noise of some rounds cannot have come from it."
        )
    if plan.sampling is not None and participation.keeps_sampling and rounds >= 1:
        # Clients are drawn with the probability of the plan, however early the run ended; those
        # that were never drawn are covered too.
        scheme = plan.sampling.of_first(rounds)
        first = dataclasses.replace(plan.proved.claim, epsilon=None, num_rounds=rounds)
        if scheme is None:
            # Fewer rounds are post-processing of all. Another certificate would take minutes.
            return dataclasses.replace(plan, proved=claim.check(first))
        draws = scheme.as_draws()
        assert draws is not None
        return _proved(scheme.schema(), dataclasses.replace(first, taking_part=draws), scheme)
    if participation.max_participations == 0:
        return _under(participation.schema(), plan, rounds, Pattern(()))
    return _under(participation.schema(), plan, rounds)


def of_first_rounds(plan: Guarantee, num_rounds: int) -> claim.Guarantee:
    """Returns the guarantee of the first rounds of a plan, without amplification.

    Args:
      plan: The plan.
      num_rounds: The rounds that were released, at least 1.
    """
    return claim.check(dataclasses.replace(_without_draws(plan), num_rounds=num_rounds))


def _without_draws(plan: Guarantee) -> Claim:
    """The claim of a plan towards an adversary who knows all draws."""
    return dataclasses.replace(
        plan.proved.claim,
        taking_part=plan.participation.as_schema(),
        epsilon=None,
        basis=None,
        columns=None,
        certificate=None,
    )


def worst_case(
    plan: Guarantee, factorization: Factorization, participation: ObservedParticipation
) -> Guarantee:
    """Returns the guarantee of a run that broke its plan, however it went on.

    It is for all rounds of the factorization, the smaller of the planned and the observed
    separation and the larger number of participations, without amplification. So it is never
    better than the planned one. It holds only if participation did not depend on released models
    or on data.

    Args:
      plan: What was planned; it fixes the noise.
      factorization: What made the noise.
      participation: The observed participations so far.

    Returns:
      The guarantee.
    """
    rounds = factorization.num_rounds
    planned_separation = plan.participation.separation_in(rounds)
    most = max(plan.participation.most_participations(rounds), participation.max_participations, 1)
    schema = MinSeparation(min(planned_separation, participation.separation or rounds), most)
    return _under(schema, plan, rounds)


def _under(
    schema: Participation, plan: Guarantee, num_rounds: int, pattern: Pattern | None = None
) -> Guarantee:
    """The guarantee of the noise of a plan under a schema that was observed."""
    taking_part: Schema | Pattern = schema.as_schema() if pattern is None else pattern
    return _proved(schema, observed_claim(plan, taking_part, num_rounds))


def observed_claim(plan: Guarantee, taking_part: Schema | Pattern, num_rounds: int) -> Claim:
    """Returns the claim that a ledger supports, of the noise of a plan.

    Args:
      plan: The plan.
      taking_part: The participation that the ledger shows.
      num_rounds: The rounds that were released.
    """
    return dataclasses.replace(
        _without_draws(plan), taking_part=taking_part, num_rounds=num_rounds, basis=Basis.LEDGER
    )


def keeps_plan(plan: Participation, participation: ObservedParticipation) -> bool:
    """Returns whether a schema or scheme allows the observed participations.

    Args:
      plan: The schema, or the scheme of a data sampler.
      participation: The observed participations. Of a scheme, their ``keeps_sampling`` says it.
    """
    if plan.is_sampled:
        return participation.keeps_sampling is True
    return plan.as_schema().allows_separations(
        participation.max_participations, participation.separation, participation.largest_separation
    )


def num_outside_schema(plan: Participation, participations: IntArray, separations: IntArray) -> int:
    """Returns how many clients took part in rounds that a schema forbids.

    Args:
      plan: The schema.
      participations: (r,): of each client that took part at least twice, how often it did.
      separations: (sum of participations - r,): the rounds from each of its participations
        to the next, of one client after the other.
    """
    if not len(participations):
        return 0
    # At once, as there may be millions.
    starts = np.cumsum(participations - 1) - (participations - 1)
    ends_of = (np.minimum.reduceat(separations, starts), np.maximum.reduceat(separations, starts))
    patterns, clients = np.unique([participations, *ends_of], axis=1, return_counts=True)
    schema = plan.as_schema()
    return sum(
        int(number)
        for pattern, number in zip(patterns.T.tolist(), clients, strict=True)
        if not schema.allows_separations(*pattern)
    )


def _largest_rounding(factorization: Factorization) -> float:
    """By how many steps of Z roundings that depend on one client move a number of a row, at most.

    Raises:
      ValueError: If that is not much less than the noise.
    """
    if factorization in _ROUNDINGS:
        return _ROUNDINGS[factorization]
    rows = IntegerRows.of(factorization.noise_recursion())
    # Rows that follow from rows of Z have all earlier roundings, times entries of C.
    factor = (
        integer_rows.largest_row_sum(rows.normalised)
        if rows.normalised.draws_earlier_rows_of_z
        else 1.0
    )
    errors = [Rounding.of(rows, blocks).float_error for blocks in (None, Blocks.of(rows.recursion))]
    moved = factor * (1.0 + 2.0 * float(np.max(errors)))
    # Written so that NaN does not pass.
    if not moved <= _MOST_ROUNDING:
        raise ValueError(
            f"the noise of {factorization.mechanism} may be rounded by {moved:.2g} steps, and at "
            f"most {_MOST_ROUNDING:g} are accounted for where clients draw for themselves: use a "
            "banded mechanism, or a matrix that is better conditioned."
        )
    _ROUNDINGS[factorization] = moved
    return moved


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
