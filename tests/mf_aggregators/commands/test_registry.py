"""Records for the registry of deployments: by its own schema, with the stated numbers."""

import dataclasses
import functools
import hashlib
import json
import pathlib
import re
import tempfile
import types
from typing import Any

import jsonschema
import pytest
import yaml

import mf_aggregators as mfa
from mf_aggregators.commands import registry
from mf_aggregators.kernel.ledger import ObservedParticipation
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import MinSeparation, PoissonSampling
from mf_aggregators.privacy import statement_file
from mf_aggregators.privacy.statements import RunFacts, Statement
from tests import console_commands

_SCHEMA = pathlib.Path(__file__).with_name("deployments-schema.yaml")
_FACTS = RunFacts(
    mechanism="Banded matrix factorization for 12 rounds",
    population=600,
    clients_per_round=50.0,
    clip=1.0,
    public_data="none",
    enforcement="Each phone keeps a timer.",
    seed_is_fixed=False,
)
# Words that would be something else in YAML without its quotes.
_HOSTILE = '- {key: "value"} # no, 1e3, 日本: | & * ! %'


@functools.cache
def _timers() -> Mechanism:
    matrix = mfa.factorizations.banded(12, num_bands=4)
    return mfa.calibrate(matrix, MinSeparation(4), epsilon=2.0, delta=1e-6)


def _planned(facts: RunFacts = _FACTS, **values: Any) -> Statement:
    return Statement(facts, _timers().guarantee(1e-6), date="2026-03-01", **values)


def _broken() -> Statement:
    plan = _timers().guarantee(1e-6)
    seen = ObservedParticipation(num_rounds=12, num_clients=80, separation=2, max_participations=6)
    facts = dataclasses.replace(_FACTS, is_finished=True)
    return Statement(facts, plan, seen)


def _sampled() -> Statement:
    scheme = PoissonSampling(num_rounds=12, num_bands=4, population=600, clients_per_round=50)
    mechanism = Mechanism(mfa.factorizations.banded(12, num_bands=4), scheme, 2.0)
    return Statement(_FACTS, mechanism.guarantee(1e-6))


def _with_words() -> Statement:
    names = ("public_data", "enforcement", "responsible", "model", "period", "custody")
    words: dict[str, Any] = dict.fromkeys(names, _HOSTILE)
    facts = dataclasses.replace(_FACTS, simulation=("It is simulated.",), secure_sums=True, **words)
    together = {"names": [_HOSTILE], "file": None, "epsilon": "3", "delta": "1e-06"}
    return _planned(facts, other_runs=together)


def _record(statement: Statement | None = None, data: str = "") -> str:
    """The record that is written of a statement, or of its data."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        if statement is not None:
            data = f"{folder}/PRIVACY.json"
            statement.write(path / "PRIVACY.md", data)
        values: Any = types.SimpleNamespace(registry=path / "record.yaml")
        registry.write(values, data)
        return (path / "record.yaml").read_text(encoding="utf-8")


def _read(statement: Statement) -> dict[str, Any]:
    """The record, as the registry's own tests read and check it."""
    found: dict[str, Any] = yaml.safe_load(_record(statement))
    schema = yaml.safe_load(_SCHEMA.read_text(encoding="utf-8"))
    checker = jsonschema.Draft7Validator.FORMAT_CHECKER
    jsonschema.Draft7Validator(schema, format_checker=checker).validate(found)
    basic = found["deployment"]["basic"]
    parts = (basic["name"], "-".join(basic["data_curators"]), basic["publication_date"][:4])
    slug = "_".join(re.sub(r"\W+", "_", part.lower()) for part in parts).replace("_", "-")
    assert found["url_slug"] == slug
    return found


