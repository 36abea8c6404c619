"""Planning: which mechanism suits a population, a timer, a memory budget and a privacy target.

Every mechanism that can be the best is proposed once, in the order in which it is computed: those
that take no time first, those with fewer bands than others last. Every mechanism that fits is
compared by its effective error (``plans``); a plan for another error than the mean makes for it the
matrices that can be made for it. The recommended one is the best, or one about as good whose noise
costs less.

A cache keeps matrices as checkpoints, and numbers as JSON, under digests of all their inputs.
Searches run in processes of their own, so that every core has some and a deadline can end them. A
process puts matrices into the cache, from which the plan takes them. The plan computes itself what
is missing there: a process that fails or is killed costs time and nothing else.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import math
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
from typing import Any

import numpy as np

from mf_aggregators import (
    atomic_files,
    catalogue,
    checkpoints,
    inputs,
    lower_bounds,
    version,
    workloads,
)
from mf_aggregators.catalogue import Clients, Variant
from mf_aggregators.factorizations import DenseFactorization, Factorization
from mf_aggregators.factorizations.noise_rows import dense_rows
from mf_aggregators.factorizations.searches import RoundError
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.certificate import MECHANISMS
from mf_aggregators.kernel.numbers import NotProved
from mf_aggregators.kernel.rows import BandedNoise, NoiseRecursion
from mf_aggregators.lower_bounds import LowerBound
from mf_aggregators.mechanism import Mechanism, calibrate
from mf_aggregators.noise import places
from mf_aggregators.participation import (
    SCHEMES,
    FixedEpochOrder,
    MinSeparation,
    MinSeparationSampling,
    Participation,
    SingleParticipation,
    certificate_search,
    sampling_scheme,
)
from mf_aggregators.participation.certificate_search import Certification
from mf_aggregators.planning.plans import (
    ANY_SAMPLING,
    Candidate,
    Plan,
    Setting,
    powers_of_two,
)
from mf_aggregators.progress_bars import ProgressBar
from mf_aggregators.workloads import Workload

# The folder of the user's cache directory that factorizations are cached in by default.
FOLDER = "factorizations"
_BYTES_OF_ROW = 4
# Noise is infeasible if it takes longer than this a round, and more than this many times the
# time of independent noise.
_MOST_SECONDS_PER_ROUND = 60.0
_MOST_TIMES_INDEPENDENT = 100.0
# A lower estimate, of the errors of the least mechanism.
_BYTES_PER_ROUND = 24
# Errors that differ by less than this are a tie: the cheaper mechanism wins.
_TIE = 0.005

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


class _SkippedError(Exception):
    """A mechanism is not computed within the time limit; the message says why."""


class _InfeasibleError(Exception):
    """A mechanism does not fit the setting; the message says why."""


def make(
    setting: Setting,
    *,
    cache_directory: pathlib.Path | None = None,
    progress: Callable[[str, str], None] = lambda name, note: None,
    processes: int = 1,
    mechanisms: Collection[str] | None = None,
    own: Mapping[str, Factorization] = MappingProxyType({}),
    time_limit: float | None = None,
) -> Plan:
    """Compares the mechanisms that fit a setting.

    Use it when you do not know yet which mechanism to take; ``mf-plan`` prints the same.

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

    Returns:
      The plan.

    Raises:
      ValueError: If no mechanism fits or none is evaluated within the time limit, a name is of no
        mechanism, or the privacy target cannot be met.

    Example:
      >>> import mf_aggregators as mfa
      >>> timers = mfa.participation.MinSeparation(separation=4)
      >>> sizes = {"num_rounds": 16, "population": 400, "clients_per_round": 50, "model_size": 1000}
      >>> setting = mfa.planning.Setting(
      ...     **sizes, participation=timers, sampling=None, epsilon=8.0, delta=1e-4
      ... )
      >>> plan = mfa.planning.make(setting, mechanisms={"identity", "banded"})
      >>> [each.name for each in plan.candidates], plan.recommended.num_bands
      (['banded 4', 'identity'], 4)
    """
    deadline = math.inf
    if time_limit is not None:
        # A longer wait is none, and the system takes no number without bounds.
        limit = min(numbers.positive_number(time_limit, "time_limit"), _LONGEST_WAIT)
        deadline = time.monotonic() + limit
    rounds = setting.num_rounds
    candidates: list[Candidate] = []
    infeasible, skipped = dict[str, str](), dict[str, str]()
    # Names of skipped mechanisms by matrix: approximations of them are skipped as well.
    skipped_names: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        # Processes hand over matrices in a cache, and several schemes use one matrix.
        cache = cache_directory or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # All candidates with timers have the same one.
        bound_of = functools.cache(functools.partial(_lower_bound, setting, cache))
        proposed = _requested(setting, mechanisms, own)
        feasible = [each for each in proposed if not each.reason]
        searches = {_matrix(each, setting): each for each in feasible if each.is_search}
        # Unlike Path.exists, this does not raise where the cache may not be read.
        cached = {matrix for matrix in searches if os.path.exists(cache / matrix)}
        searches = {matrix: each for matrix, each in searches.items() if matrix not in cached}
        has_processes = rounds >= _FEWEST_ROUNDS_OF_PROCESSES and (
            processes > 1 or time_limit is not None
        )
        compute = functools.partial(_compute, setting, cache)
        wait = stack.enter_context(
            _computing(searches if has_processes else {}, compute, processes, deadline)
        )
        done = 0
        for variant in proposed:
            matrix, name = _matrix(variant, setting), variant.name_with_sampling
            if variant.reason:
                infeasible[name] = variant.reason
                continue
            note = ", cached by an earlier plan" if matrix in cached else ""
            progress(name, f"{done} of {len(feasible)} done{note}")
            done += 1
            base = "" if variant.base is None else _matrix(variant.base, setting)
            try:
                if base in skipped_names:
                    raise _SkippedError(f"approximates {skipped_names[base]}, which is skipped")
                if matrix in searches and not wait(matrix) and time.monotonic() > deadline:
                    raise _SkippedError("was not begun when the time had passed")
            except _SkippedError as error:
                skipped_names[matrix] = name
                skipped[name] = str(error)
                continue
            try:
                candidates.append(_candidate(setting, variant, cache, bound_of))
            except NotProved as error:
                infeasible[name] = f"has no guarantee: {str(error).rstrip('.')}"
            except _InfeasibleError as error:
                infeasible[name] = str(error)
    if not candidates and skipped:
        name, reason = next(iter(skipped.items()))
        raise ValueError(
            f"no mechanism that fits was computed within {time_limit:g} s; {name} {reason}: allow "
            "more time, or name quicker mechanisms."
        )
    if not candidates:
        why = "".join(f" ({name}: {reason})" for name, reason in list(infeasible.items())[:1])
        raise ValueError(
            f"no mechanism fits{why}: allow more noise memory, a smaller model or fewer "
            "rounds, or name other mechanisms."
        )
    recommended = _certified(setting, candidates, cache_directory, progress)
    return Plan(
        setting,
        tuple(candidates),
        infeasible,
        recommended,
        _reason(setting, candidates, recommended),
        skipped,
    )


def _matrix(variant: Variant, setting: Setting) -> str:
    """The name of a variant's last matrix in the cache, by all inputs that determine it."""
    return _name(_description_of(variant, setting.trained, setting.may_extend_to))


