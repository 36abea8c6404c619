"""Compares all mechanisms for a setting (population, timers, memory, target), and recommends one.

Each mechanism that may be the best is proposed once, in the order of computation: mechanisms that
take no time first, and mechanisms with fewer bands than others of their kind last. Mechanisms that
fit the setting are compared by their effective error (``plans``). If the plan is for another error
than the mean, matrices are optimised for this error where possible. The plan recommends the best
mechanism, or one about as good whose noise costs less time.

A cache keeps matrices as checkpoints, and numbers as JSON, under digests of all their inputs.
Searches run in separate processes, so that all cores are used and a deadline can end a search. A
process puts its matrix into the cache, from which the plan reads it. The plan computes missing
matrices itself, so a process that fails or is killed costs only time.
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

import numpy as np

from mf_aggregators import atomic_files, catalogue, checkpoints, inputs, lower_bounds, version
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
from mf_aggregators.planning.plans import ANY_SAMPLING, Candidate, Plan, Setting, powers_of_two
from mf_aggregators.progress_bars import ProgressBar
from mf_aggregators.workloads import Workload

# The folder, in the user's cache directory, where factorizations are cached by default.
FOLDER = "factorizations"
_BYTES_OF_ROW = 4
# A mechanism is infeasible if its noise takes more seconds a round than the first number, and more
# than the second number times the time of independent noise.
_MOST_SECONDS_PER_ROUND = 60.0
_MOST_TIMES_INDEPENDENT = 100.0
# The memory of the smallest mechanism's errors, a lower estimate of a plan's memory.
_BYTES_PER_ROUND = 24
# If errors differ by a smaller share than this, the cheaper mechanism is recommended.
_TIE = 0.005

# The most mechanisms that may be tested for the noise multiplier of one candidate. Three
# candidates, and one more test for the guarantee of the recommended one, are the 16 tests that
# share delta.
_MECHANISMS_OF_A_CANDIDATE = 5

# Searches for fewer rounds are faster than starting a process.
_FEWEST_ROUNDS_OF_PROCESSES = 256
# The environment variable for the number of threads of a process's numerical libraries.
_THREADS = "OPENBLAS_NUM_THREADS"
# After this many seconds, a process that was told to end is killed; until then it can remove an
# unfinished file.
_SECONDS_TO_END = 2.0
# The longest time limit in seconds: a month.
_LONGEST_WAIT = 2.6e6


class _SkippedError(Exception):
    """A mechanism was not computed within the time limit; the message says why."""


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
    """Compares the mechanisms that fit a setting, and recommends one.

    Use it when you do not know yet which mechanism to take; ``mf-plan`` prints the same.

    Args:
      setting: The setting of the run.
      cache_directory: The directory where factorizations are cached between calls; None for no
        cache.
      progress: Called before each computation with its name, and with a text on how many are done.
      processes: The most processes that search at the same time, for matrices of 256 rounds or
        more. With one process and no time limit, or without a cache, the calling process computes
        everything. Other processes are spawned, so a program has to guard its main module, as for
        ``multiprocessing``.
      mechanisms: The names of the mechanisms to evaluate; None for all.
      own: Further factorizations for ``num_rounds`` to compare, by the directories of their
        checkpoints.
      time_limit: Seconds after which searches for matrices that are not in the cache end, and their
        mechanisms are skipped. The proof for the recommended mechanism, and a computation that the
        calling process has begun, take additional time. None for no limit.

    Returns:
      The plan.

    Raises:
      ValueError: If no mechanism fits or none is evaluated within the time limit, if a name is
        unknown, or if the privacy target cannot be met.

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
        # The operating system does not accept arbitrarily long waits.
        limit = min(numbers.positive_number(time_limit, "time_limit"), _LONGEST_WAIT)
        deadline = time.monotonic() + limit
    rounds = setting.num_rounds
    candidates: list[Candidate] = []
    infeasible, skipped = dict[str, str](), dict[str, str]()
    # Names of skipped mechanisms by their matrix: approximations of a skipped matrix are skipped,
    # too.
    skipped_names: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        # Processes return matrices through the cache, and several schemes use the same matrix.
        cache = cache_directory or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # All candidates with timers have the same lower bound.
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
                    raise _SkippedError("was not begun within the time limit")
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
            except MemoryError:
                infeasible[name] = "needs more memory for its guarantee than is available"
    if not candidates and skipped:
        name, reason = next(iter(skipped.items()))
        raise ValueError(
            f"no mechanism that fits was computed within {time_limit:g} s; {name} {reason}: allow "
            "more time, or name faster mechanisms."
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
    """The name of a variant's matrix in the cache, a digest of all inputs that determine it."""
    return _name(_description_of(variant, setting.trained, setting.may_extend_to))


def _compute(setting: Setting, cache: pathlib.Path, variant: Variant) -> None:
    """Computes the factorization of a variant into the cache, without returning it."""
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
    """Computes variants in other processes during a ``with`` block, and ends these with it.

    Args:
      searches: The variants to compute, in this order, by arbitrary names. A variant that
        approximates another factorization starts only when the plan waits for it, because the other
        factorization is cached by then.
      compute: Computes a variant and caches it; has to be picklable.
      processes: The most processes at the same time, at least 1. Their threads use further cores.
      deadline: The time, by ``time.monotonic``, after which the plan waits for no process.

    Yields:
      A function that waits for the variant of a name, and returns whether a process computed it. It
      raises _SkippedError if the process has not finished by the deadline.
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
        # If no process can be started, or a process was killed, the plan computes everything
        # itself.
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
            # After an error of the process, the plan computes the variant and meets the same error.
            return running[name].exception(left) is None
        except futures.TimeoutError:
            raise _SkippedError("was not done within the time limit") from None

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
    """Prepares a process so that SIGTERM raises an exit, which removes unfinished files."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # A process that is killed would leave a lock of multiprocessing behind.
    ProgressBar.set_lock(threading.RLock())


def _certified(
    setting: Setting,
    candidates: list[Candidate],
    cache_directory: pathlib.Path | None,
    progress: Callable[[str, str], None],
) -> Candidate:
    """Returns the recommended candidate with certified noise; sorts and updates ``candidates``."""
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
        # The certified candidates need more noise than the estimates for the others.
        recommended = _recommended([each for each in candidates if not each.is_estimate])
    return recommended


def _candidate(
    setting: Setting,
    variant: Variant,
    cache: pathlib.Path,
    bound_of: Callable[[Participation], LowerBound],
) -> Candidate:
    """The candidate of a variant, with the noise of the plan; _InfeasibleError or NotProved."""
    factorization, scheme = computed(variant, setting.trained, cache), variant.sampling
    if scheme is not None:
        try:
            factorization.check_scheme(scheme)
        except ValueError as error:
            raise _InfeasibleError(str(error).rstrip(".")) from None
    # Certificates take long, so only the recommended mechanism gets one; others have estimates.
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
    candidate = Candidate(
        variant=variant,
        mechanism=mechanism,
        is_estimate=is_estimate,
        errors=errors,
        rmse_of_sums=of_sums.rmse,
        lower_bound=bound_of(schema) if scheme is None else None,
        cost=cost,
        clients_per_round=setting.clients_per_round,
        error=setting.error,
    )
    return _with_extension(candidate, setting, cache)


def _recommended(candidates: list[Candidate]) -> Candidate:
    ties = [
        candidate
        for candidate in candidates
        if candidate.ranked_error <= (1.0 + _TIE) * candidates[0].ranked_error
    ]
    # Costs are compared in printed digits: if they are equal, the smaller error wins.
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
            f"{recommended.name_with_sampling} has the smallest {quantity} of those whose noise is "
            f"proved to be enough, {recommended.ranked_error:.4g}; delta does not cover a test of "
            f"{best.name_with_sampling}, with about {best.ranked_error:.4g}."
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
            Variant(name, reason="has no variant for this participation")
            for name in mechanisms
            if name not in offered
        ),
    ]


