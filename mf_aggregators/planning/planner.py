"""Planning: which mechanism suits a population, a timer, a memory budget and a privacy target.

Every mechanism that fits is made and compared by its effective error (``plans``); a plan for
another error than the mean makes for it what can be made for it. The recommended one is the best,
or one about as good whose noise costs less.

Searches run in processes of their own, so that every core has some and a deadline can end them. A
process puts factorizations into the cache, from which the plan takes them. The plan computes
itself what is missing there: a process that fails or is killed costs time and nothing else.
"""

import contextlib
import dataclasses
import functools
import multiprocessing
import operator
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent import futures
from types import MappingProxyType

import numpy as np

from mf_aggregators import caches, catalogue, lower_bounds, memory
from mf_aggregators.catalogue import Variant
from mf_aggregators.factorizations import DenseFactorization, Factorization
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.certificate import MECHANISMS
from mf_aggregators.kernel.numbers import NotProved
from mf_aggregators.kernel.rows import NoiseRecursion, dense_rows
from mf_aggregators.lower_bounds import LowerBound
from mf_aggregators.mechanism import Mechanism, calibrate
from mf_aggregators.noise import costs
from mf_aggregators.participation import Participation
from mf_aggregators.participation.certificate_search import MechanismBudget
from mf_aggregators.planning import plans, proposals
from mf_aggregators.planning.plans import Candidate, Infeasible, Plan, Setting, Skipped
from mf_aggregators.progress_bars import ProgressBar
from mf_aggregators.workloads import Workload

# A lower estimate, of the errors of the least mechanism.
_BYTES_PER_ROUND = 24
# Errors that differ by less than this are a tie: the cheaper mechanism wins.
_TIE = 0.005
_OFFERS_NOTHING = "offers nothing for such clients"

# How many mechanisms may be tested for the noise multiplier of one candidate. Three candidates, and
# one more test for the guarantee of the recommended one, use up the 16 that delta pays for.
_MECHANISMS_OF_A_CANDIDATE = 5

# Searches for fewer rounds take less time than the start of a process.
_FEWEST_ROUNDS_OF_PROCESSES = 256
# How many threads the numerical libraries of a process may have.
_THREADS = "OPENBLAS_NUM_THREADS"
# Seconds in which a process that was told to end removes an unfinished file; then it is killed.
_SECONDS_TO_END = 2.0
# The longest time limit that a clock is asked for: a month.
_LONGEST_WAIT = 2.6e6


class TimeLimitError(Exception):
    """A mechanism is not computed within the time limit; the message says why."""