@pytest.mark.parametrize("make", [_planned, _broken, _sampled, _with_words])
def test_records_are_by_the_schema_of_the_registry(make: Any) -> None:
    statement = make()
    loss = _read(statement)["deployment"]["privacy_loss"]
    stated, parameters = statement.stated, loss["privacy_parameters"]
    assert stated.epsilon <= parameters["epsilon"] <= stated.epsilon * 1.00001
    assert parameters["delta"] == 1e-6
    assert ("rho" in parameters) == (not stated.is_amplified)
    for each in statement.assumptions():
        assert f"- {each['sentence']} ({each['basis']})" in loss["privacy_parameters_details"]
    is_broken = "plan was not kept" in loss["privacy_parameters_details"]
    assert is_broken == (statement.keeps_plan is False)


def test_words_of_a_person_stay_as_they_are() -> None:
    statement = _with_words()
    deployment = _read(statement)["deployment"]
    assert (deployment["basic"]["name"], deployment["basic"]["data_curators"]) == (
        _HOSTILE,
        [_HOSTILE],
    )
    assert deployment["basic"]["description"].startswith("It is simulated.")
    model = deployment["deployment_model"]
    assert model["data_source_type_details"].endswith(_HOSTILE)
    assert f"Together with {_HOSTILE}: epsilon 3 at" in model["release_type_details"]
    assert model["model_name_details"].endswith("the server sees sums alone.")
    digest = hashlib.sha256(statement_file.canonical(statement.to_dict()).encode()).hexdigest()
    assert digest in deployment["administrative"]["notes"]


def test_what_the_statement_does_not_have_is_left_to_a_person() -> None:
    found = _read(_planned())["deployment"]
    basic = found["basic"]
    assert basic["publication_date"] == "2026-03-01"
    assert {basic["name"], *basic["data_curators"], basic["intended_use"]} == {"Not stated."}
    assert found["deployment_model"]["model_name_details"].endswith("Secure sums: Not stated.")


def test_a_statement_without_a_guarantee_has_no_record() -> None:
    facts = dataclasses.replace(_FACTS, seed_is_fixed=True)
    with pytest.raises(ValueError, match="has no guarantee"):
        _record(_planned(facts))


def test_the_command_writes_it_of_a_new_statement_and_of_one_that_is_verified(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _timers().save("mechanism")
    (tmp_path / "ledger.csv").write_text("client,round\nada,0\nada,4\nbo,1\n")
    told = ("--public_data=none", "--enforcement=Timers.", "--population=600", "--clip_norm=1")
    words = ("--checkpoint=mechanism", "--ledger=ledger.csv", "--delta=1e-6", *told)
    made = ("--statement=PRIVACY.md", "--clients_per_round=1", "--registry=record.yaml")
    record = tmp_path / "record.yaml"
    ended = console_commands.call("mf-report", *words, *made, "--format=json")
    assert (ended.status, json.loads(ended.printed)["registry"]) == (0, "record.yaml")
    text = record.read_text(encoding="utf-8")
    assert text == _record(data="PRIVACY.json")
    again = ("--verify=PRIVACY.md", "--registry=record.yaml")
    for overwrite, status in ((), 2), (("--overwrite",), 0):
        record.write_text("another file")
        ended = console_commands.call("mf-report", *again, *overwrite)
        assert (ended.status, record.read_text() == text) == (status, status == 0)
    # A statement that does not follow from its files has none.
    (tmp_path / "ledger.csv").write_text("client,round\nada,0\n")
    record.unlink()
    assert console_commands.call("mf-report", *again).status == 1
    assert not record.exists()


@pytest.mark.parametrize(
    "flags",
    [
        ("--checkpoint=mechanism", "--registry=record.yaml"),
        ("--verify=PRIVACY.md", "--registry=record.json"),
        ("--verify=PRIVACY.md", "--registry=missing/record.yaml"),
    ],
)
def test_other_flags_are_refused(
    flags: tuple[str, ...], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = console_commands.call("mf-report", *flags)
    assert (ended.status, "--registry" in ended.errors) == (2, True)