def _why_not_extended(setting: Setting, variant: Variant) -> str:
    """The reason why a variant cannot be extended; empty if it can, or need not be extended."""
    made = variant.factorization or catalogue.entry(variant.kind).factorization
    if setting.may_extend_to is None or (made.can_extend and variant.sampling is None):
        return ""
    why = made.reason if variant.sampling is None else "its clients are drawn for all rounds"
    return f"cannot be extended beyond {setting.num_rounds} rounds: {why}"


def _extended(
    setting: Setting, variant: Variant, factorization: Factorization, cache: pathlib.Path
) -> Factorization:
    """A variant's factorization for the extended rounds, from the cache if possible."""
    schema, workload = variant.participation, setting.extended_workload
    assert workload is not None
    compute = functools.partial(
        factorization.extended, workload.num_rounds, participation=schema, workload=workload
    )
    if not variant.is_search:
        return compute()
    described = _description_of(variant, setting.trained, workload.num_rounds)
    return fetch(cache, described, compute)


def _with_extension(candidate: Candidate, setting: Setting, cache: pathlib.Path) -> Candidate:
    """The candidate with its extension, if any; _InfeasibleError if it cannot be extended."""
    workload, mechanism = setting.extended_workload, candidate.mechanism
    if workload is None:
        return candidate
    try:
        whole = mechanism.extended(
            workload.num_rounds,
            num_parameters=setting.model_size,
            factorization=_extended(setting, candidate.variant, mechanism.factorization, cache),
        )
    except ValueError as error:
        raise _InfeasibleError(f"has no extension: {str(error).rstrip('.')}") from None
    epsilon = whole.guarantee(setting.delta).epsilon
    if epsilon == math.inf:
        raise _InfeasibleError(
            f"has no finite epsilon after an extension to {workload.num_rounds} rounds"
        )
    errors = whole.factorization.errors(workload, whole.noise_reference)
    return dataclasses.replace(
        candidate, extended=whole, extended_epsilon=epsilon, extended_errors=errors
    )


