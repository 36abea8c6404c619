"""Planning: which mechanism suits a population, a timer, a memory budget and a privacy target.

Every mechanism that fits is made and compared by its effective error (``plans``); a plan for
another error than the mean makes for it what can be made for it. The recommended one is the best,
or one about as good whose noise costs less.
"""

import contextlib
import dataclasses
import functools
import operator
import pathlib
import tempfile
import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from mf_aggregators import catalogue, lower_bounds, memory, workloads
from mf_aggregators.checkpoints import factorization_cache
from mf_aggregators.factorizations import DenseFactorization, Factorization
from mf_aggregators.factorizations.toeplitz import recursion_of
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.certificate import MECHANISMS
from mf_aggregators.kernel.numbers import NotProved
from mf_aggregators.kernel.rows import DenseNoise, NoiseRecursion, independent_rows
from mf_aggregators.lower_bounds import LowerBound
from mf_aggregators.noise import costs
from mf_aggregators.participation import (
    MinSeparation,
    Participation,
    SingleParticipation,
    sampling_schemes,
)
from mf_aggregators.participation.certificate_search import MechanismBudget
from mf_aggregators.planning import plans, proposals, side_processes
from mf_aggregators.planning.plans import (
    ANY_SAMPLING,
    Candidate,
    Infeasible,
    Plan,
    Setting,
    Skipped,
)
from mf_aggregators.planning.proposals import Proposal
from mf_aggregators.planning.side_processes import TimeLimitError

_BYTES_OF_ROW = 4
# Noise that takes longer than this a round, and so many times as long as independent noise, is
# of no use to a run.
_MOST_SECONDS_PER_ROUND = 60.0
_MOST_TIMES_INDEPENDENT = 100.0
# A lower estimate, of the errors of the least mechanism.
_BYTES_PER_ROUND = 24
# Errors that differ by less than this do not decide; what is cheaper does.
_TIE = 0.005
_OFFERS_NOTHING = "offers nothing for such clients"

# How many mechanisms may be tested for the noise multiplier of one candidate. Three candidates, and
# one more test for the guarantee of the recommended one, use up the 16 that delta pays for.
_MECHANISMS_OF_A_CANDIDATE = 5

# Searches for fewer rounds take less time than the start of a process.
_FEWEST_ROUNDS_OF_PROCESSES = 256

# The longest time limit that a clock is asked for: a month.
_LONGEST_WAIT = 2.6e6


def make(
    setting: Setting,
    *,
    cache_directory: pathlib.Path | None = None,
    progress: Callable[[str, str], None] = lambda name, note: None,
    processes: int = 1,
    mechanisms: Collection[str] | None = None,
    time_limit: float | None = None,
    evaluated: Callable[[Candidate | Infeasible], None] = lambda found: None,
) -> Plan:
    """Compares the mechanisms that fit a setting.

    Args:
      setting: What the run is given.
      cache_directory: Where factorizations are cached between calls; None for nowhere.
      progress: Is told the name of each computation before it begins, and how many of them are
        done.
      processes: How many processes may search at a time for matrices of 256 rounds or more; with
        one and no time limit, or without a cache, this one computes all. Others are spawned, so
        that a program has to guard its main module as ``multiprocessing`` asks.
      mechanisms: The names of the mechanisms to evaluate; None for all.
      time_limit: Seconds after which no search begins or goes on for a matrix that the cache does
        not have: what is not there by then is skipped. Proofs of what is recommended come on top
        of it, and so does what this process has begun. None for no limit.
      evaluated: Is told of each mechanism once it is evaluated or infeasible, for those who may
        have to do with a part of the plan.

    Returns:
      The plan.

    Raises:
      ValueError: If no mechanism fits or none is evaluated within the time limit, a name is of no
        mechanism, or the privacy target cannot be met.
    """
    if time_limit is not None:
        time_limit = numbers.positive_number(time_limit, "time_limit")
    # A longer wait is none, and the system takes no number without bounds.
    deadline = None if time_limit is None else time.monotonic() + min(time_limit, _LONGEST_WAIT)
    candidates, infeasible, skipped = [], [], []
    # Names of skipped mechanisms, by kind and options: what approximates them is skipped as well.
    skipped_names: dict[tuple[str, tuple[tuple[str, Any], ...]], str] = {}
    with contextlib.ExitStack() as stack:
        cache = cache_directory
        if cache is None and deadline is not None:
            # Processes hand over what they compute in a cache.
            cache = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # All candidates with timers have the same one.
        bound_of = functools.cache(functools.partial(_lower_bound, setting, cache))
        proposed = _proposals(setting, cache, mechanisms)
        total, done = sum(each.compute is not None for each in proposed), 0
        # The number of the first proposal with each matrix.
        first: dict[Any, int] = {}
        for number, each in enumerate(proposed):
            first.setdefault((each.kind, each.options, each.participation), number)
        searches = {
            number: proposed[number].base
            for number in first.values()
            if proposed[number].is_search
            and cache is not None
            and setting.num_rounds >= _FEWEST_ROUNDS_OF_PROCESSES
            and (processes > 1 or deadline is not None)
        }
        compute = functools.partial(_compute, setting, cache, mechanisms)
        wait = stack.enter_context(side_processes.computing(searches, compute, processes, deadline))
        for proposal in proposed:
            if proposal.compute is not None:
                cached = ", cached by an earlier plan" if proposal.is_cached else ""
                progress(proposal.name, f"{done} of {total} done{cached}")
                done += 1
            try:
                if proposal.base in skipped_names:
                    base = skipped_names[proposal.base]
                    raise TimeLimitError(f"approximates {base}, which is skipped")
                which = first[proposal.kind, proposal.options, proposal.participation]
                is_over = deadline is not None and time.monotonic() > deadline
                if proposal.is_search and not wait(which) and is_over:
                    raise TimeLimitError("was not begun when the time had passed")
            except TimeLimitError as error:
                skipped_names[proposal.kind, proposal.options] = proposal.name
                skipped.append(Skipped(proposal.name, str(error)))
                continue
            found = _evaluated(setting, proposal, cache, bound_of)
            evaluated(found)
            if isinstance(found, Candidate):
                candidates.append(found)
            else:
                infeasible.append(found)
    if not candidates and skipped:
        raise ValueError(
            f"no mechanism that fits was computed within {time_limit:g} s; {skipped[0].mechanism} "
            f"{skipped[0].reason}: allow more time, or name quicker mechanisms."
        )
    if not candidates:
        why = "".join(f" ({each.mechanism}: {each.reason})" for each in infeasible[:1])
        raise ValueError(
            f"no mechanism fits{why}: allow more noise memory or disk, a smaller model or fewer "
            "rounds, or name other mechanisms."
        )
    recommended = _certified(setting, candidates, cache_directory, progress)
    reason = _reason(candidates, recommended)
    return Plan(
        setting,
        tuple(candidates),
        tuple(infeasible),
        recommended,
        reason,
        tuple(skipped),
        None if mechanisms is None else tuple(mechanisms),
    )


