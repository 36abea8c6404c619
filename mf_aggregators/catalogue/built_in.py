"""The library's own mechanisms, in the order in which commands and plans name them.

The defaults of options are those of the functions of ``mf_aggregators.factorizations`` that make
the matrices.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mf_aggregators.catalogue.entry import (
    Entry,
    Option,
    OptionError,
    Request,
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
from mf_aggregators.workloads import Workload

# Plans compare optima that are certified to this relative gap of the squared error.
RELATIVE_GAP_OF_PLANS = 1e-3
# What --error says.
MEANING_OF_ERROR = (
    "What is minimised: the mean squared error over rounds (mean), that of the worst (max), or "
    "the mean with the weights of a text file, one a line for each round."
)
# Dense searches take minutes above so many rounds.
_MOST_ROUNDS_OF_DENSE_SEARCHES = 4096


def _default(function: Callable[..., Any], parameter: str) -> Any:
    return inspect.signature(function).parameters[parameter].default


def _choice(
    function: Callable[..., Any], name: str, meaning: str, choices: tuple[str, ...]
) -> Option:
    default = _default(function, name)
    return Option(name, "choice", meaning, default, choices=choices, for_runs=False)


def _error(function: Callable[..., Any]) -> Option:
    return Option(
        "error",
        "error",
        MEANING_OF_ERROR,
        _default(function, "error"),
        choices=("mean", "max"),
        for_runs=False,
    )


def _coefficients(function: Callable[..., Any]) -> Option:
    return _choice(
        function,
        "coefficients",
        "Where coefficients come from: an optimiser, or the square root of the prefix sums.",
        ("optimised", "square_root"),
    )


def _relative_gap(function: Callable[..., Any], default_text: str = "") -> Option:
    return Option(
        "relative_gap",
        "number",
        "The certified relative gap of the squared error at which the search stops.",
        _default(function, "relative_gap"),
        default_text,
        for_runs=False,
    )


def _too_many_rounds(most: int) -> str:
    return f"is optimised for at most {most} rounds"


class IdentityEntry(Entry):
    """Independent noise."""

    name = "identity"
    summary = "independent noise of DP-FedAvg and DP-SGD"
    factorization = IdentityFactorization
    has_known_bands = True

    def build(self, request: Request) -> IdentityFactorization:
        """Makes the factorization."""
        return identity(request.num_rounds)

    def nearest_workload(self, workload: Workload) -> None:
        """Returns nothing: the matrix is the same for all workloads."""

    def num_bands(self, options: Mapping[str, Any]) -> int:
        """Returns the single band."""
        return 1

    def for_timers(self, setting: TimerSetting) -> Iterable[Variant]:
        """Returns the identity, which all others are compared with."""
        return (Variant(is_cached=False),)

    def for_sampling(self, setting: SamplingSetting) -> Iterable[Variant]:
        """Returns the identity: one band, and the most amplification."""
        return (Variant(amplified_bands=1, is_cached=False),)


class TreeEntry(Entry):
    """Binary-tree aggregation."""

    name = "tree"
    summary = (
        "noise in the nodes of a binary tree; Honaker's estimators `online` (from below) and `full`"
    )
    factorization = TreeAggregationFactorization
    options = (
        _choice(
            tree_aggregation,
            "decoder",
            "How sums are estimated: from the nodes below alone, or from all nodes.",
            ("online", "full"),
        ),
    )

    def build(self, request: Request) -> TreeAggregationFactorization:
        """Makes the factorization, which depends on no workload and no schema."""
        return tree_aggregation(request.num_rounds, **self.arguments(request))

    def nearest_workload(self, workload: Workload) -> None:
        """Returns nothing: the matrix is the same for all workloads."""

    def for_timers(self, setting: TimerSetting) -> Iterable[Variant]:
        """Returns both estimators."""
        (decoder,) = self.options
        return [Variant({decoder.name: choice}, is_cached=False) for choice in decoder.choices]


class BltEntry(Entry):
    """Buffered linear Toeplitz matrices."""

    name = "blt"
    summary = "Toeplitz coefficients that are sums of m powers (buffered linear Toeplitz)"
    factorization = BltFactorization
    options = (
        Option(
            "num_buffers",
            "integer",
            "The buffers of the noise, 1 to 8.",
            default_text="4 in a training run and 2 in an audit; mf-factorize chooses by accuracy",
            default_of_runs=4,
            default_of_audits=2,
            least=1,
        ),
        Option(
            "accuracy",
            "number",
            "How far the error may be above that of 8 buffers, relative to it, where the fewest "
            "buffers are chosen.",
            _default(blt, "accuracy"),
            for_runs=False,
        ),
        _error(blt),
    )

    def build(self, request: Request) -> BltFactorization:
        """Makes the factorization."""
        return blt(
            request.num_rounds,
            participation=request.participation,
            workload=request.workload,
            show_progress=request.show_progress,
            **self.arguments(request),
        )

    def nearest_workload(self, workload: Workload) -> Workload:
        """Returns the workload: every one that is known by its name."""
        return workload

    def for_timers(self, setting: TimerSetting) -> Iterable[Variant]:
        """Returns few and some buffers."""
        return [Variant({"num_buffers": number}) for number in (2, 4)]


class BandedInverseEntry(Entry):
    """A Toeplitz matrix whose inverse is banded."""

    name = "banded_inverse"
    summary = "C^-1 Toeplitz with p bands"
    factorization = BandedInverseFactorization
    has_any_workload = True
    options = (
        Option(
            "num_bands",
            "integer",
            "The bands of the inverse of C.",
            default_text="16 in a training run and the separation in an audit; mf-factorize needs "
            "it",
            default_of_runs=16,
            least=1,
        ),
        _coefficients(banded_inverse),
        _error(banded_inverse),
    )

    # The search over coefficients takes minutes above so many rounds.
    _most_rounds = 20_000

    def build(self, request: Request) -> BandedInverseFactorization:
        """Makes the factorization."""
        self.required(request, "num_bands")
        return banded_inverse(
            request.num_rounds,
            participation=request.participation,
            workload=request.workload,
            show_progress=request.show_progress,
            **self.arguments(request),
        )

    def for_audit(self, request: Request) -> Request:
        """Returns the request with as many bands as the separation."""
        return request.with_defaults(num_bands=request.separation)

    def for_run(self, request: Request, most_bands: int) -> Request:
        """Returns the request with the bands of a run, as far as they fit."""
        filled = super().for_run(request, most_bands)
        if "num_bands" in request.options:
            return filled
        bands = min(filled.options["num_bands"], request.num_rounds)
        return request.with_defaults(num_bands=bands)

    def for_timers(self, setting: TimerSetting) -> Iterable[Variant]:
        """Returns few and some bands, where their search does not take minutes."""
        rounds, most = setting.num_rounds, self._most_rounds
        reason = "" if rounds <= most else _too_many_rounds(most)
        numbers = sorted({min(number, rounds) for number in (16, 64)})
        return [Variant({"num_bands": number}, reason=reason) for number in numbers]


class ToeplitzEntry(Entry):
    """A Toeplitz matrix, with all bands or few."""

    name = "toeplitz"
    summary = (
        "the square root of the prefix sum in closed form, or better coefficients; b bands or all"
    )
    factorization = ToeplitzFactorization
    has_known_bands = True
    options = (
        Option(
            "num_bands",
            "integer",
            "The bands of C.",
            default_text="the separation, and all n without one",
            least=1,
        ),
        _error(toeplitz),
        _coefficients(toeplitz),
        Option(
            "equal_column_norms",
            "boolean",
            "Whether the columns of C are scaled to equal norms.",
            _default(toeplitz, "equal_column_norms"),
            for_runs=False,
        ),
    )

    def build(self, request: Request) -> ToeplitzFactorization:
        """Makes the factorization."""
        return toeplitz(
            request.num_rounds,
            participation=request.participation,
            workload=request.workload,
            show_progress=request.show_progress,
            **self.arguments(request),
        )

    def nearest_workload(self, workload: Workload) -> Workload:
        """Returns the workload: every one that is known by its name."""
        return workload

    def for_audit(self, request: Request) -> Request:
        """Returns the request with as many bands as the separation."""
        return request.with_defaults(num_bands=request.separation)

    def for_run(self, request: Request, most_bands: int) -> Request:
        """Returns the request with as many bands as a run gets."""
        return request.with_defaults(num_bands=most_bands)

    def num_bands(self, options: Mapping[str, Any]) -> int | None:
        """Returns the given number of bands."""
        return options.get("num_bands")

    def for_timers(self, setting: TimerSetting) -> Iterable[Variant]:
        """Returns the matrix of the most bands that the budget allows."""
        return (Variant({"num_bands": setting.affordable_bands}),)


class BandedEntry(Entry):
    """The optimum of few bands."""

    name = "banded"
    summary = "least squared error with b bands (equal column norms by default), certified"
    factorization = BandedFactorization
    has_known_bands = True
    has_any_workload = True
    options = (
        Option("num_bands", "integer", "The bands of C.", default_text="the separation", least=1),
        Option(
            "equal_column_norms",
            "boolean",
            "Whether C has equal column norms.",
            _default(banded, "equal_column_norms"),
            for_runs=False,
        ),
        _error(banded),
        _relative_gap(banded, "1e-5, and 1e-3 for the maximum"),
    )

    # The most bands, which are the best, are searched for more rounds than a dense matrix, if that
    # takes no more than so many n b^2. Fewer bands are for those who look for less memory.
    _most_rounds_of_most_bands, _most_operations = 20_000, 4e8
    _fewer_bands = (4, 16, 64)

    def build(self, request: Request) -> BandedFactorization:
        """Makes the factorization."""
        if request.separation is not None:
            request = request.with_defaults(num_bands=min(request.separation, request.num_rounds))
        self.required(request, "num_bands", " or --separation")
        return banded(
            request.workload,
            participation=request.participation,
            show_progress=request.show_progress,
            **self.arguments(request),
        )

    def for_run(self, request: Request, most_bands: int) -> Request:
        """Returns the request with as many bands as a run gets."""
        return request.with_defaults(num_bands=most_bands)

    def num_bands(self, options: Mapping[str, Any]) -> int | None:
        """Returns the given number of bands."""
        return options.get("num_bands")

    def for_timers(self, setting: TimerSetting) -> Iterable[Variant]:
        """Returns the most bands that the budget allows, and fewer for less memory."""
        affordable = setting.affordable_bands
        found = []
        if affordable < setting.separation:
            reason = f"keeps more {setting.budget} than allowed; bands that fit: {affordable}"
            found.append(Variant({"num_bands": setting.separation}, reason=reason))
        rounds, most = setting.num_rounds, _MOST_ROUNDS_OF_DENSE_SEARCHES
        if rounds <= most:
            fewer = [number for number in self._fewer_bands if number < affordable]
            found += [banded_variant(rounds, number) for number in fewer]
        elif rounds * affordable**2 <= self._most_operations:
            most = self._most_rounds_of_most_bands
        if affordable > 1:
            found.append(banded_variant(rounds, affordable, most))
        return found

    def for_sampling(self, setting: SamplingSetting) -> Iterable[Variant]:
        """Returns each number of bands that is worth evaluating."""
        return [
            dataclasses.replace(
                banded_variant(setting.num_rounds, number),
                amplified_bands=number,
            )
            for number in setting.band_counts
            if number > 1
        ]


def banded_variant(
    num_rounds: int,
    num_bands: int,
    most_rounds: int = _MOST_ROUNDS_OF_DENSE_SEARCHES,
) -> Variant:
    """Returns the optimum of a number of bands, which is cached for all schemas that allow them.

    Args:
      num_rounds: The number of rounds n.
      num_bands: The number of bands b.
      most_rounds: The most rounds that it is searched for.

    Returns:
      The variant, with a reason if its search would take minutes.
    """
    return Variant(
        {"num_bands": num_bands},
        {"relative_gap": RELATIVE_GAP_OF_PLANS},
        depends_on_schema=False,
        reason=_too_many_rounds(most_rounds) if num_rounds > most_rounds else "",
    )


class OptimalEntry(Entry):
    """The dense optimum."""

    name = "optimal"
    summary = "least squared error of all matrices, certified"
    factorization = DenseFactorization
    has_any_workload = True
    options = (
        Option(
            "equal_column_norms",
            "boolean",
            "Whether C has equal column norms.",
            _default(optimal, "equal_column_norms"),
            "true, and false for clients that return",
            for_runs=False,
        ),
        _choice(
            optimal,
            "pattern_entries",
            "What the entry of C^T C may be for two rounds of one client: any number, one that is "
            "not negative, or zero.",
            ("any", "non_negative", "orthogonal"),
        ),
        _error(optimal),
        _relative_gap(optimal, "1e-6, and for clients that return 5e-6, or 1e-3 for the maximum"),
    )

    def build(self, request: Request) -> DenseFactorization:
        """Makes the factorization."""
        return optimal(
            request.workload,
            request.participation,
            show_progress=request.show_progress,
            **self.arguments(request),
        )

    def for_run(self, request: Request, most_bands: int) -> Request:
        """Returns the request for one participation: timers have no schema with an optimum."""
        return dataclasses.replace(request, participation=None)

    def for_timers(self, setting: TimerSetting) -> Iterable[Variant]:
        """Returns the optimum where a client takes part once, if it is not too large."""
        if setting.participation.most_participations(setting.num_rounds) > 1:
            return ()
        if setting.num_rounds > _MOST_ROUNDS_OF_DENSE_SEARCHES:
            return ()
        return (Variant(arguments={"relative_gap": RELATIVE_GAP_OF_PLANS}),)

    def for_sampling(self, setting: SamplingSetting) -> Iterable[Variant]:
        """Returns the optimum for a fixed order of all batches."""
        if setting.num_rounds > _MOST_ROUNDS_OF_DENSE_SEARCHES:
            return (Variant(reason=_too_many_rounds(_MOST_ROUNDS_OF_DENSE_SEARCHES)),)
        return (Variant(arguments={"relative_gap": RELATIVE_GAP_OF_PLANS}),)


class StructuredEntry(Entry):
    """Diagonals and a low-rank rest, in place of another factorization."""

    name = "structured"
    summary = "a given factorization, its decoder reduced to h diagonals and rank r"
    factorization = StructuredFactorization
    is_for_runs = False
    options = (
        Option("num_diagonals", "integer", "The diagonals h that are kept as they are."),
        Option("rank", "integer", "The rank r of what stands in the place of the rest."),
        Option(
            "base_checkpoint",
            "checkpoint",
            "The factorization that is approximated.",
            default_text="optimal, computed anew",
        ),
    )

    def build(self, request: Request) -> StructuredFactorization:
        """Makes the factorization."""
        rounds = request.num_rounds
        num_diagonals = self.required(request, "num_diagonals")
        rank = self.required(request, "rank")
        if not (1 <= num_diagonals <= rounds and 0 <= rank <= rounds):
            raise OptionError(
                f"--num_diagonals must be 1 to {rounds} and --rank 0 to {rounds}, found "
                f"{num_diagonals} and {rank}."
            )
        base = request.options.get("base_checkpoint")
        if base is None:
            base = self._optimum(request)
        elif base.num_rounds != rounds:
            raise OptionError(
                f"--base_checkpoint is for {base.num_rounds} rounds, and --num_rounds={rounds}."
            )
        return structured(base, num_diagonals, rank, show_progress=request.show_progress)

    def _optimum(self, request: Request) -> Factorization:
        if request.workload.name != "prefix_sum":
            raise OptionError(
                f"--mechanism={self.name} approximates the optimum for prefix sums: for "
                f"--workload={request.workload.name} name a factorization to approximate by "
                "--base_checkpoint, or use a mechanism for any workload."
            )
        schema = request.participation
        if (
            schema is not None
            and schema.most_participations(request.num_rounds) > 1
            and not schema.is_evenly_spaced
        ):
            raise OptionError(
                f"--mechanism={self.name} approximates the optimum, which has no solution for "
                "clients that return after at least --separation rounds: name a factorization to "
                "approximate by --base_checkpoint."
            )
        return optimal(request.workload, schema, show_progress=request.show_progress)

    def for_timers(self, setting: TimerSetting) -> Iterable[Variant]:
        """Returns approximations of the optimum, or of the most bands where clients return."""
        if setting.participation.most_participations(setting.num_rounds) == 1:
            return [
                variant
                for optimum in OptimalEntry().for_timers(setting)
                for variant in self._of(setting.num_rounds, (OptimalEntry.name, optimum))
            ]
        if setting.separation == 1 or setting.num_rounds > _MOST_ROUNDS_OF_DENSE_SEARCHES:
            return ()
        base = banded_variant(setting.num_rounds, setting.separation)
        return self._of(setting.num_rounds, (BandedEntry.name, base))

    def for_sampling(self, setting: SamplingSetting) -> Iterable[Variant]:
        """Returns approximations of the optimum for a fixed order."""
        return [
            variant
            for optimum in OptimalEntry().for_sampling(setting)
            if not optimum.reason
            for variant in self._of(setting.num_rounds, (OptimalEntry.name, optimum))
        ]

    def _of(self, num_rounds: int, base: tuple[str, Variant]) -> list[Variant]:
        # docs/planning.md has the errors of other diagonals and ranks. Of fewer rounds, the rank
        # would be that of the base itself.
        diagonals, ranks = 4, (8, 16)
        return [
            Variant({"num_diagonals": diagonals, "rank": rank}, base=base)
            for rank in ranks
            if num_rounds > diagonals + rank
        ]


ENTRIES: tuple[Entry, ...] = (
    IdentityEntry(),
    TreeEntry(),
    BltEntry(),
    BandedInverseEntry(),
    ToeplitzEntry(),
    BandedEntry(),
    OptimalEntry(),
    StructuredEntry(),
)