def make(
    setting: Setting,
    *,
    cache_directory: pathlib.Path | None = None,
    progress: Callable[[str, str], None] = lambda name, note: None,
    processes: int = 1,
    mechanisms: Collection[str] | None = None,
    own: Mapping[str, Factorization] = MappingProxyType({}),
    time_limit: float | None = None,
    evaluated: Callable[[Candidate | Infeasible], None] = lambda found: None,
) -> Plan:
    """Compares the mechanisms that fit a setting.

    Args:
      setting: What the run is given.
      cache_directory: Where factorizations are cached between calls; None for nowhere.
      progress: Called with the name of each computation before it begins, and how many of them are
        done.
      processes: How many processes may search at a time for matrices of 256 rounds or more; with
        one and no time limit, or without a cache, this one computes all. Others are spawned, so
        that a program has to guard its main module as ``multiprocessing`` asks.
      mechanisms: The names of the mechanisms to evaluate; None for all.
      own: Further factorizations for ``num_rounds`` to compare, by the directories of their
        checkpoints.
      time_limit: Seconds after which no search begins or goes on for a matrix that the cache does
        not have: what is not there by then is skipped. Proofs of what is recommended come on top
        of it, and so does what this process has begun. None for no limit.
      evaluated: Called with each mechanism once it is evaluated or infeasible, for callers that may
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
    rounds = setting.num_rounds
    candidates: list[Candidate] = []
    infeasible, skipped = [], []
    # Names of skipped mechanisms by matrix: approximations of them are skipped as well.
    skipped_names: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        # Processes hand over matrices in a cache, and several schemes use one matrix.
        cache = cache_directory or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # All candidates with timers have the same one.
        bound_of = functools.cache(functools.partial(_lower_bound, setting, cache))
        proposed = _proposed(setting, mechanisms, own)
        feasible = [each for each in proposed if not each.reason]
        searches = {_matrix(each, rounds): each for each in feasible if each.is_search}
        cached = {
            matrix: searches.pop(matrix)
            for matrix, each in list(searches.items())
            if proposals.holds(cache, proposals.description_of(each, rounds))
        }
        has_processes = rounds >= _FEWEST_ROUNDS_OF_PROCESSES and (
            processes > 1 or deadline is not None
        )
        compute = functools.partial(_compute, rounds, cache)
        wait = stack.enter_context(
            _computing(searches if has_processes else {}, compute, processes, deadline)
        )
        done = 0
        for variant in proposed:
            matrix, name = _matrix(variant, rounds), variant.name_with_sampling
            if variant.reason:
                infeasible.append(Infeasible(name, variant.reason))
                evaluated(infeasible[-1])
                continue
            note = ", cached by an earlier plan" if matrix in cached else ""
            progress(name, f"{done} of {len(feasible)} done{note}")
            done += 1
            base = "" if variant.base is None else _matrix(variant.base, rounds)
            try:
                if base in skipped_names:
                    raise TimeLimitError(f"approximates {skipped_names[base]}, which is skipped")
                is_over = deadline is not None and time.monotonic() > deadline
                if matrix in searches and not wait(matrix) and is_over:
                    raise TimeLimitError("was not begun when the time had passed")
            except TimeLimitError as error:
                skipped_names[matrix] = name
                skipped.append(Skipped(name, str(error)))
                continue
            found = _evaluated(setting, variant, cache, bound_of)
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
    return Plan(
        setting,
        tuple(candidates),
        tuple(infeasible),
        recommended,
        _reason(candidates, recommended),
        tuple(skipped),
        None if mechanisms is None else tuple(mechanisms),
    )


def _matrix(variant: Variant, num_rounds: int) -> str:
    """The digest of all inputs that determine the matrix of a variant."""
    return caches.digest(proposals.description_of(variant, num_rounds))


def _compute(num_rounds: int, cache: pathlib.Path | None, variant: Variant) -> None:
    """Puts the factorization of a variant into the cache."""
    proposals.computed(variant, num_rounds, cache)


@contextlib.contextmanager
def _computing(
    searches: Mapping[str, Variant],
    compute: Callable[[Variant], None],
    processes: int,
    deadline: float | None = None,
) -> Iterator[Callable[[str], bool]]:
    """Computes variants in other processes while a block runs, and ends those processes with it.

    Args:
      searches: The variants that are computed, in order, by any names. What approximates another
        factorization begins when it is waited for, because that factorization is cached by then.
      compute: Computes a variant, and caches it. It is pickled.
      processes: The most processes at a time, at least 1. Cores that are left go to their threads.
      deadline: The time, as ``time.monotonic`` has it, after which nothing is waited for; None for
        none.

    Yields:
      A function that waits for the variant of a name, if a process computes it, and returns
      whether one did. It raises TimeLimitError if the process has not ended by the deadline.
    """
    # Daemonic processes may not have children.
    if not searches or multiprocessing.current_process().daemon:
        yield lambda name: False
        return
    others = set(multiprocessing.active_children())
    workers = min(processes, len(searches))
    executor = futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_begin
    )
    running: dict[str, futures.Future[None]] = {}

    def start(name: str) -> None:
        # If no process can be started, or one was killed, the plan computes all itself.
        with contextlib.suppress(OSError, futures.BrokenExecutor), _threads(processes // workers):
            running[name] = executor.submit(compute, searches[name])

    def wait(name: str) -> bool:
        if name in searches and name not in running:
            start(name)
        if name not in running:
            return False
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            # The plan comes upon the same error itself.
            return running[name].exception(left) is None
        except futures.TimeoutError:
            raise TimeLimitError("was not done when the time had passed") from None

    try:
        for name, variant in searches.items():
            if variant.base is None:
                start(name)
        yield wait
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        started = set(multiprocessing.active_children()) - others
        for process in started:
            process.terminate()
        for process in started:
            process.join(_SECONDS_TO_END)
            process.kill()
            process.join()


def _begin() -> None:
    """Prepares a process, which ends with an exit: files that are half written are removed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    warnings.showwarning = _show_warning
    # A lock of multiprocessing would be left behind by a process that is killed.
    ProgressBar.set_lock(threading.RLock())


def _show_warning(message: Warning | str, *unused: object, **also_unused: object) -> None:
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = str(number)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before


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