def _recursion_for_costs(factorization: Factorization) -> NoiseRecursion:
    """A recursion with the sizes, and so the costs, of the factorization's own recursion."""
    if isinstance(factorization, DenseFactorization):
        # The factorization's own recursion would need the inverse of a dense matrix.
        return dense_rows(np.eye(factorization.num_rounds))
    return factorization.noise_recursion()


def _lower_bound(setting: Setting, cache: pathlib.Path, schema: Participation) -> LowerBound:
    """The lower bound on the errors of any matrix, from the cache if possible."""
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
        from_json=lambda errors: LowerBound(*map(float, inputs.part(errors, list))),
    )


def _proposed(setting: Setting, own: Mapping[str, Factorization]) -> list[Variant]:
    """The variants that a plan evaluates, in the order of computation.

    For timers, these are mechanisms for the schema of the timers. For drawn clients, these are
    mechanisms with 1, 2, 4, ... bands, up to the most possible, each with the sampling scheme that
    amplifies its guarantee. If a data centre draws batches, there are also mechanisms for a fixed
    order of the batches, without amplification.
    """
    if setting.sampling is None:
        assert setting.participation is not None
        return _for_timers(setting, own, setting.participation)
    if setting.sampling != ANY_SAMPLING:
        return _for_scheme(setting, own, setting.sampling)
    found = _for_timers(setting, own, MinSeparation(setting.most_bands))
    has_fixed_order = False
    for name, scheme in SCHEMES.items():
        # Batches of one size need more noise than other schemes, because a client replaces another.
        if not scheme.has_random_sizes:
            continue
        # All schemes with groups have the same mechanisms for batches in a fixed order.
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
        # A matrix of b bands keeps b - 1 rows of noise.
        rows = int(setting.noise_memory // (_BYTES_OF_ROW * setting.model_size))
        affordable = min(separation, 1 + rows)
    found = _tried(setting, own, Clients(rounds, participation, separation, affordable))
    most: dict[str, int] = {}
    for each in found:
        if not each.reason:
            most[each.kind] = max(_bands(each), most.get(each.kind, 0))
    # Matrices with fewer bands than another one of their kind only save memory, so they come last
    # in case time runs out.
    return sorted(found, key=lambda each: _bands(each) < most.get(each.kind, 0))


def _bands(variant: Variant) -> int:
    """The number of bands in a variant's options, or 0."""
    return inputs.part(variant.options.get("num_bands", 0), int)


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
    # In a fixed order of all batches, each client returns after exactly one epoch.
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
        # The mechanisms for timers with the scheme's separation, without approximations.
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
    """The variants of all mechanisms, optimised for the plan's error where possible."""
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


def _made_for(variant: Variant, error: str | tuple[float, ...], schema: Participation) -> Variant:
    options = dict(variant.options)
    if error != "mean" and variant.factorization is None:
        options |= {"error": error} if "error" in catalogue.entry(variant.kind).options else {}
    base = None if variant.base is None else _made_for(variant.base, error, schema)
    return dataclasses.replace(variant, options=options, participation=schema, base=base)


def _most_seconds(setting: Setting) -> float:
    """The largest number of seconds that noise may take in a round."""
    independent = places.NoiseCost.of_run([BandedNoise(setting.num_rounds)], setting.model_size)
    return max(_MOST_SECONDS_PER_ROUND, _MOST_TIMES_INDEPENDENT * independent.seconds_per_round)


def computed(variant: Variant, workload: Workload, cache: pathlib.Path | None) -> Factorization:
    """Returns the factorization of a variant, from the cache if it is there.

    Args:
      variant: A feasible variant; if it approximates a base, the base is computed first.
      workload: The workload to optimise for.
      cache: The directory where factorizations are cached between calls; None for no cache.
    """

    def compute() -> Factorization:
        options = dict(variant.options)
        if variant.base is not None:
            options["base_checkpoint"] = computed(variant.base, workload, cache)
        schema = variant.participation if variant.depends_on_schema else None
        return catalogue.entry(variant.kind).build(workload, schema, options)

    if variant.factorization is not None:
        return variant.factorization
    if not variant.is_search:
        return compute()
    return fetch(cache, _description_of(variant, workload), compute)


def _described(what: str, workload: Workload) -> dict[str, object]:
    """The beginning of a key of the cache; keys of prefix sums keep their old form."""
    named = {} if workload.name == "prefix_sum" else {"workload": workload.to_dict()}
    return {"mechanism": what, "num_rounds": workload.num_rounds, **named}


def _description_of(
    variant: Variant, workload: Workload, may_extend_to: int | None = None
) -> dict[str, object]:
    """All inputs that determine a factorization, as a JSON-able key of the cache."""
    found = _described(variant.kind, workload) | dict(variant.options)
    if may_extend_to is not None:
        found |= {"num_rounds": may_extend_to, "extends": workload.num_rounds}
    # Rows of an extension are optimised for the schema, even if the first rows are not.
    depends = variant.depends_on_schema or may_extend_to is not None
    if depends and variant.participation is not None:
        found["participation"] = variant.participation.to_dict()
    if isinstance(found.get("error"), tuple):
        # The parameters of a factorization have the weights in this form, so keys have it, too.
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
    """Returns the mechanism with the least noise for a target, as ``mechanism.calibrate``.

    Args:
      factorization: The matrix.
      participation: The schema of clients, or the sampling scheme that draws them.
      epsilon: Above 0.
      delta: At least 1e-12 and below 1.
      cache_directory: The directory where noise multipliers of sampling schemes are cached between
        calls; None for no cache.
      is_estimate: For schemes without groups, whether an estimate suffices instead of a certified
        noise multiplier. With an estimate, the true epsilon may exceed the target.
      most_tests: For schemes without groups, the largest number of tests here, if several
        candidates share the tests of one result; None for all tests of one result.

    Returns:
      The mechanism.

    Raises:
      ValueError: If an argument is out of its range, or the scheme does not fit the factorization.
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
    description: dict[str, object] = {
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

    def believed(sigma: object) -> float:
        # The cache file may have been altered. A wrong estimate only changes which mechanism is
        # certified first, and no guarantee depends on it. A noise multiplier that is too large
        # keeps the target.
        if not (isinstance(sigma, float) and 0.0 < sigma < math.inf) or not (
            is_rough or scheme.amplified(sigma, delta, columns, certification).epsilon <= epsilon
        ):
            raise ValueError(f"its noise multiplier {sigma!r} misses the target")
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
    """Returns how certificates for the noise multipliers of plans are made and cached.

    Args:
      cache_directory: The directory where certificates are cached between calls; None for no cache.
    """
    if cache_directory == atomic_files.find_cache(FOLDER):
        # Guarantees look for certificates in the same folder.
        return Certification(directory=atomic_files.find_cache(certificate_search.FOLDER))
    return Certification(directory=cache_directory)


def fetch(
    directory: pathlib.Path | None,
    description: Mapping[str, object],
    compute: Callable[[], Factorization],
) -> Factorization:
    """Returns a cached factorization, or computes and caches it.

    Args:
      directory: The cache; None for no cache.
      description: All inputs that determine the factorization, JSON-able: the mechanism,
        ``num_rounds`` and its options. The library's version is added, because another version may
        compute a better one.
      compute: Computes the factorization.

    Returns:
      The factorization. An ``atomic_files.CacheWarning`` says that the cached entry is damaged, so
      that it was computed again, or that it could not be cached.
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


def _name(description: Mapping[str, object]) -> str:
    digest = atomic_files.digest({**description, "library_version": version.__version__})[:20]
    return f"{description.get('mechanism', 'factorization')}-{digest}"
