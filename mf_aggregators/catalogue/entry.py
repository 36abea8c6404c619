"""What the catalogue says of a mechanism: its options, its factorization, its place in plans."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

from mf_aggregators.factorizations.factorization import Factorization
from mf_aggregators.kernel.numbers import Error
from mf_aggregators.participation import Participation
from mf_aggregators.workloads import Workload

# The mean squared error over rounds, its maximum, or a mean with weights.
ErrorName: TypeAlias = Literal["mean", "max", "weights"]


class OptionError(Error, ValueError):
    """An option of a mechanism that is missing or does not fit; the message names the flag."""


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of mechanisms, which commands offer as a flag.

    Attributes:
      name: The name of the flag, without dashes, and of the parameter that it sets.
      kind: What it takes: an integer, a number, ``true`` or ``false``, one of ``choices``, the
        directory of a checkpoint, in which place the mechanism gets the factorization, or an
        ``error`` of the rounds: one of ``choices`` or a file of weights, in which place it gets
        the (n,) array. A plan for an error other than the mean makes the mechanism for it.
      meaning: The help of the flag, in whole sentences, with its default.
      choices: The values of a ``choice``.
      least: The smallest value of an integer, which commands check; None for any.
      for_runs: Whether commands that train offer it too. The other commands always do.
    """

    name: str
    kind: Literal["integer", "number", "boolean", "choice", "checkpoint", "error"]
    meaning: str
    choices: tuple[str, ...] = ()
    least: int | None = None
    for_runs: bool = False


@dataclasses.dataclass(frozen=True)
class Request:
    """What a factorization is made for.

    Attributes:
      num_rounds: The number of rounds n.
      workload: The workload A to optimise for.
      participation: The schema to optimise for; None for a mechanism's own default.
      options: The values of the options that were given, by name.
      show_progress: Whether to show a progress bar on standard error.
    """

    num_rounds: int
    workload: Workload
    participation: Participation | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    show_progress: bool = False

    def with_defaults(self, **options: Any) -> "Request":
        """Returns the request with values for options that were not given.

        Args:
          **options: Values by the names of options; None for an option that stays without.
        """
        added = {name: value for name, value in options.items() if value is not None}
        return dataclasses.replace(self, options={**added, **self.options})

    @property
    def separation(self) -> int | None:
        """The separation of the schema, where it has one."""
        return getattr(self.participation, "separation", None)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A mechanism with its options, which a plan evaluates.

    Attributes:
      options: The flags of ``mf-factorize`` that make it, beside the common ones.
      arguments: Further options that make it, which nobody has to give.
      depends_on_schema: Whether the matrix depends on the schema that it is made for; otherwise
        one is cached for all of them.
      base: The name and the variant of the factorization that it approximates, if any; it is
        made first, and is the option ``base_checkpoint``.
      amplified_bands: The bands of C, where a data sampler amplifies the guarantee; None where
        batches are in a fixed order.
      is_cached: Whether it is worth a place in the cache.
      reason: Why it is infeasible; empty otherwise.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    depends_on_schema: bool = True
    base: "tuple[str, Variant] | None" = None
    amplified_bands: int | None = None
    is_cached: bool = True
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class TimerSetting:
    """Devices with participation timers, for which a plan evaluates variants.

    Attributes:
      num_rounds: The number of rounds n.
      participation: The schema that the timers enforce.
      separation: The least distance of two participations of a client, in rounds; n for one.
      affordable_bands: The most bands of C, up to the separation, whose noise fits the budget.
      budget: What limits the bands, for a reader.
    """

    num_rounds: int
    participation: Participation
    separation: int
    affordable_bands: int
    budget: str


@dataclasses.dataclass(frozen=True)
class SamplingSetting:
    """A data centre that draws the batches, for which a plan evaluates variants.

    Attributes:
      num_rounds: The number of rounds n.
      band_counts: The numbers of bands that are worth evaluating, ascending from 1.
      participation: The schema of a fixed order of all batches, which nothing amplifies.
    """

    num_rounds: int
    band_counts: tuple[int, ...]
    participation: Participation