def _compute(setting: Setting, cache: pathlib.Path, variant: Variant) -> None:
    """Puts the factorization of a variant into the cache, and returns nothing to be pickled."""
    made = computed(variant, setting.trained, cache)
    if setting.may_extend_to is not None:
        _extended(setting, variant, made, cache)


@contextlib.contextmanager
def _computing(
    searches: Mapping[str, Variant],
    compute: Callable[[Variant], None],
    processes: int,
    deadline: float = math.inf,
) -> Iterator[Callable[[str], bool]]:
    """Computes variants in other processes while a block runs, and ends those processes with it.

    Args:
      searches: The variants that are computed, in order, by any names. What approximates another
        factorization begins when it is waited for, because that factorization is cached by then.
      compute: Computes a variant, and caches it. It is pickled.
      processes: The most processes at a time, at least 1. Cores that are left go to their threads.
      deadline: The time, as ``time.monotonic`` has it, after which nothing is waited for.

    Yields:
      A function that waits for the variant of a name, if a process computes it, and returns
      whether one did. It raises _SkippedError if the process has not ended by the deadline.
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
        before = os.environ.get(_THREADS)
        os.environ[_THREADS] = str(processes // workers)
        # If no process can be started, or one was killed, the plan computes all itself.
        with contextlib.suppress(OSError, futures.BrokenExecutor):
            running[name] = executor.submit(compute, searches[name])
        del os.environ[_THREADS]
        if before is not None:
            os.environ[_THREADS] = before

    def wait(name: str) -> bool:
        if name in searches and name not in running:
            start(name)
        if name not in running:
            return False
        left = max(0.0, min(deadline - time.monotonic(), _LONGEST_WAIT))
        try:
            # The plan comes upon the same error itself.
            return running[name].exception(left) is None
        except futures.TimeoutError:
            raise _SkippedError("was not done when the time had passed") from None

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
    # A lock of multiprocessing would be left behind by a process that is killed.
    ProgressBar.set_lock(threading.RLock())


def _certified(
    setting: Setting,
    candidates: list[Candidate],
    cache_directory: pathlib.Path | None,
    progress: Callable[[str, str], None],
) -> Candidate:
    """Returns the candidate to recommend, its noise certified; sorts and updates ``candidates``."""
    candidates.sort(key=operator.attrgetter("ranked_error"))
    recommended = _recommended(candidates)
    for _ in range((MECHANISMS - 1) // _MECHANISMS_OF_A_CANDIDATE):
        if not recommended.is_estimate:
            break
        progress(
            f"certificate of {recommended.name_with_sampling}",
            "takes minutes for thousands of rounds",
        )
        mechanism = calibrated(
            recommended.mechanism.factorization,
            recommended.mechanism.participation,
            setting.epsilon,
            setting.delta,
            cache_directory,
            most_tests=_MECHANISMS_OF_A_CANDIDATE,
        )
        candidates[candidates.index(recommended)] = dataclasses.replace(
            recommended, mechanism=mechanism, is_estimate=False
        )
        candidates.sort(key=operator.attrgetter("ranked_error"))
        recommended = _recommended(candidates)
    if recommended.is_estimate:
        # Those that were certified turned out to need more noise than the estimates of others.
        recommended = _recommended([each for each in candidates if not each.is_estimate])
    return recommended


def _candidate(
    setting: Setting,
    variant: Variant,
    cache: pathlib.Path,
    bound_of: Callable[[Participation], LowerBound],
) -> Candidate:
    """The variant with the noise of the plan; raises _InfeasibleError or NotProved."""
    factorization, scheme = computed(variant, setting.trained, cache), variant.sampling
    if scheme is not None:
        try:
            factorization.check_scheme(scheme)
        except ValueError as error:
            raise _InfeasibleError(str(error).rstrip(".")) from None
    # Proofs take long, and are made for the recommended mechanism alone.
    is_estimate = scheme is not None and not scheme.has_groups
    participation = scheme or variant.participation
    assert participation is not None
    if setting.noise_multiplier is not None:
        mechanism = Mechanism(factorization, participation, setting.noise_multiplier)
    elif setting.rho is not None:
        mechanism = calibrate(factorization, participation, rho=setting.rho)
    else:
        mechanism = calibrated(
            factorization,
            participation,
            setting.epsilon,
            setting.delta,
            cache,
            is_estimate=is_estimate,
        )
    recursion = _recursion_for_costs(factorization)
    cost, limit = places.NoiseCost.of_run([recursion], setting.model_size), setting.noise_memory
    if limit is not None and cost.kept_bytes > limit:
        raise _InfeasibleError(
            f"keeps {cost.kept_bytes / 1e9:.3g} GB of noise between rounds, more than "
            f"{limit / 1e9:.3g} GB"
        )
    if cost.seconds_per_round > _most_seconds(setting):
        raise _InfeasibleError(
            f"takes {cost.seconds_per_round:.2g} seconds a round for its noise, more than "
            f"{_most_seconds(setting):.2g}"
        )
    schema = mechanism.noise_reference
    errors = factorization.errors(setting.trained, schema)
    of_sums = errors
    if setting.trained.name != "prefix_sum":
        of_sums = factorization.errors(setting.num_rounds, schema)
    return Candidate(
        variant=variant,
        mechanism=mechanism,
        is_estimate=is_estimate,
        errors=errors,
        rmse_of_sums=of_sums.rmse,
        lower_bound=bound_of(schema) if scheme is None else None,
        cost=cost,
        clients_per_round=setting.clients_per_round,
        error=setting.error,
        **_extension(setting, variant, mechanism, cache),
    )


def _recommended(candidates: list[Candidate]) -> Candidate:
    ties = [
        candidate
        for candidate in candidates
        if candidate.ranked_error <= (1.0 + _TIE) * candidates[0].ranked_error
    ]
    # Costs are compared as printed: among equals, the least error wins.
    return min(ties, key=lambda candidate: float(f"{candidate.cost.seconds_per_round:.2g}"))


def _reason(setting: Setting, candidates: list[Candidate], recommended: Candidate) -> str:
    if len(candidates) == 1:
        return f"{recommended.name} is the only mechanism that fits."
    best = candidates[0]
    quantity = setting.words.quantity
    if setting.may_extend_to is not None:
        horizons = f"{setting.num_rounds} and {setting.may_extend_to} rounds"
        quantity = f"{quantity} (geometric mean of {horizons})"
    if recommended.ranked_error > (1.0 + _TIE) * best.ranked_error:
        return (
            f"{recommended.name_with_sampling} has the smallest {quantity} of those whose "
            f"noise is proved to be enough, {recommended.ranked_error:.4g}; delta pays for no "
            f"test of {best.name_with_sampling}, of about {best.ranked_error:.4g}."
        )
    if recommended is not best:
        return (
            f"{recommended.name_with_sampling} has an {quantity} within {100 * _TIE:g} % of "
            f"the least, that of {best.name_with_sampling}, and its noise costs "
            f"{recommended.cost.seconds_per_round:.2g} instead of "
            f"{best.cost.seconds_per_round:.2g} seconds a round."
        )
    second = candidates[1]
    share = 100.0 * (second.ranked_error / best.ranked_error - 1.0)
    about = "about " if second.is_estimate else ""
    return (
        f"{best.name_with_sampling} has the smallest {quantity} of the {len(candidates)} "
        f"mechanisms that fit, {best.ranked_error:.4g}; the next, {second.name_with_sampling}, "
        f"has {about}{share:.1f} % more."
    )


def _requested(
    setting: Setting, mechanisms: Collection[str] | None, own: Mapping[str, Factorization]
) -> list[Variant]:
    """The variants of the requested mechanisms."""
    known = catalogue.ENTRIES
    unknown = [name for name in mechanisms or () if name not in known]
    if unknown:
        raise ValueError(
            f"there is no mechanism {numbers.shown(unknown[0])}, only {', '.join(known)}."
        )
    inputs.check_rounds(setting.num_rounds, _BYTES_PER_ROUND, "a plan")
    proposed = [
        dataclasses.replace(each, reason=each.reason or _why_not_extended(setting, each))
        for each in _proposed(setting, own)
    ]
    if mechanisms is None:
        return proposed
    offered = {each.kind for each in proposed if each.factorization is None}
    return [
        *(each for each in proposed if each.kind in mechanisms or each.factorization is not None),
        *(
            Variant(name, reason="offers nothing for such clients")
            for name in mechanisms
            if name not in offered
        ),
    ]


def _why_not_extended(setting: Setting, variant: Variant) -> str:
    """Why nothing of a variant's kind can be extended; empty if it can, or need not be."""
    made = variant.factorization or catalogue.entry(variant.kind).factorization
    if setting.may_extend_to is None or (made.can_extend and variant.sampling is None):
        return ""
    why = made.reason if variant.sampling is None else "its clients are drawn for all rounds"
    return f"cannot be extended beyond {setting.num_rounds} rounds: {why}"