def _certified(
    setting: Setting,
    candidates: list[Candidate],
    cache_directory: pathlib.Path | None,
    progress: Callable[[str, str], None],
) -> Candidate:
    """Returns the candidate to recommend, its noise certified; sorts and updates ``candidates``."""
    candidates.sort(key=operator.attrgetter("effective_error"))
    recommended = _recommended(candidates)
    budget = MechanismBudget(MECHANISMS - 1)
    while recommended.is_estimate and budget.left >= _MECHANISMS_OF_A_CANDIDATE:
        progress(
            f"certificate of {recommended.name_with_sampling}",
            "takes minutes for thousands of rounds",
        )
        mechanism = proposals.calibrated(
            recommended.mechanism.factorization,
            recommended.mechanism.participation,
            setting.epsilon,
            setting.delta,
            cache_directory,
            budget=budget.take(_MECHANISMS_OF_A_CANDIDATE),
        )
        candidates[candidates.index(recommended)] = dataclasses.replace(
            recommended, mechanism=mechanism, is_estimate=False
        )
        candidates.sort(key=operator.attrgetter("effective_error"))
        recommended = _recommended(candidates)
    if recommended.is_estimate:
        # Those that were certified turned out to need more noise than the estimates of others.
        recommended = _recommended([each for each in candidates if not each.is_estimate])
    return recommended


def _compute(
    setting: Setting,
    cache_directory: pathlib.Path | None,
    mechanisms: Collection[str] | None,
    number: int,
) -> None:
    """Puts what is proposed into the cache."""
    compute = _proposals(setting, cache_directory, mechanisms)[number].compute
    assert compute is not None
    compute()


def _evaluated(
    setting: Setting,
    proposal: Proposal,
    cache_directory: pathlib.Path | None,
    bound_of: Callable[[Participation], LowerBound],
) -> Candidate | Infeasible:
    if proposal.compute is None:
        return Infeasible(proposal.name, proposal.reason)
    try:
        candidate = _candidate(setting, proposal, cache_directory, bound_of)
    except NotProved as error:
        return Infeasible(proposal.name, f"has no guarantee: {str(error).rstrip('.')}")
    if isinstance(candidate, Infeasible):
        return candidate
    reason = _why_infeasible(setting, candidate)
    return candidate if reason is None else Infeasible(candidate.name, reason)


def _recommended(candidates: list[Candidate]) -> Candidate:
    ties = [
        candidate
        for candidate in candidates
        if candidate.effective_error <= (1.0 + _TIE) * candidates[0].effective_error
    ]
    # As they are printed: the least error of those that cost the same.
    return min(ties, key=lambda candidate: float(f"{candidate.cost.seconds_per_round:.2g}"))


