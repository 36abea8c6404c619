"""Files of other runs: what is read is composed, and everything else is refused."""

import json
import pathlib
from typing import Any

import dp_accounting
import pytest

import mf_aggregators as mfa
from mf_aggregators import accounting
from mf_aggregators.commands import stated_runs
from mf_aggregators.commands.command_line import CommandError
from mf_aggregators.commands.stated_runs import FORMAT, Others
from mf_aggregators.kernel.composition import EpsilonDeltaDpEvent
from mf_aggregators.privacy import statement_file
from mf_aggregators.privacy.statements import Statement
from tests.mf_aggregators import small_mechanisms

_PAIR = {"name": "keyboard 2", "source": "its report of 2025", "epsilon": 3.0, "delta": 1e-8}
_GAUSSIAN = {"kind": "Gaussian", "noise_multiplier": 2.0}


def _contents(*runs: Any, **values: Any) -> dict[str, Any]:
    head = {"format": FORMAT, "unit": "client", "adjacency": "zero-out"}
    return {**head, "runs": list(runs), **values}


def _event(**values: Any) -> dict[str, Any]:
    return {"name": "counts", "source": "a notebook", "event": values}


def _others(file: pathlib.Path) -> Others:
    found = stated_runs.Others.named(str(file), file.parent, 1e-6)
    assert found is not None
    return found


def _written(tmp_path: pathlib.Path, contents: Any) -> pathlib.Path:
    file = tmp_path / "others.json"
    file.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return file


def test_pairs_and_events_are_read(tmp_path: pathlib.Path) -> None:
    sampled = {"kind": "PoissonSampled", "sampling_probability": 0.1, "event": _GAUSSIAN}
    often = {"kind": "SelfComposed", "event": sampled, "count": 3}
    given = _event(kind="Composed", events=[often, {"kind": "Laplace", "noise_multiplier": 4}])
    found = _others(_written(tmp_path, _contents(_PAIR, given, adjacency="add-or-remove")))
    poisson = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(2.0))
    composed = [
        dp_accounting.SelfComposedDpEvent(poisson, 3),
        dp_accounting.LaplaceDpEvent(4.0),
    ]
    assert found.events == {
        "keyboard 2 (its report of 2025)": EpsilonDeltaDpEvent(3.0, 1e-8),
        "counts (a notebook)": dp_accounting.ComposedDpEvent(composed),
    }


def test_a_statement_counts_as_its_gaussian_mechanism(tmp_path: pathlib.Path) -> None:
    once = mfa.participation.SingleParticipation()
    mechanism = mfa.Mechanism(mfa.factorizations.banded(8, num_bands=4), once, 2.0)
    statement = Statement(small_mechanisms.facts(), mechanism.guarantee(1e-6))
    statement.write(tmp_path / "PRIVACY.md", tmp_path / "PRIVACY.json")
    document: dict[str, Any] = statement.to_dict()
    run = {"name": "keyboard 1", "source": "its statement", "statement": "PRIVACY.json"}
    file = _written(tmp_path, _contents(run))
    (event,) = _others(file).events.values()
    expected = accounting.epsilon(2.0, 1e-6)
    composed = accounting.composed_epsilon([event], 1e-6)
    assert composed == pytest.approx(expected, rel=1e-3)
    # The headline and the noise may contradict each other: the weaker one counts.
    for key, name, value in (("planned", "noise_multiplier", "9"), ("headline", "epsilon", "1")):
        altered = {**document, key: {**document[key], name: value}}
        (tmp_path / "PRIVACY.json").write_text(statement_file.canonical(altered))
        (counted,) = _others(file).events.values()
        assert accounting.composed_epsilon([counted], 1e-6) == pytest.approx(composed, rel=1e-4)
    headline = {**document["headline"], "guarantee": "worst_case"}
    for text in ("{}", statement_file.canonical({**document, "headline": headline})):
        (tmp_path / "PRIVACY.json").write_text(text)
        with pytest.raises(CommandError, match="statement"):
            _others(file)


@pytest.mark.parametrize(
    "contents",
    [
        "[]",
        "{",
        _contents(),
        _contents(_PAIR, _PAIR),
        # One of two runs that read alike would be lost.
        _contents(
            {**_PAIR, "name": "a (b)", "source": "c"}, {**_PAIR, "name": "a", "source": "b) (c"}
        ),
        _contents(_event(kind="Laplace", noise_multiplier=1e-3)),
        _contents(_PAIR, unit="example"),
        _contents(_PAIR, adjacency="replace-one"),
        _contents(_PAIR, format="another"),
        _contents(_PAIR, more=1),
        _contents({**_PAIR, "epsilon": True}),
        _contents({**_PAIR, "epsilon": -1.0}),
        _contents({**_PAIR, "delta": 1.0}),
        _contents({**_PAIR, "name": ""}),
        _contents({**_PAIR, "source": "two\nlines"}),
        _contents({**_PAIR, "event": _GAUSSIAN}),
        _contents({**_event(**_GAUSSIAN), "statement": "missing.json"}),
        _contents(_event(kind="Exotic")),
        _contents(_event(kind="Gaussian")),
        _contents(_event(kind="Gaussian", noise_multiplier=-1.0)),
        _contents(_event(kind="Gaussian", noise_multiplier=1.0, more=1)),
        _contents(_event(kind="SelfComposed", event=_GAUSSIAN, count=True)),
        _contents(_event(kind="Composed", events=_GAUSSIAN)),
        _contents(_event(kind="PoissonSampled", sampling_probability=2.0, event=_GAUSSIAN)),
        _contents(_event(kind="PoissonSampled", sampling_probability=0.5, event={"kind": "NoOp"})),
        _contents({"name": "x", "source": "y", "statement": "missing.json"}),
        json.dumps(_contents(_PAIR)).replace("3.0", "NaN"),
        json.dumps(_contents(_PAIR)).replace('"epsilon": 3.0', '"epsilon": 1.0, "epsilon": 3.0'),
    ],
)
def test_other_files_are_refused(tmp_path: pathlib.Path, contents: Any) -> None:
    with pytest.raises(CommandError, match="--other_runs: "):
        _others(_written(tmp_path, contents))