def _extended(
    setting: Setting, variant: Variant, factorization: Factorization, cache: pathlib.Path
) -> Factorization:
    """The variant's factorization with the rounds of the extension, out of the cache if there."""
    schema, workload = variant.participation, setting.extended_workload
    assert workload is not None
    compute = functools.partial(
        factorization.extended, workload.num_rounds, participation=schema, workload=workload
    )
    if not variant.is_search:
        return compute()
    described = _description_of(variant, setting.trained, workload.num_rounds)
    return fetch(cache, described, compute)


def _extension(
    setting: Setting, variant: Variant, mechanism: Mechanism, cache: pathlib.Path
) -> dict[str, Any]:
    """The attributes of a candidate for an extension; raises _InfeasibleError if it has none."""
    workload = setting.extended_workload
    if workload is None:
        return {}
    try:
        whole = mechanism.extended(
            workload.num_rounds,
            num_parameters=setting.model_size,
            factorization=_extended(setting, variant, mechanism.factorization, cache),
        )
    except ValueError as error:
        raise _InfeasibleError(f"has no extension: {str(error).rstrip('.')}") from None
    epsilon = whole.guarantee(setting.delta).epsilon
    if epsilon == math.inf:
        raise _InfeasibleError(
            f"has no finite epsilon after an extension to {workload.num_rounds} rounds"
        )
    errors = whole.factorization.errors(workload, whole.noise_reference)
    return {"extended": whole, "extended_epsilon": epsilon, "extended_errors": errors}