def _reason(candidates: list[Candidate], recommended: Candidate) -> str:
    if len(candidates) == 1:
        return f"{recommended.name} is the only mechanism that fits."
    best = candidates[0]
    quantity = plans.quantity_of(best.error)
    if recommended.effective_error > (1.0 + _TIE) * best.effective_error:
        return (
            f"{recommended.name_with_sampling} has the smallest {quantity} of those whose "
            f"noise is proved to be enough, {recommended.effective_error:.4g}; delta pays for no "
            f"test of {best.name_with_sampling}, of about {best.effective_error:.4g}."
        )
    if recommended is not best:
        return (
            f"{recommended.name_with_sampling} has an {quantity} within {100 * _TIE:g} % of "
            f"the least, that of {best.name_with_sampling}, and its noise costs "
            f"{recommended.cost.seconds_per_round:.2g} instead of "
            f"{best.cost.seconds_per_round:.2g} seconds a round."
        )
    second = candidates[1]
    share = 100.0 * (second.effective_error / best.effective_error - 1.0)
    about = "about " if second.is_estimate else ""
    return (
        f"{best.name_with_sampling} has the smallest {quantity} of the {len(candidates)} "
        f"mechanisms that fit, {best.effective_error:.4g}; the next, {second.name_with_sampling}, "
        f"has {about}{share:.1f} % more."
    )


def _proposals(
    setting: Setting,
    cache_directory: pathlib.Path | None,
    mechanisms: Collection[str] | None = None,
) -> list[Proposal]:
    """What is evaluated of the mechanisms that are asked for."""
    unknown = [name for name in mechanisms or () if name not in catalogue.entries()]
    if unknown:
        raise ValueError(
            f"there is no mechanism {numbers.shown(unknown[0])}, only "
            f"{', '.join(catalogue.entries())}."
        )
    proposed = _all_proposals(setting, cache_directory)
    if mechanisms is None:
        return proposed
    offered = {proposal.kind for proposal in proposed}
    others = [name for name in mechanisms if name not in offered]
    if others and offered.isdisjoint(mechanisms):
        why = "; ".join(f"{name} {_OFFERS_NOTHING}" for name in others)
        raise ValueError(f"none of the mechanisms is planned for such clients: {why}.")
    return [
        *(proposal for proposal in proposed if proposal.kind in mechanisms),
        *(Proposal(name, (), SingleParticipation(), reason=_OFFERS_NOTHING) for name in others),
    ]


def _all_proposals(setting: Setting, cache_directory: pathlib.Path | None) -> list[Proposal]:
    memory.check_rounds(setting.num_rounds, _BYTES_PER_ROUND, "a plan")
    sizes = (setting.num_rounds, setting.population, setting.clients_per_round)
    if setting.sampling is None:
        assert setting.participation is not None
        return _for_timers(setting, setting.participation, cache_directory)
    if setting.sampling != ANY_SAMPLING:
        return _for_scheme(setting, setting.sampling, cache_directory)
    found = _for_timers(setting, MinSeparation(proposals.most_bands(*sizes)), cache_directory)
    has_fixed_order = False
    for name, scheme in sampling_schemes().items():
        # With batches of one size, a client takes the place of another one: others need less noise.
        if not scheme.has_random_sizes:
            continue
        # What is made for batches in a fixed order is the same for all schemes with groups.
        repeats = scheme.has_groups and has_fixed_order
        of_scheme = _for_scheme(setting, name, cache_directory)
        found += [each for each in of_scheme if each.sampling is not None or not repeats]
        has_fixed_order |= scheme.has_groups
    return found


def _for_scheme(
    setting: Setting, name: str, cache_directory: pathlib.Path | None
) -> list[Proposal]:
    of = (
        proposals.for_sampling
        if sampling_schemes()[name].has_groups
        else proposals.for_random_participation
    )
    return of(
        setting.num_rounds,
        setting.population,
        setting.clients_per_round,
        name,
        cache_directory,
        setting.error,
    )


def _for_timers(
    setting: Setting, participation: Participation, cache_directory: pathlib.Path | None
) -> list[Proposal]:
    return proposals.for_timers(
        setting.num_rounds,
        participation,
        functools.partial(_affordable_bands, setting),
        cache_directory,
        setting.error,
    )


