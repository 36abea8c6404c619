"""The library's own mechanisms, in the order in which commands and plans name them.

The options of a mechanism are parameters of the function that makes its matrix.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from mf_aggregators.catalogue.entry import (
    Entry,
    Option,
    OptionError,
    SamplingSetting,
    TimerSetting,
    Variant,
)
from mf_aggregators.factorizations.banded import BandedFactorization, banded
from mf_aggregators.factorizations.banded_inverse import BandedInverseFactorization, banded_inverse
from mf_aggregators.factorizations.blt import BltFactorization, blt
from mf_aggregators.factorizations.factorization import Factorization
from mf_aggregators.factorizations.identity import IdentityFactorization, identity
from mf_aggregators.factorizations.optimal import DenseFactorization, optimal
from mf_aggregators.factorizations.structured import StructuredFactorization, structured
from mf_aggregators.factorizations.toeplitz import ToeplitzFactorization, toeplitz
from mf_aggregators.factorizations.tree_aggregation import (
    TreeAggregationFactorization,
    tree_aggregation,
)
from mf_aggregators.participation import Participation
from mf_aggregators.workloads import Workload

# Plans compare optima that are certified to this relative gap of the squared error.
RELATIVE_GAP_OF_PLANS = 1e-3
# What --error says.
MEANING_OF_ERROR = (
    "What is minimised: the mean squared error over rounds (mean), that of the worst (max), or "
    "the mean with the weights of a text file, one a line for each round."
)
# Above so many rounds, searches for dense matrices and for banded inverses take minutes.
_MOST_ROUNDS_OF_DENSE_SEARCHES, _MOST_ROUNDS_OF_INVERSES = 4096, 20_000
# The most bands, which are the best, are searched for more rounds than a dense matrix, if that
# takes no more than so many n b^2. Fewer bands are for those who look for less memory.
_MOST_ROUNDS_OF_MOST_BANDS, _MOST_OPERATIONS = 20_000, 4e8
_FEWER_BANDS = (4, 16, 64)

_OPTIONS = (
    Option(
        "num_bands",
        "integer",
        "The bands of C; for banded_inverse, those of its inverse. Default: the separation for "
        "banded and toeplitz, and all n for toeplitz without one. For banded_inverse, 16 in a "
        "training run and the separation in an audit; mf-factorize needs it.",
        least=1,
        for_runs=True,
    ),
    Option(
        "num_buffers",
        "integer",
        "The buffers of the noise, 1 to 8. Default: 4 in a training run and 2 in an audit; "
        "mf-factorize chooses by accuracy.",
        least=1,
        for_runs=True,
    ),
    Option(
        "accuracy",
        "number",
        "How far the error may be above that of 8 buffers, relative to it, where the fewest "
        "buffers are chosen. Default: 0.01.",
    ),
    Option(
        "decoder",
        "choice",
        "How sums are estimated: from the nodes below alone, or from all nodes. Default: online.",
        choices=("online", "full"),
    ),
    Option("error", "error", f"{MEANING_OF_ERROR} Default: mean.", choices=("mean", "max")),
    Option(
        "coefficients",
        "choice",
        "Where coefficients come from: an optimiser, or the square root of the prefix sums. "
        "Default: optimised.",
        choices=("optimised", "square_root"),
    ),
    Option(
        "equal_column_norms",
        "boolean",
        "Whether C has equal column norms; columns of toeplitz are scaled to them. Default: true "
        "for banded, and false for toeplitz and optimal.",
    ),
    Option(
        "relative_gap",
        "number",
        "The certified relative gap of the squared error at which the search stops. Default: 1e-5 "
        "for banded, and 1e-3 for the maximum; 1e-6 for optimal, and for clients that return 5e-6, "
        "or 1e-3 for the maximum.",
    ),
    Option(
        "pattern_entries",
        "choice",
        "What the entry of C^T C may be for two rounds of one client: any number, one that is not "
        "negative, or zero. Default: any.",
        choices=("any", "non_negative", "orthogonal"),
    ),
    Option("num_diagonals", "integer", "The diagonals h that are kept as they are."),
    Option("rank", "integer", "The rank r of what stands in the place of the rest."),
    Option(
        "base_checkpoint",
        "checkpoint",
        "The factorization that is approximated. Default: optimal, computed anew.",
    ),
)


def _options(*names: str) -> tuple[Option, ...]:
    return tuple(option for option in _OPTIONS if option.name in names)


def _too_many_rounds(most: int) -> str:
    return f"is optimised for at most {most} rounds"


def _banded(
    workload: Workload,
    participation: Participation | None,
    show_progress: bool,
    num_bands: int | None = None,
    **options: Any,
) -> BandedFactorization:
    separation = getattr(participation, "separation", None)
    if num_bands is None and separation is not None:
        num_bands = min(separation, workload.num_rounds)
    if num_bands is None:
        raise OptionError("--mechanism=banded needs --num_bands or --separation.")
    return banded(
        workload, num_bands, participation=participation, show_progress=show_progress, **options
    )


def _structured(
    num_rounds: int,
    workload: Workload,
    participation: Participation | None,
    show_progress: bool,
    num_diagonals: int,
    rank: int,
    base_checkpoint: Factorization | None = None,
) -> StructuredFactorization:
    if not (1 <= num_diagonals <= num_rounds and 0 <= rank <= num_rounds):
        raise OptionError(
            f"--num_diagonals must be 1 to {num_rounds} and --rank 0 to {num_rounds}, found "
            f"{num_diagonals} and {rank}."
        )
    base = base_checkpoint or _optimum(workload, participation, show_progress)
    if base.num_rounds != num_rounds:
        raise OptionError(
            f"--base_checkpoint is for {base.num_rounds} rounds, and --num_rounds={num_rounds}."
        )
    return structured(base, num_diagonals, rank, show_progress=show_progress)


def _optimum(
    workload: Workload, schema: Participation | None, show_progress: bool
) -> DenseFactorization:
    """The optimum that is approximated where no other factorization is given."""
    if workload.name != "prefix_sum":
        raise OptionError(
            "--mechanism=structured approximates the optimum for prefix sums: for "
            f"--workload={workload.name} name a factorization to approximate by "
            "--base_checkpoint, or use a mechanism for any workload."
        )
    if (
        schema is not None
        and schema.most_participations(workload.num_rounds) > 1
        and not schema.is_evenly_spaced
    ):
        raise OptionError(
            "--mechanism=structured approximates the optimum, which has no solution for "
            "clients that return after at least --separation rounds: name a factorization to "
            "approximate by --base_checkpoint."
        )
    return optimal(workload, schema, show_progress=show_progress)


# What a plan evaluates.


def _inverses(setting: TimerSetting) -> Sequence[Variant]:
    """Few and some bands, where their search does not take minutes."""
    rounds, most = setting.num_rounds, _MOST_ROUNDS_OF_INVERSES
    reason = "" if rounds <= most else _too_many_rounds(most)
    numbers = sorted({min(number, rounds) for number in (16, 64)})
    return [Variant({"num_bands": number}, reason=reason) for number in numbers]


def _bands_for_timers(setting: TimerSetting) -> Sequence[Variant]:
    """The most bands that the budget allows, and fewer for less memory."""
    affordable = setting.affordable_bands
    found = []
    if affordable < setting.separation:
        reason = f"keeps more {setting.budget} than allowed; bands that fit: {affordable}"
        found.append(Variant({"num_bands": setting.separation}, reason=reason))
    rounds, most = setting.num_rounds, _MOST_ROUNDS_OF_DENSE_SEARCHES
    if rounds <= most:
        fewer = [number for number in _FEWER_BANDS if number < affordable]
        found += [_of_bands(rounds, number) for number in fewer]
    elif rounds * affordable**2 <= _MOST_OPERATIONS:
        most = _MOST_ROUNDS_OF_MOST_BANDS
    if affordable > 1:
        found.append(_of_bands(rounds, affordable, most))
    return found


def _bands_for_sampling(setting: SamplingSetting) -> Sequence[Variant]:
    return [
        dataclasses.replace(_of_bands(setting.num_rounds, number), amplified_bands=number)
        for number in setting.band_counts
        if number > 1
    ]


def _of_bands(
    num_rounds: int, num_bands: int, most_rounds: int = _MOST_ROUNDS_OF_DENSE_SEARCHES
) -> Variant:
    """The optimum of a number of bands, which is cached for all schemas that allow them."""
    return Variant(
        {"num_bands": num_bands},
        {"relative_gap": RELATIVE_GAP_OF_PLANS},
        depends_on_schema=False,
        reason=_too_many_rounds(most_rounds) if num_rounds > most_rounds else "",
    )


def _optima_for_timers(setting: TimerSetting) -> Sequence[Variant]:
    """The optimum where a client takes part once, if it is not too large."""
    if setting.participation.most_participations(setting.num_rounds) > 1:
        return ()
    return [each for each in _optima(setting) if not each.reason]


def _optima(setting: TimerSetting | SamplingSetting) -> Sequence[Variant]:
    if setting.num_rounds > _MOST_ROUNDS_OF_DENSE_SEARCHES:
        return (Variant(reason=_too_many_rounds(_MOST_ROUNDS_OF_DENSE_SEARCHES)),)
    return (Variant(arguments={"relative_gap": RELATIVE_GAP_OF_PLANS}),)


def _approximations_for_timers(setting: TimerSetting) -> Iterable[Variant]:
    """Approximations of the optimum, or of the most bands where clients return."""
    rounds = setting.num_rounds
    if setting.participation.most_participations(rounds) == 1:
        return _approximations(rounds, "optimal", _optima_for_timers(setting))
    if setting.separation == 1 or rounds > _MOST_ROUNDS_OF_DENSE_SEARCHES:
        return ()
    return _approximations(rounds, "banded", [_of_bands(rounds, setting.separation)])


def _approximations_for_sampling(setting: SamplingSetting) -> Iterable[Variant]:
    """Approximations of the optimum for a fixed order."""
    optima = [each for each in _optima(setting) if not each.reason]
    return _approximations(setting.num_rounds, "optimal", optima)


def _approximations(num_rounds: int, name: str, bases: Iterable[Variant]) -> Sequence[Variant]:
    # docs/planning.md has the errors of other diagonals and ranks. Of fewer rounds, the rank would
    # be that of the base itself.
    diagonals, ranks = 4, (8, 16)
    return [
        Variant({"num_diagonals": diagonals, "rank": rank}, base=(name, base))
        for base in bases
        for rank in ranks
        if num_rounds > diagonals + rank
    ]


ENTRIES: tuple[Entry, ...] = (
    Entry(
        "identity",
        "independent noise of DP-FedAvg and DP-SGD",
        IdentityFactorization,
        identity,
        workloads="none",
        for_timers=lambda setting: (Variant(is_cached=False),),
        for_sampling=lambda setting: (Variant(amplified_bands=1, is_cached=False),),
        has_known_bands=True,
    ),
    Entry(
        "tree",
        "noise in the nodes of a binary tree; Honaker's estimators `online` (from below) and "
        "`full`",
        TreeAggregationFactorization,
        tree_aggregation,
        _options("decoder"),
        workloads="none",
        for_timers=lambda setting: [
            Variant({"decoder": decoder}, is_cached=False) for decoder in ("online", "full")
        ],
    ),
    Entry(
        "blt",
        "Toeplitz coefficients that are sums of m powers (buffered linear Toeplitz)",
        BltFactorization,
        blt,
        _options("num_buffers", "accuracy", "error"),
        for_timers=lambda setting: [Variant({"num_buffers": number}) for number in (2, 4)],
        for_runs=lambda request, most_bands: {"num_buffers": 4},
        for_audits=lambda request: {"num_buffers": 2},
    ),
    Entry(
        "banded_inverse",
        "C^-1 Toeplitz with p bands",
        BandedInverseFactorization,
        banded_inverse,
        _options("num_bands", "coefficients", "error"),
        required=("num_bands",),
        for_timers=_inverses,
        for_runs=lambda request, most_bands: {"num_bands": min(16, request.num_rounds)},
        for_audits=lambda request: {"num_bands": request.separation},
    ),
    Entry(
        "toeplitz",
        "the square root of the prefix sum in closed form, or better coefficients; b bands or all",
        ToeplitzFactorization,
        toeplitz,
        _options("num_bands", "error", "coefficients", "equal_column_norms"),
        for_timers=lambda setting: (Variant({"num_bands": setting.affordable_bands}),),
        for_runs=lambda request, most_bands: {"num_bands": most_bands},
        for_audits=lambda request: {"num_bands": request.separation},
        has_known_bands=True,
    ),
    Entry(
        "banded",
        "least squared error with b bands (equal column norms by default), certified",
        BandedFactorization,
        _banded,
        _options("num_bands", "equal_column_norms", "error", "relative_gap"),
        for_timers=_bands_for_timers,
        for_sampling=_bands_for_sampling,
        for_runs=lambda request, most_bands: {"num_bands": most_bands},
        has_known_bands=True,
    ),
    Entry(
        "optimal",
        "least squared error of all matrices, certified",
        DenseFactorization,
        optimal,
        _options("equal_column_norms", "pattern_entries", "error", "relative_gap"),
        for_timers=_optima_for_timers,
        for_sampling=_optima,
        # Timers have no schema with an optimum.
        has_schema_in_runs=False,
    ),
    Entry(
        "structured",
        "a given factorization, its decoder reduced to h diagonals and rank r",
        StructuredFactorization,
        _structured,
        _options("num_diagonals", "rank", "base_checkpoint"),
        required=("num_diagonals", "rank"),
        workloads="prefix_sum",
        for_timers=_approximations_for_timers,
        for_sampling=_approximations_for_sampling,
        for_runs=None,
    ),
)