def _recursion_for_costs(factorization: Factorization) -> NoiseRecursion:
    """A recursion that costs as much as the factorization's own: costs depend on sizes alone."""
    if isinstance(factorization, DenseFactorization):
        # Its own takes the inverse of a dense matrix.
        return dense_rows(np.eye(factorization.num_rounds))
    return factorization.noise_recursion()


def _lower_bound(setting: Setting, cache: pathlib.Path, schema: Participation) -> LowerBound:
    """The bound for the workload, out of the cache if it is there."""
    workload, maximum = setting.trained, setting.error == "max"
    described = _described("lower-bound", workload) | {"maximum": maximum, **schema.to_dict()}

    def bound() -> LowerBound:
        found = lower_bounds.compute(workload, schema, maximum=maximum)
        assert found is not None
        return found

    return atomic_files.fetch(
        cache / f"{_name(described)}.json",
        described,
        bound,
        field="errors",
        to_json=dataclasses.astuple,
        from_json=lambda errors: LowerBound(*map(float, errors)),
    )


def _proposed(setting: Setting, own: Mapping[str, Factorization]) -> list[Variant]:
    """The variants that a plan evaluates, in the order in which they are computed.

    For timers, these are mechanisms for their schema. For drawn clients, these are mechanisms of
    1, 2, 4, ... bands and the most possible, with the scheme that amplifies them; where batches are
    drawn, also mechanisms for a fixed order of the batches, which nothing amplifies.
    """
    if setting.sampling is None:
        assert setting.participation is not None
        return _for_timers(setting, own, setting.participation)
    if setting.sampling != ANY_SAMPLING:
        return _for_scheme(setting, own, setting.sampling)
    found = _for_timers(setting, own, MinSeparation(setting.most_bands))
    has_fixed_order = False
    for name, scheme in SCHEMES.items():
        # With batches of one size, a client takes the place of another one: others need less noise.
        if not scheme.has_random_sizes:
            continue
        # Mechanisms for batches in a fixed order are the same for all schemes with groups.
        repeats = scheme.has_groups and has_fixed_order
        of_scheme = _for_scheme(setting, own, name)
        found += [each for each in of_scheme if each.sampling is not None or not repeats]
        has_fixed_order |= scheme.has_groups
    return found