def _affordable_bands(setting: Setting, most: int) -> tuple[int, str]:
    """The most bands that fit into memory and disk, at least 1, and what limits them."""
    affordable, budget = most, "noise"
    if setting.noise_memory is not None:
        # b bands keep b - 1 rows.
        rows = int(setting.noise_memory // (_BYTES_OF_ROW * setting.model_size))
        affordable = min(most, rows + 1)
    if setting.noise_disk is None or _fits_on_disk(setting, affordable):
        return affordable, budget
    # As many as fit are found by bisection: one band keeps nothing.
    fitting, too_many = 1, affordable
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if _fits_on_disk(setting, middle):
            fitting = middle
        else:
            too_many = middle
    return fitting, "noise on disk"


def _fits_on_disk(setting: Setting, num_bands: int) -> bool:
    rounds = setting.num_rounds
    # What a recursion costs follows from its sizes alone.
    recursion = recursion_of(rounds, np.ones(num_bands), lambda: np.ones(rounds))
    cost = costs.choose(recursion, setting.model_size, disk_limit=setting.noise_disk)
    if setting.noise_disk is not None and cost.disk_bytes > setting.noise_disk:
        return False
    return cost.seconds_per_round <= _most_seconds(setting)


def _most_seconds(setting: Setting) -> float:
    """The most seconds a round that noise may take."""
    independent = costs.choose(independent_rows(setting.num_rounds), setting.model_size)
    return max(_MOST_SECONDS_PER_ROUND, _MOST_TIMES_INDEPENDENT * independent.seconds_per_round)


def _why_infeasible(setting: Setting, candidate: Candidate) -> str | None:
    """Why a candidate does not fit, if it does not."""
    memory, disk = setting.noise_memory, setting.noise_disk
    if memory is not None and candidate.kept_bytes > memory:
        return (
            f"keeps {candidate.kept_bytes / 1e9:.3g} GB of noise between rounds, more than "
            f"{memory / 1e9:.3g} GB"
        )
    if disk is not None and candidate.cost.disk_bytes > disk:
        return (
            f"keeps {candidate.cost.disk_bytes / 1e9:.3g} GB of noise on disk, more than "
            f"{disk / 1e9:.3g} GB"
        )
    seconds, most = candidate.cost.seconds_per_round, _most_seconds(setting)
    if seconds > most:
        return f"takes {seconds:.2g} seconds a round for its noise, more than {most:.2g}"
    return None


def _recursion_for_costs(factorization: Factorization) -> NoiseRecursion:
    """A recursion that costs as much as the factorization's own: costs depend on sizes alone."""
    if isinstance(factorization, DenseFactorization):
        # Its own takes the inverse of a dense matrix.
        return DenseNoise(np.eye(factorization.num_rounds))
    return factorization.noise_recursion()


def _candidate(
    setting: Setting,
    proposal: Proposal,
    cache_directory: pathlib.Path | None,
    bound_of: Callable[[Participation], LowerBound],
) -> Candidate | Infeasible:
    assert proposal.compute is not None
    scheme = proposal.sampling
    # Proofs take their time, and are made for what is recommended alone.
    is_estimate = scheme is not None and not scheme.has_groups
    factorization = proposal.compute()
    if scheme is not None:
        try:
            factorization.check_scheme(scheme)
        except ValueError as error:
            return Infeasible(proposal.name, str(error).rstrip("."))
    mechanism = proposals.calibrated(
        factorization,
        scheme or proposal.participation,
        setting.epsilon,
        setting.delta,
        cache_directory,
        is_estimate=is_estimate,
        rho=setting.rho,
        noise_multiplier=setting.noise_multiplier,
    )
    workload, schema = workloads.Workload("prefix_sum", setting.num_rounds), mechanism.schema
    errors = mechanism.factorization.errors(workload, schema)
    recursion = _recursion_for_costs(mechanism.factorization)
    return Candidate(
        kind=proposal.kind,
        options=proposal.options,
        base=proposal.base,
        mechanism=mechanism,
        is_estimate=is_estimate,
        errors=errors,
        lower_bound=bound_of(schema) if scheme is None else None,
        kept_bytes=setting.model_size * costs.bytes_per_parameter(recursion),
        cost=costs.choose(recursion, setting.model_size, disk_limit=setting.noise_disk),
        clients_per_round=setting.clients_per_round,
        error=setting.error,
    )


def _lower_bound(
    setting: Setting, cache_directory: pathlib.Path | None, schema: Participation
) -> LowerBound:
    """The bound for prefix sums, out of the cache if it is there."""
    maximum = setting.error == "max"

    def compute(name: str) -> float:
        bound = lower_bounds.compute(setting.num_rounds, schema, maximum=maximum)
        assert bound is not None
        return float(getattr(bound, name))

    return LowerBound(
        **{
            field.name: factorization_cache.fetch_number(
                cache_directory,
                {
                    "mechanism": "lower-bound",
                    "error": field.name,
                    "maximum": maximum,
                    "num_rounds": setting.num_rounds,
                    **schema.to_dict(),
                },
                functools.partial(compute, field.name),
            )
            for field in dataclasses.fields(LowerBound)
        }
    )
