"""The list of all mechanisms: how each is made, loaded, planned, audited and run.

The options of a mechanism are parameters of the function that makes its matrix. Another function
returns the variants of the mechanism that a plan compares.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from mf_aggregators import factorizations, inputs
from mf_aggregators.factorizations.searches import RoundWeights
from mf_aggregators.kernel.numbers import Error
from mf_aggregators.participation import Participation, SamplingScheme
from mf_aggregators.workloads import Workload

# The relative optimality gap of the squared error to which plans search for matrices.
RELATIVE_GAP_OF_PLANS = 1e-3
# The gap for optimal matrices, because their searches are faster.
_GAP_OF_OPTIMA = 5e-4
# Above these numbers of rounds, searches for dense matrices and for banded inverses take minutes.
_MOST_ROUNDS_OF_DENSE_SEARCHES, _MOST_ROUNDS_OF_INVERSES = 4096, 20_000
# Plans include the largest number of bands, which is best, up to this many rounds and this n b^2.
_MOST_ROUNDS_OF_MOST_BANDS, _MOST_OPERATIONS = 20_000, 4e8
_FEWER_BANDS = (4, 16, 64)


class _OptionError(Error, ValueError):
    """An option of a mechanism is missing or does not fit; the message names the flag."""


class _Option(NamedTuple):
    """An option of mechanisms, for the flags of commands.

    Attributes:
      takes: The type of the value: ``int``, ``float`` or ``bool``; a tuple of words to choose from;
        ``checkpoint`` for a directory with a factorization; or ``error`` for an error over rounds
        (``mean``, ``max``, or a file with n weights).
      meaning: The help text of the flag, with the default.
    """

    takes: type | tuple[str, ...] | Literal["checkpoint", "error"]
    meaning: str


_OPTIONS: Mapping[str, _Option] = {
    "num_bands": _Option(
        int,
        "The number of bands of C; for banded_inverse, of C^-1. Default: the separation for banded "
        "and toeplitz (without one, n for toeplitz), and 16 for banded_inverse, for which "
        "mf-factorize requires it.",
    ),
    "num_buffers": _Option(
        int,
        "The number of buffers, 1 to 8. Default: 4; mf-factorize chooses it by --accuracy.",
    ),
    "accuracy": _Option(
        float,
        "Without --num_buffers: the fewest buffers are used whose error is at most this share "
        "above the error of 8 buffers. Default: 0.01.",
    ),
    "decoder": _Option(
        ("online", "full"),
        "How sums are estimated: from the nodes below them (online), or from all nodes (full). "
        "Default: online.",
    ),
    "error": _Option(
        "error",
        "The error to minimise: the mean squared error over rounds (mean), that of the worst round "
        "(max), or the mean with weights from a text file, one line for each round. Default: mean.",
    ),
    "coefficients": _Option(
        ("optimised", "square_root"),
        "The coefficients: optimised, or those of the square root of the workload. Default: "
        "optimised.",
    ),
    "equal_column_norms": _Option(
        bool,
        "Whether all columns of C have the same norm. toeplitz scales its columns afterwards; blt "
        "and banded_inverse scale rows and columns. Default: true for banded, otherwise false.",
    ),
    "relative_gap": _Option(
        float,
        "The certified relative gap of the squared error at which the search stops. Default: 1e-5 "
        "for banded, or 1e-3 with --error=max; 1e-6 for optimal, or if clients return 5e-6, with "
        "--error=max 1e-3.",
    ),
    "num_diagonals": _Option(
        int, "The number h of diagonals that are kept exactly. It must be given."
    ),
    "rank": _Option(
        int, "The rank r of the approximation of all other entries. The mechanism requires it."
    ),
    "base_checkpoint": _Option(
        "checkpoint", "The factorization to approximate. Default: optimal, which is computed first."
    ),
}
# The options that training runs have as flags, too; both are at least 1.
OPTIONS_OF_RUNS = ("num_bands", "num_buffers")


@dataclasses.dataclass(frozen=True)
class Clients:
    """The rounds and participation of a plan, for which mechanisms propose variants.

    Attributes:
      num_rounds: The number of rounds n.
      participation: The schema for which matrices are made: that of timers, or a fixed order of all
        batches (without amplification).
      separation: The smallest distance of two participations of a client in rounds; n for one
        participation.
      affordable_bands: The largest number of bands of C, up to the separation, whose noise fits the
        memory limit.
      band_counts: If batches are drawn, the numbers of bands to compare, ascending from 1; empty
        for timers.
    """

    num_rounds: int
    participation: Participation
    separation: int
    affordable_bands: int
    band_counts: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Variant:
    """A mechanism with certain options, which a plan compares.

    Attributes:
      kind: As ``mf-factorize --mechanism`` spells it.
      options: The mechanism's options, which are flags of ``mf-factorize``. An ``error`` with
        weights is the tuple of weights.
      depends_on_schema: Whether the matrix depends on the schema; otherwise one cached matrix is
        used for all schemas.
      base: The variant that it approximates, if any, for the option ``base_checkpoint``.
      amplified_bands: The bands of C if drawn batches amplify the guarantee; None for batches in a
        fixed order.
      is_search: Whether the matrix needs a search, so that it is cached.
      reason: The reason why the variant is infeasible; empty if it is feasible.
      factorization: The matrix of a checkpoint that ``options`` name; None if the matrix still has
        to be computed.
      participation: The schema for which it is made; None until the plan sets it.
      sampling: The scheme that draws clients; None for no sampling.
    """

    kind: str
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    depends_on_schema: bool = True
    base: "Variant | None" = None
    amplified_bands: int | None = None
    is_search: bool = True
    reason: str = ""
    factorization: factorizations.Factorization | None = None
    participation: Participation | None = None
    sampling: SamplingScheme | None = None

    @property
    def name(self) -> str:
        """The mechanism with the values of its options, or the checkpoint, as text."""
        if self.factorization is not None:
            return f"checkpoint {self.options['checkpoint']}"
        values = [
            "weights" if isinstance(value, tuple) else str(value)
            for name, value in self.options.items()
            if not isinstance(value, bool) and name != "relative_gap"
        ]
        values += ["equal norms"] if self.options.get("equal_column_norms") else []
        return " ".join([self.kind, *values])

    @property
    def name_with_sampling(self) -> str:
        """The name, with the sampling scheme if there is one."""
        return self.name if self.sampling is None else f"{self.name}, {self.sampling.words.label}"


# The options of mechanisms differ, so ``make`` takes any: ``build`` gives those of its signature.
@dataclasses.dataclass(frozen=True)
class _Entry:  # type: ignore[misc]
    """The entry of a mechanism: how it is made, loaded, planned, audited and run.

    Attributes:
      name: As ``--mechanism`` spells it.
      summary: A short description, for a table.
      factorization: The class of its factorizations, for loading checkpoints.
      make: The function that makes a factorization. Its parameters are the mechanism's options, and
        any of ``num_rounds``, ``workload``, ``participation`` and ``show_progress``.
      tried: The function that returns the variants that a plan compares.
      workloads: Whether the matrix can be optimised for any workload (``any``), only for the prefix
        sum (``prefix_sum``), or does not depend on the workload (``none``).
      required: Options that have to be given although ``make`` has a default for them.
      for_runs: The function that returns defaults for the options of training runs and audits, from
        the rounds and the largest number of bands; None for a mechanism that runs do not offer by
        name.
      has_schema_in_runs: Whether a run optimises it for the schema of its timers.
      has_known_bands: Whether the number of bands of C follows from the options, for amplification
        by sampling.
    """

    name: str
    summary: str
    factorization: type[factorizations.Factorization]
    make: Callable[..., factorizations.Factorization]  # type: ignore[misc]
    tried: Callable[[Clients], Iterable[Variant]]
    workloads: Literal["any", "prefix_sum", "none"] = "any"
    required: tuple[str, ...] = ()
    for_runs: Callable[[int, int], Mapping[str, object]] | None = lambda num_rounds, most_bands: {}
    has_schema_in_runs: bool = True
    has_known_bands: bool = False

    @functools.cached_property
    def options(self) -> Mapping[str, _Option]:
        """The options of the mechanism, by name: parameters of ``make``."""
        parameters = inspect.signature(self.make).parameters
        return {name: option for name, option in _OPTIONS.items() if name in parameters}

    def build(
        self,
        workload: Workload,
        participation: Participation | None = None,
        options: Mapping[str, object] = MappingProxyType({}),
        *,
        show_progress: bool = False,
    ) -> factorizations.Factorization:
        """Makes a factorization.

        Args:
          workload: The workload A to optimise for.
          participation: The schema to optimise for; None for a mechanism's own default.
          options: Values of the options that are given, by name.
          show_progress: Whether to show a progress bar on standard error.

        Returns:
          The factorization.

        Raises:
          Error: If an option is missing.
          ValueError: If it cannot be made for this workload, schema and options.
        """
        parameters = inspect.signature(self.make).parameters
        needed = [name for name, each in parameters.items() if each.default is each.empty]
        for name in self.options:
            if name not in options and (name in needed or name in self.required):
                raise _OptionError(f"--mechanism={self.name} needs --{name}.")
        common = {
            "num_rounds": workload.num_rounds,
            "workload": workload,
            "participation": participation,
            "show_progress": show_progress,
        }
        given = {name: value for name, value in common.items() if name in parameters}
        return self.make(**given, **options)

    def options_of_run(
        self, given: Mapping[str, object], num_rounds: int, most_bands: int
    ) -> dict[str, object]:
        """Returns the options of a run or an audit: given ones, and defaults for the others.

        Args:
          given: The given options by name.
          num_rounds: The rounds n.
          most_bands: The number of bands of C in a run without ``--num_bands``.
        """
        defaults = {} if self.for_runs is None else self.for_runs(num_rounds, most_bands)
        return {**defaults, **given}

    def nearest_workload(self, workload: Workload) -> Workload | None:
        """Returns the workload for which the mechanism can be optimised instead of a given one.

        Args:
          workload: The requested workload.

        Returns:
          The workload itself if the mechanism can be optimised for it, otherwise the prefix sum.
          None if the matrix does not depend on a workload.
        """
        if self.workloads == "prefix_sum":
            return Workload("prefix_sum", workload.num_rounds)
        return workload if self.workloads == "any" else None

    def num_bands(self, options: Mapping[str, object]) -> int | None:
        """Returns the number of bands of C before it is made, for amplification by sampling.

        Args:
          options: The given options.

        Returns:
          The number of bands; None if it does not follow from the options, and always without
          ``has_known_bands``.
        """
        if not self.has_known_bands:
            return None
        given = options.get("num_bands") if self.options else 1
        return None if given is None else inputs.part(given, int)


def _banded(
    workload: Workload,
    participation: Participation | None,
    show_progress: bool,
    num_bands: int | None = None,
    equal_column_norms: bool = True,
    error: RoundWeights = "mean",
    relative_gap: float | None = None,
) -> factorizations.BandedFactorization:
    separation = getattr(participation, "separation", None)
    if num_bands is None and separation is not None:
        num_bands = min(separation, workload.num_rounds)
    if num_bands is None:
        raise _OptionError("--mechanism=banded needs --num_bands or --separation.")
    return factorizations.banded(
        workload,
        num_bands,
        equal_column_norms,
        participation,
        error=error,
        relative_gap=relative_gap,
        show_progress=show_progress,
    )


def _structured(
    workload: Workload,
    participation: Participation | None,
    show_progress: bool,
    num_diagonals: int,
    rank: int,
    base_checkpoint: factorizations.Factorization | None = None,
) -> factorizations.StructuredFactorization:
    base = base_checkpoint
    if base is not None and base.num_rounds != workload.num_rounds:
        raise _OptionError(
            f"--base_checkpoint is for {base.num_rounds} rounds, and "
            f"--num_rounds={workload.num_rounds}."
        )
    if base is None and workload.name != "prefix_sum":
        raise _OptionError(
            "--mechanism=structured approximates the optimum for prefix sums: for "
            f"--workload={workload.name} give a factorization to approximate by --base_checkpoint, "
            "or use another mechanism."
        )
    if base is None:
        base = factorizations.optimal(workload, participation, show_progress=show_progress)
    return factorizations.structured(base, num_diagonals, rank, show_progress=show_progress)


# The variants of each mechanism that plans compare.


def _too_many_rounds(num_rounds: int, most: int) -> str:
    return f"is optimised for at most {most} rounds" if num_rounds > most else ""


def _independent(clients: Clients) -> list[Variant]:
    bands = 1 if clients.band_counts else None
    return [Variant("identity", amplified_bands=bands, is_search=False)]


def _for_timers(
    kind: str, *options: Mapping[str, object], is_search: bool = True
) -> Callable[[Clients], list[Variant]]:
    """Returns a function that proposes, for timers, a mechanism with each of some options."""
    variants = [Variant(kind, each, is_search=is_search) for each in options]
    return lambda clients: [] if clients.band_counts else variants


def _buffered(clients: Clients) -> list[Variant]:
    """BLTs with few buffers; with equal column norms only if clients take part once."""
    if clients.band_counts:
        return []
    found = [Variant("blt", {"num_buffers": each}) for each in (2, 4)]
    if clients.participation.most_participations(clients.num_rounds) == 1:
        found.append(Variant("blt", {"num_buffers": 4, "equal_column_norms": True}))
    return found


def _inverses(clients: Clients) -> list[Variant]:
    """Banded inverses with few and with more bands, if the search does not take minutes."""
    if clients.band_counts:
        return []
    rounds = clients.num_rounds
    reason = _too_many_rounds(rounds, _MOST_ROUNDS_OF_INVERSES)
    numbers = sorted({min(number, rounds) for number in (16, 64)})
    return [Variant("banded_inverse", {"num_bands": each}, reason=reason) for each in numbers]


def _bands(clients: Clients) -> list[Variant]:
    """Banded matrices: the most bands, and fewer for less memory; if drawn, all band_counts."""
    rounds, affordable = clients.num_rounds, clients.affordable_bands
    if clients.band_counts:
        counts = clients.band_counts[1:]
        return [
            dataclasses.replace(_of_bands(rounds, each), amplified_bands=each) for each in counts
        ]
    found = []
    if affordable < clients.separation:
        reason = f"keeps more noise than allowed; at most {affordable} bands fit"
        found.append(Variant("banded", {"num_bands": clients.separation}, reason=reason))
    most = _MOST_ROUNDS_OF_DENSE_SEARCHES
    if rounds <= most:
        found += [_of_bands(rounds, number) for number in _FEWER_BANDS if number < affordable]
    elif rounds * affordable**2 <= _MOST_OPERATIONS:
        most = _MOST_ROUNDS_OF_MOST_BANDS
    if affordable > 1:
        found.append(_of_bands(rounds, affordable, most))
    return found


def _of_bands(
    num_rounds: int, num_bands: int, most_rounds: int = _MOST_ROUNDS_OF_DENSE_SEARCHES
) -> Variant:
    """The optimal matrix for a number of bands, which is cached for all schemas."""
    return Variant(
        "banded",
        {"num_bands": num_bands, "relative_gap": RELATIVE_GAP_OF_PLANS},
        depends_on_schema=False,
        reason=_too_many_rounds(num_rounds, most_rounds),
    )


def _optima(clients: Clients) -> list[Variant]:
    """The optimal matrix for one participation or a fixed order, if it is not too large."""
    rounds = clients.num_rounds
    reason = _too_many_rounds(rounds, _MOST_ROUNDS_OF_DENSE_SEARCHES)
    if not clients.band_counts and (
        reason or clients.participation.most_participations(rounds) > 1
    ):
        return []
    options = {} if reason else {"relative_gap": _GAP_OF_OPTIMA}
    return [Variant("optimal", options, reason=reason)]


def _approximations(clients: Clients) -> list[Variant]:
    """Approximations of the optimal matrix, or under timers of the matrix with most bands."""
    rounds = clients.num_rounds
    bases = [each for each in _optima(clients) if not each.reason]
    if (
        not clients.band_counts
        and clients.participation.most_participations(rounds) > 1
        and clients.separation > 1
        and rounds <= _MOST_ROUNDS_OF_DENSE_SEARCHES
    ):
        bases = [_of_bands(rounds, clients.separation)]
    # For few rounds, these ranks would be the rank of the base itself, so they are not proposed.
    diagonals, ranks = 4, (8, 16)
    return [
        Variant("structured", {"num_diagonals": diagonals, "rank": rank}, base=base)
        for base in bases
        for rank in ranks
        if rounds > diagonals + rank
    ]


# Commands and plans name the mechanisms in this order.
_ENTRIES: tuple[_Entry, ...] = (
    _Entry(
        "identity",
        "independent noise of DP-FedAvg and DP-SGD",
        factorizations.IdentityFactorization,
        factorizations.identity,
        _independent,
        workloads="none",
        has_known_bands=True,
    ),
    _Entry(
        "tree",
        "noise in the nodes of a binary tree; Honaker's estimators `online` (from below) and "
        "`full`",
        factorizations.TreeAggregationFactorization,
        factorizations.tree_aggregation,
        _for_timers("tree", {"decoder": "online"}, {"decoder": "full"}, is_search=False),
        workloads="none",
    ),
    _Entry(
        "blt",
        "Toeplitz coefficients that are sums of m powers (buffered linear Toeplitz)",
        factorizations.BltFactorization,
        factorizations.blt,
        _buffered,
        for_runs=lambda num_rounds, most_bands: {"num_buffers": 4},
    ),
    _Entry(
        "banded_inverse",
        "C^-1 Toeplitz with p bands",
        factorizations.BandedInverseFactorization,
        factorizations.banded_inverse,
        _inverses,
        required=("num_bands",),
        for_runs=lambda num_rounds, most_bands: {"num_bands": min(16, num_rounds)},
    ),
    _Entry(
        "toeplitz",
        "the square root of the prefix sum in closed form, or better coefficients; b bands or all",
        factorizations.ToeplitzFactorization,
        factorizations.toeplitz,
        lambda clients: _for_timers("toeplitz", {"num_bands": clients.affordable_bands})(clients),
        for_runs=lambda num_rounds, most_bands: {"num_bands": most_bands},
        has_known_bands=True,
    ),
    _Entry(
        "banded",
        "least squared error with b bands (equal column norms by default), certified",
        factorizations.BandedFactorization,
        _banded,
        _bands,
        for_runs=lambda num_rounds, most_bands: {"num_bands": most_bands},
        has_known_bands=True,
    ),
    _Entry(
        "optimal",
        "least squared error of all matrices, certified",
        factorizations.DenseFactorization,
        factorizations.optimal,
        _optima,
        # The optimum is not known for the schemas of timers.
        has_schema_in_runs=False,
    ),
    _Entry(
        "structured",
        "a given factorization, its decoder reduced to h diagonals and rank r",
        factorizations.StructuredFactorization,
        _structured,
        _approximations,
        workloads="prefix_sum",
        for_runs=None,
    ),
)


# All mechanisms by name, in the order in which commands name them.
ENTRIES: Mapping[str, _Entry] = MappingProxyType({each.name: each for each in _ENTRIES})


def entry(name: str) -> _Entry:
    """Returns the entry of a mechanism.

    Args:
      name: As ``--mechanism`` spells it.

    Returns:
      The entry.

    Raises:
      ValueError: If there is no mechanism of this name; the message lists the names.
    """
    if name not in ENTRIES:
        raise ValueError(
            f"the mechanism {name!r} is not one of {', '.join(ENTRIES)}: give a matrix of another "
            "package as data, factorizations.from_matrix(C)."
        )
    return ENTRIES[name]
