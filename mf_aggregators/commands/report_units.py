"""Parts of mf-report about other units than one client: clients in windows, devices, and people."""

from typing import Any

from absl import flags

from mf_aggregators.commands import command_line
from mf_aggregators.commands.command_line import FlagGroup
from mf_aggregators.commands.report_contents import LedgerReport
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.claim import ONLY_IF, Guarantee
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.privacy import client_names, people


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags that name other units.

    Args:
      values: Where they are defined.
    """
    group = FlagGroup(values, "Participation")
    group.integer(
        "id_window",
        "The rounds after which client ids change. The report then has the guarantee of a client "
        "in a window of so many rounds, and that of a device in all windows whose timer starts "
        "again in each. A --ledger with an id in two windows is refused.",
    )
    group.path(
        "people",
        "Whose clients are whose, for --ledger: a text file (UTF-8) with a person, a comma and a "
        "client on each line. The report then has the guarantee of the person that is protected "
        "least, by all clients of that person together.",
    )


def check_flags(values: flags.FlagValues) -> None:
    """Checks the flags that name other units.

    Args:
      values: The parsed flags of mf-report.

    Raises:
      CommandError: If ``--people`` has no ledger.
      ValueError: If the window is no positive number of rounds.
    """
    if values.id_window is not None:
        numbers.positive_integer(values.id_window, "--id_window")
    command_line.check_choice(
        values.people is None or values.ledger is not None,
        "--people needs --ledger, whose clients it names.",
    )


def fields_and_sentences(
    values: flags.FlagValues, mechanism: Mechanism | None, found: LedgerReport | None
) -> tuple[dict[str, Any], list[str]]:
    """Returns what a report has of other units.

    Args:
      values: The parsed flags of mf-report.
      mechanism: Of the run; None without noise.
      found: What follows from its ledger; None if there is none.

    Raises:
      CommandError: If there is no noise, or the ledger does not fit the flags.
    """
    fields: dict[str, Any] = {}
    sentences: list[str] = []
    if values.id_window is None and values.people is None:
        return fields, sentences
    command_line.check_choice(
        mechanism is not None, "--id_window and --people need the noise of the run."
    )
    assert mechanism is not None
    is_kept = found is None or found.keeps_plan is not False
    if values.id_window is not None:
        window = values.id_window
        if found is not None and found.observed.ledger is not None:
            _check_windows(found, window)
        units = {
            name: mechanism.unit_guarantee(values.delta, window=window, num_windows=number)
            for name, number in (("window", 1), ("device", None))
        }
        fields |= {"id_window": window}
        for name, unit in units.items():
            fields |= _fields(name, unit if is_kept else None)
            sentences += [f"{_sentence(unit)}."] * is_kept
    if values.people is not None:
        assert found is not None
        with command_line.naming("people"):
            named = people.load(values.people)
            person = found.observed.least_protected_person(named.clients, values.delta)
        planned = mechanism.unit_guarantee(values.delta, num_clients=named.most_clients)
        least = None if person is None else person.guarantee
        fields |= {
            "most_clients_of_a_person": named.most_clients,
            "alike_person_names": client_names.num_alike(named.clients),
            "least_protected_person": person.name if person and values.name_clients else None,
            "least_protected_person_clients": None if person is None else len(person.clients),
            **_fields("person_planned", planned if is_kept else None),
            **_fields("person_realised", least),
        }
        sentences += [f"{_sentence(planned)}, if nobody has other clients."] * is_kept
        if least is not None:
            pair = numbers.stated_pair(least.epsilon, least.delta)
            sentences.append(
                f"The person that the ledger protects least has {pair} (all clients of the person "
                f"zeroed), {ONLY_IF}."
            )
    return fields, sentences


def _check_windows(found: LedgerReport, window: int) -> None:
    assert found.observed.ledger is not None
    is_in_two = [
        len(rounds) > 0 and rounds[0] // window != rounds[-1] // window
        for rounds in found.observed.ledger.rounds_of_clients
    ]
    command_line.check_choice(
        not any(is_in_two),
        f"--id_window={window}: {sum(is_in_two)} clients of the ledger took part in two windows, "
        "so that ids did not change as stated.",
    )


def _fields(name: str, guarantee: Guarantee | None) -> dict[str, Any]:
    return {
        f"{name}_sensitivity": None if guarantee is None else guarantee.sensitivity,
        f"{name}_epsilon": None if guarantee is None else guarantee.epsilon,
    }


def _sentence(guarantee: Guarantee) -> str:
    return str(guarantee).splitlines()[0]
