"""What the catalogue says of a mechanism: its options, its factorization, its place in plans."""

import abc
import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

from mf_aggregators.factorizations.factorization import Factorization
from mf_aggregators.kernel.errors import Error
from mf_aggregators.participation import Participation
from mf_aggregators.workloads import Workload

# The mean squared error over rounds, its maximum, or a mean with weights.
ErrorName: TypeAlias = Literal["mean", "max", "weights"]


class OptionError(Error, ValueError):
    """An option of a mechanism that is missing or does not fit; the message names the flag."""


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a mechanism, which commands offer as a flag.

    Mechanisms may share a flag: then their options have the same kind and choices, and the help
    of the flag says what it is for each of them.

    Attributes:
      name: The name of the flag, without dashes.
      kind: What it takes: an integer, a number, ``true`` or ``false``, one of ``choices``, the
        directory of a checkpoint, in which place the mechanism gets the factorization, or an
        ``error`` of the rounds: one of ``choices`` or a file of weights, in which place it gets
        the (n,) array. A plan for an error other than the mean makes the mechanism for it.
      meaning: The help of the flag, in whole sentences.
      default: The value that holds where it is not given; None for none, and where it depends on
        what a factorization is made for.
      default_text: What follows "Default:" in help, where ``default`` alone does not say it.
      default_of_runs: The value in a training run, if it is another one.
      default_of_audits: The value in an audit, if it is another one.
      choices: The values of a ``choice``.
      least: The smallest value of an integer, which commands check; None for any.
      for_runs: Whether commands that train offer it too. The other commands always do.
    """

    name: str
    kind: Literal["integer", "number", "boolean", "choice", "checkpoint", "error"]
    meaning: str
    default: bool | int | float | str | None = None
    default_text: str = ""
    default_of_runs: int | None = None
    default_of_audits: int | None = None
    choices: tuple[str, ...] = ()
    least: int | None = None
    for_runs: bool = True

    def described_default(self) -> str:
        """Returns what follows "Default:" in help; empty if there is none."""
        if self.default_text:
            return self.default_text.rstrip(".")
        if self.default is None:
            return ""
        if isinstance(self.default, bool):
            return "true" if self.default else "false"
        # 1e-5 in the place of 1e-05.
        return re.sub(r"e-0(?=\d)", "e-", str(self.default))


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


class Entry(abc.ABC):
    """A mechanism: how its factorizations are made, loaded, planned, audited and run.

    Commands, planner, audit and checkpoints know mechanisms by this class alone.

    Attributes:
      name: As ``--mechanism`` spells it.
      summary: What it is, in a few words, for a table.
      factorization: The class that a checkpoint is loaded with.
      options: The options that it takes.
      has_any_workload: Whether it is optimised for every lower-triangular workload, as for
        training with momentum and a schedule of learning rates.
      is_for_runs: Whether commands that train offer it by name.
      has_known_bands: Whether its options say how many bands C has, for amplification by sampling.
    """

    name: str
    summary: str = ""
    factorization: type[Factorization]
    options: tuple[Option, ...] = ()
    has_any_workload: bool = False
    is_for_runs: bool = True
    has_known_bands: bool = False

    @abc.abstractmethod
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

    def for_audit(self, request: Request) -> Request:
        """Returns the request of a small audit, with values for what was not given.

        Args:
          request: What the audit asks for.
        """
        return request.with_defaults(
            **{option.name: option.default_of_audits for option in self.options}
        )

    def for_run(self, request: Request, most_bands: int) -> Request:
        """Returns the request of a training run, with values for what was not given.

        Args:
          request: What the run asks for.
          most_bands: The bands of C that a run gets without ``--num_bands``.

        Returns:
          The request.
        """
        del most_bands
        return request.with_defaults(
            **{option.name: option.default_of_runs for option in self.options}
        )

    def nearest_workload(self, workload: Workload) -> Workload | None:
        """Returns the workload that the mechanism can be optimised for in place of one.

        Args:
          workload: What is asked for.

        Returns:
          The workload itself where the mechanism can be optimised for it, and else the one that is
          nearest to it: by default the prefix sum. None if its matrix depends on no workload.
        """
        if self.has_any_workload:
            return workload
        return Workload("prefix_sum", workload.num_rounds)

    def num_bands(self, options: Mapping[str, Any]) -> int | None:
        """Returns the bands of C before it is made, for amplification by sampling.

        Args:
          options: The options that were given.

        Returns:
          The number of bands, or None if the options do not say it; always None without
          ``has_known_bands``.
        """
        del options
        return None

    def for_timers(self, setting: TimerSetting) -> Iterable[Variant]:
        """Returns what a plan evaluates for devices with timers: by default, without options.

        Args:
          setting: What the plan is for.
        """
        del setting
        return (Variant(),)

    def for_sampling(self, setting: SamplingSetting) -> Iterable[Variant]:
        """Returns what a plan evaluates where a data centre draws batches: by default nothing.

        Args:
          setting: What the plan is for.
        """
        del setting
        return ()

    @property
    def error_option(self) -> Option | None:
        """The option by which factorizations are made for an error of the rounds; None for none."""
        return next((option for option in self.options if option.kind == "error"), None)

    def arguments(self, request: Request) -> dict[str, Any]:
        """Returns the value of every option that has one: what was given, and defaults.

        Args:
          request: What was asked for.

        Returns:
          The values by the names of options.
        """
        defaults = {option.name: option.default for option in self.options}
        return dict(request.with_defaults(**defaults).options)

    def required(self, request: Request, name: str, hint: str = "") -> Any:
        """Returns the value of an option that has no default.

        Args:
          request: What was asked for.
          name: The option.
          hint: What may be given in its place, for the message.

        Returns:
          The value.

        Raises:
          OptionError: If it was not given.
        """
        if name not in request.options:
            raise OptionError(f"--mechanism={self.name} needs --{name}{hint}.")
        return request.options[name]