def _evaluated(
    setting: Setting,
    variant: Variant,
    cache: pathlib.Path,
    bound_of: Callable[[Participation], LowerBound],
) -> Candidate | Infeasible:
    """The variant with the noise of the plan, or why it does not fit."""
    name, factorization = (
        variant.name_with_sampling,
        proposals.computed(variant, setting.num_rounds, cache),
    )
    if variant.sampling is not None:
        try:
            factorization.check_scheme(variant.sampling)
        except ValueError as error:
            return Infeasible(name, str(error).rstrip("."))
    try:
        candidate = _candidate(setting, variant, factorization, cache, bound_of)
    except NotProved as error:
        return Infeasible(name, f"has no guarantee: {str(error).rstrip('.')}")
    reason = _why_infeasible(setting, candidate)
    return candidate if reason is None else Infeasible(candidate.name, reason)


def _candidate(
    setting: Setting,
    variant: Variant,
    factorization: Factorization,
    cache: pathlib.Path,
    bound_of: Callable[[Participation], LowerBound],
) -> Candidate:
    scheme = variant.sampling
    # Proofs take long, and are made for the recommended mechanism alone.
    is_estimate = scheme is not None and not scheme.has_groups
    participation = scheme or variant.participation
    assert participation is not None
    if setting.noise_multiplier is not None:
        mechanism = Mechanism(factorization, participation, setting.noise_multiplier)
    elif setting.rho is not None:
        mechanism = calibrate(factorization, participation, rho=setting.rho)
    else:
        mechanism = proposals.calibrated(
            factorization,
            participation,
            setting.epsilon,
            setting.delta,
            cache,
            is_estimate=is_estimate,
        )
    schema = mechanism.schema
    recursion = _recursion_for_costs(factorization)
    return Candidate(
        variant=variant,
        mechanism=mechanism,
        is_estimate=is_estimate,
        errors=factorization.errors(Workload("prefix_sum", setting.num_rounds), schema),
        lower_bound=bound_of(schema) if scheme is None else None,
        kept_bytes=setting.model_size * costs.bytes_per_parameter(recursion),
        cost=costs.choose(recursion, setting.model_size, disk_limit=setting.noise_disk),
        clients_per_round=setting.clients_per_round,
        error=setting.error,
    )


def _recommended(candidates: list[Candidate]) -> Candidate:
    ties = [
        candidate
        for candidate in candidates
        if candidate.effective_error <= (1.0 + _TIE) * candidates[0].effective_error
    ]
    # Costs are compared as printed: among equals, the least error wins.
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


def _proposed(
    setting: Setting, mechanisms: Collection[str] | None, own: Mapping[str, Factorization]
) -> list[Variant]:
    """The variants of the requested mechanisms."""
    known = catalogue.entries()
    unknown = [name for name in mechanisms or () if name not in known]
    if unknown:
        raise ValueError(
            f"there is no mechanism {numbers.shown(unknown[0])}, only {', '.join(known)}."
        )
    memory.check_rounds(setting.num_rounds, _BYTES_PER_ROUND, "a plan")
    proposed = proposals.proposed(setting, own)
    if mechanisms is None:
        return proposed
    offered = {each.kind for each in proposed if each.factorization is None}
    others = [name for name in mechanisms if name not in offered]
    if others and offered.isdisjoint(mechanisms):
        why = "; ".join(f"{name} {_OFFERS_NOTHING}" for name in others)
        raise ValueError(f"none of the mechanisms is planned for such clients: {why}.")
    return [
        *(each for each in proposed if each.kind in mechanisms or each.factorization is not None),
        *(Variant(name, reason=_OFFERS_NOTHING) for name in others),
    ]


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
    seconds, most = candidate.cost.seconds_per_round, proposals.most_seconds(setting)
    if seconds > most:
        return f"takes {seconds:.2g} seconds a round for its noise, more than {most:.2g}"
    return None


def _recursion_for_costs(factorization: Factorization) -> NoiseRecursion:
    """A recursion that costs as much as the factorization's own: costs depend on sizes alone."""
    if isinstance(factorization, DenseFactorization):
        # Its own takes the inverse of a dense matrix.
        return dense_rows(np.eye(factorization.num_rounds))
    return factorization.noise_recursion()


def _lower_bound(setting: Setting, cache: pathlib.Path | None, schema: Participation) -> LowerBound:
    """The bound for prefix sums, out of the cache if it is there."""
    maximum = setting.error == "max"

    @functools.cache
    def bound() -> LowerBound:
        found = lower_bounds.compute(setting.num_rounds, schema, maximum=maximum)
        assert found is not None
        return found

    def number(name: str) -> float:
        described = {
            "mechanism": "lower-bound",
            "error": name,
            "maximum": maximum,
            "num_rounds": setting.num_rounds,
            **schema.to_dict(),
        }
        return proposals.fetch_number(cache, described, lambda: float(getattr(bound(), name)))

    return LowerBound(*(number(field.name) for field in dataclasses.fields(LowerBound)))