def _for_timers(
    setting: Setting, own: Mapping[str, Factorization], participation: Participation
) -> list[Variant]:
    rounds = setting.num_rounds
    separation = min(participation.separation_in(rounds), rounds)
    affordable = separation
    if setting.noise_memory is not None:
        # b bands keep b - 1 rows, and one band keeps nothing.
        rows = int(setting.noise_memory // (_BYTES_OF_ROW * setting.model_size))
        affordable = min(separation, 1 + rows)
    found = _tried(setting, own, Clients(rounds, participation, separation, affordable))
    most: dict[str, int] = {}
    for each in found:
        if not each.reason:
            most[each.kind] = max(_bands(each), most.get(each.kind, 0))
    # Matrices with fewer bands than another of their kind only save memory: in a limited time they
    # come last.
    return sorted(found, key=lambda each: _bands(each) < most.get(each.kind, 0))


def _bands(variant: Variant) -> int:
    """The bands that the options name, or 0."""
    return int(variant.options.get("num_bands", 0))


def _for_scheme(setting: Setting, own: Mapping[str, Factorization], name: str) -> list[Variant]:
    rounds, population, batch = setting.num_rounds, setting.population, setting.clients_per_round
    scheme_of = functools.partial(
        sampling_scheme,
        name,
        num_rounds=rounds,
        population=population,
        clients_per_round=batch,
    )
    kind, most = SCHEMES[name], setting.most_bands
    # A fixed order of all batches: everybody returns after an epoch, and nothing is amplified.
    fixed_order = FixedEpochOrder(math.ceil(rounds / most), most)
    counts = tuple(powers_of_two(most))
    found: list[Variant] = []
    for variant in _tried(
        setting, own, Clients(rounds, fixed_order, most, most, band_counts=counts)
    ):
        bands = variant.amplified_bands
        if bands is None or variant.reason:
            found += [variant] if bands is not None or kind.has_groups else []
            continue
        variant = _made_for(variant, setting.error, SingleParticipation())
        separations: list[int | None] = [None]
        if name == MinSeparationSampling.name:
            wanted = sorted({bands, bands + bands // 2, 2 * bands})
            separations = [each for each in wanted if each <= population // batch]
        for separation in separations:
            try:
                scheme = scheme_of(num_bands=bands, separation=separation)
                found.append(dataclasses.replace(variant, sampling=scheme))
            except ValueError as error:
                reason = f"{name}: {str(error).rstrip('.')}"
                found.append(dataclasses.replace(variant, reason=reason))
    if kind.takes_any_matrix:
        scheme = scheme_of(num_bands=rounds)
        # Mechanisms for timers of the scheme's separation, except approximations.
        separation = min(scheme.separation_in(rounds), rounds)
        timers = Clients(rounds, MinSeparation(separation), separation, separation)
        amplified = {each.kind for each in found}
        found += [
            dataclasses.replace(each, sampling=scheme)
            for each in _tried(setting, {}, timers)
            if each.kind not in amplified and each.base is None
        ]
    return found


def _tried(setting: Setting, own: Mapping[str, Factorization], clients: Clients) -> list[Variant]:
    """The variants of all mechanisms for clients, made for the error of the plan if possible."""
    variants = [
        variant for mechanism in catalogue.ENTRIES.values() for variant in mechanism.tried(clients)
    ]
    variants += [
        Variant(
            factorization.mechanism,
            {"checkpoint": directory},
            amplified_bands=factorization.strategy_bands() if clients.band_counts else None,
            is_search=False,
            factorization=factorization,
        )
        for directory, factorization in own.items()
    ]
    return [_made_for(variant, setting.error, clients.participation) for variant in variants]


def _made_for(variant: Variant, error: Any, schema: Participation) -> Variant:
    options = dict(variant.options)
    if error != "mean" and variant.factorization is None:
        options |= {"error": error} if "error" in catalogue.entry(variant.kind).options else {}
    base = None if variant.base is None else _made_for(variant.base, error, schema)
    return dataclasses.replace(variant, options=options, participation=schema, base=base)


def _most_seconds(setting: Setting) -> float:
    """The most seconds a round that noise may take."""
    independent = places.NoiseCost.of_run([BandedNoise(setting.num_rounds)], setting.model_size)
    return max(_MOST_SECONDS_PER_ROUND, _MOST_TIMES_INDEPENDENT * independent.seconds_per_round)


def computed(
    variant: Variant, workload: Workload | int, cache: pathlib.Path | None
) -> Factorization:
    """Returns the factorization of a variant, from the cache if it is there.

    Args:
      variant: A feasible one; its base is computed first.
      workload: What it is made for; the rounds n for the prefix sum.
      cache: Where factorizations are cached between calls; None for nowhere.
    """
    trained = workloads.checked(workload)

    def compute() -> Factorization:
        options = dict(variant.options)
        if variant.base is not None:
            options["base_checkpoint"] = computed(variant.base, trained, cache)
        schema = variant.participation if variant.depends_on_schema else None
        return catalogue.entry(variant.kind).build(trained, schema, options)

    if variant.factorization is not None:
        return variant.factorization
    if not variant.is_search:
        return compute()
    return fetch(cache, _description_of(variant, trained), compute)


def _described(what: str, workload: Workload) -> dict[str, Any]:
    """The beginning of a key of the cache, which has had none but prefix sums for long."""
    named = {} if workload.name == "prefix_sum" else {"workload": workload.to_dict()}
    return {"mechanism": what, "num_rounds": workload.num_rounds, **named}


def _description_of(
    variant: Variant, workload: Workload, may_extend_to: int | None = None
) -> dict[str, Any]:
    """All inputs that determine a factorization, the key of the cache; JSON-able."""
    found = _described(variant.kind, workload) | dict(variant.options)
    if may_extend_to is not None:
        found |= {"num_rounds": may_extend_to, "extends": workload.num_rounds}
    # Further rows are made for the schema, where the first ones are not.
    depends = variant.depends_on_schema or may_extend_to is not None
    if depends and variant.participation is not None:
        found["participation"] = variant.participation.to_dict()
    if isinstance(found.get("error"), tuple):
        # The parameters of a factorization have weights in this form.
        found |= RoundError.of(found["error"], workload.num_rounds).parameters()
    if variant.base is not None:
        found["base_checkpoint"] = _description_of(variant.base, workload)
    return found


def calibrated(
    factorization: Factorization,
    participation: Participation,
    epsilon: float,
    delta: float,
    cache_directory: pathlib.Path | None,
    *,
    is_estimate: bool = False,
    most_tests: int | None = None,
) -> Mechanism:
    """Returns the mechanism of least noise for a target, as ``mechanism.calibrate`` does.

    Args:
      factorization: What makes the noise.
      participation: How clients take part: a schema, or a sampling scheme.
      epsilon: Above 0.
      delta: At least 1e-12 and below 1.
      cache_directory: Where noise multipliers of sampling schemes are cached between calls; None
        for nowhere.
      is_estimate: For schemes without groups, whether a rough estimate is enough, in the place of
        a certified noise multiplier: the target may be exceeded.
      most_tests: For schemes without groups, the mechanisms that may be tested, a part of those
        that the delta of one result pays for; None if this is the result.

    Returns:
      The mechanism.

    Raises:
      ValueError: If an argument is out of its range, or the scheme is not for the factorization.
    """
    unknown = Mechanism(factorization, participation, 0.0)
    scheme = unknown.sampling
    if scheme is None:
        return calibrate(factorization, participation, epsilon=epsilon, delta=delta)
    columns = factorization.columns_for(scheme)
    certification = _certification_in(cache_directory)
    if most_tests is not None:
        certification = dataclasses.replace(certification, most_tests=most_tests)
    is_rough = columns is not None and is_estimate
    description: dict[str, Any] = {
        "mechanism": "noise-multiplier",
        **scheme.to_dict(),
        "epsilon": epsilon,
        "delta": delta,
        "accounting": certificate_search.ACCOUNTING_VERSION,
        "dp_accounting_version": importlib.metadata.version("dp-accounting"),
        "is_estimate": is_rough,
    }
    if columns is not None:
        entries = hashlib.sha256(columns.entries.tobytes()).hexdigest()
        description["columns"] = [entries, columns.rounding]
        description["mechanisms"] = most_tests

    def multiplier() -> float:
        if is_rough:
            run = scheme.run(1.0, columns)
            return certification.estimated(run, epsilon, delta, is_rough=True)
        return calibrate(
            factorization, scheme, epsilon=epsilon, delta=delta, certification=certification
        ).noise_multiplier

    def believed(sigma: Any) -> float:
        # The file may have been altered. An estimate only decides which mechanism is certified
        # first: no guarantee rests on it. More noise than needed keeps the target, too.
        is_number = isinstance(sigma, float) and 0.0 < sigma < math.inf
        if not is_number or not (
            is_rough or scheme.amplified(sigma, delta, columns, certification).epsilon <= epsilon
        ):
            raise ValueError(f"{sigma!r} does not keep the target")
        return float(sigma)

    found = atomic_files.fetch(
        cache_directory and cache_directory / f"{_name(description)}.json",
        description,
        multiplier,
        field="number",
        to_json=float,
        from_json=believed,
    )
    return dataclasses.replace(unknown, noise_multiplier=found)


def _certification_in(cache_directory: pathlib.Path | None) -> Certification:
    """Returns how the noise multipliers of plans are proved.

    Args:
      cache_directory: Where certificates are cached between calls; None for nowhere.
    """
    if cache_directory == atomic_files.find_cache(FOLDER):
        # Guarantees look for the certificate in this folder as well.
        return Certification(directory=atomic_files.find_cache(certificate_search.FOLDER))
    return Certification(directory=cache_directory)


def fetch(
    directory: pathlib.Path | None,
    description: Mapping[str, Any],
    compute: Callable[[], Factorization],
) -> Factorization:
    """Returns a cached factorization, or computes and caches it.

    Args:
      directory: The cache; None for none.
      description: Everything that the factorization follows from, JSON-able: the mechanism,
        ``num_rounds`` and its options. The library's version is added, since another one may
        compute better.
      compute: Computes it.

    Returns:
      The factorization. With an ``atomic_files.CacheWarning``, it was computed because its entry is
      damaged, or it could not be cached.
    """
    if directory is None:
        return compute()
    entry = directory / _name(description)
    # Unlike Path.exists, this does not raise where the cache may not be read.
    if os.path.exists(entry):
        try:
            found = checkpoints.load(entry)
            if found.num_rounds != description["num_rounds"]:
                raise checkpoints.CheckpointError(f"{entry} is for {found.num_rounds} rounds.")
            return found
        except checkpoints.CheckpointError as error:
            said = f"{error} It is computed again."
            warnings.warn(said, atomic_files.CacheWarning, stacklevel=2)
    factorization = compute()
    try:
        checkpoints.save(factorization, entry, participation=factorization.participation)
    except (checkpoints.CheckpointError, OSError) as error:
        said = f"{error} The factorization is used without being cached."
        warnings.warn(said, atomic_files.CacheWarning, stacklevel=2)
    return factorization


def _name(description: Mapping[str, Any]) -> str:
    digest = atomic_files.digest({**description, "library_version": version.__version__})[:20]
    return f"{description.get('mechanism', 'factorization')}-{digest}"