@dataclasses.dataclass(frozen=True)
class Entry:
    """A mechanism: how its factorizations are made, loaded, planned, audited and run.

    Commands, planner, audit and checkpoints know mechanisms by this class alone.

    Attributes:
      name: As ``--mechanism`` spells it.
      summary: What it is, in a few words, for a table.
      factorization: The class that a checkpoint is loaded with.
      make: Makes a factorization. Its parameters are the attributes of a :class:`Request` that it
        takes, and the options of the mechanism.
      options: The options that ``make`` takes.
      required: The names of those that have to be given.
      workloads: Whether it is optimised for the workload that is asked for (``any``), for the
        prefix sum alone (``prefix_sum``), or for none (``none``).
      for_timers: Returns what a plan evaluates for devices with timers.
      for_sampling: Returns what a plan evaluates where a data centre draws batches.
      for_runs: Returns the options of a training run that were not given, of a request and the
        most bands that a run gets; None for a mechanism that runs do not offer by name.
      for_audits: Returns the options of a small audit that were not given.
      has_schema_in_runs: Whether a run makes it for the schema of its timers.
      has_known_bands: Whether its options say how many bands C has, for amplification by sampling.
    """

    name: str
    summary: str
    factorization: type[Factorization]
    make: Callable[..., Factorization]
    options: tuple[Option, ...] = ()
    required: tuple[str, ...] = ()
    workloads: Literal["any", "prefix_sum", "none"] = "any"
    for_timers: Callable[[TimerSetting], Iterable[Variant]] = lambda setting: ()
    for_sampling: Callable[[SamplingSetting], Iterable[Variant]] = lambda setting: ()
    for_runs: Callable[[Request, int], Mapping[str, Any]] | None = lambda request, most_bands: {}
    for_audits: Callable[[Request], Mapping[str, Any]] = lambda request: {}
    has_schema_in_runs: bool = True
    has_known_bands: bool = False

    def build(self, request: Request) -> Factorization:
        """Makes a factorization.

        Args:
          request: What it is made for.

        Returns:
          The factorization.

        Raises:
          OptionError: If an option is missing.
          ValueError: If it cannot be made for this request.
        """
        for name in self.required:
            if name not in request.options:
                raise OptionError(f"--mechanism={self.name} needs --{name}.")
        parameters = inspect.signature(self.make).parameters
        names = ("num_rounds", "workload", "participation", "show_progress")
        given = {name: getattr(request, name) for name in names if name in parameters}
        return self.make(**given, **request.options)

    def for_audit(self, request: Request) -> Request:
        """Returns the request of a small audit, with values for what was not given.

        Args:
          request: What the audit asks for.
        """
        return request.with_defaults(**self.for_audits(request))

    def for_run(self, request: Request, most_bands: int) -> Request:
        """Returns the request of a training run, with values for what was not given.

        Args:
          request: What the run asks for.
          most_bands: The bands of C that a run gets without ``--num_bands``.

        Returns:
          The request.
        """
        if not self.has_schema_in_runs:
            request = dataclasses.replace(request, participation=None)
        if self.for_runs is None:
            return request
        return request.with_defaults(**self.for_runs(request, most_bands))

    def nearest_workload(self, workload: Workload) -> Workload | None:
        """Returns the workload that the mechanism can be optimised for in place of one.

        Args:
          workload: What is asked for.

        Returns:
          The workload itself where the mechanism can be optimised for it, and else the prefix sum.
          None if its matrix depends on no workload.
        """
        if self.workloads == "prefix_sum":
            return Workload("prefix_sum", workload.num_rounds)
        return workload if self.workloads == "any" else None

    def num_bands(self, options: Mapping[str, Any]) -> int | None:
        """Returns the bands of C before it is made, for amplification by sampling.

        Args:
          options: The options that were given.

        Returns:
          The number of bands, or None if the options do not say it; always None without
          ``has_known_bands``.
        """
        if not self.has_known_bands:
            return None
        return options.get("num_bands") if self.options else 1

    @property
    def error_option(self) -> Option | None:
        """The option by which factorizations are made for an error of the rounds; None for none."""
        return next((option for option in self.options if option.kind == "error"), None)
