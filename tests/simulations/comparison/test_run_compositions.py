"""The guarantee of runs together, against closed forms and dp-accounting's own composition."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import accounting
from mf_aggregators.accounting import gaussian, sampling_schemes
from mf_aggregators.privacy import printed_guarantees
from simulations.comparison import run_compositions
from simulations.comparison.repeated_runs import FinishedRun

_SIZES: dict[str, Any] = {
    "num_rounds": 12,
    "num_bands": 2,
    "population": 200,
    "clients_per_round": 10,
}


def _run(
    multiplier: float | None, epsilon: float | None, sampling: str | None = None
) -> FinishedRun:
    scheme = None if sampling is None else sampling_schemes.create(sampling, **_SIZES)
    delta = None if epsilon is None else 1e-4
    return FinishedRun(0.5, 12, epsilon, delta, 1.0, multiplier, scheme)


@pytest.mark.parametrize(("target", "together"), [(8.0, 43.3), (4.0, 19.3)])
@pytest.mark.parametrize("says_noise", [True, False])
def test_the_twelve_runs_of_the_readme(target: float, together: float, says_noise: bool) -> None:
    multiplier = accounting.noise_multiplier(target, 1e-4) if says_noise else None
    runs = [_run(multiplier, target)] * 12 + [_run(None, None)] * 3
    found = run_compositions.composition(runs)
    assert found.private_runs == 12
    assert found.other_runs == 3
    assert found.delta == 1e-4
    assert found.epsilon == pytest.approx(together, abs=0.05)
    one = accounting.noise_multiplier(target, 1e-4) / math.sqrt(12)
    assert found.epsilon == pytest.approx(gaussian.exact_epsilon(one, 1e-4), rel=1e-6)
    text = run_compositions.sentences(found)
    shown = printed_guarantees.rounded_up(found.epsilon or 0.0)
    assert f"All 12 private runs together, on the same clients: ({shown}, 0.0001)-DP" in text
    assert "is promised nothing" in text


@given(st.lists(st.floats(0.6, 9.0), min_size=2, max_size=7))
@settings(deadline=None)
def test_gaussian_mechanisms_compose_to_one(multipliers: list[float]) -> None:
    runs = [_run(each, accounting.epsilon(each, 1e-4)) for each in multipliers]
    found = run_compositions.composition(runs)
    one = 1.0 / math.sqrt(sum(each**-2 for each in multipliers))
    exact = gaussian.exact_epsilon(one, 1e-4)
    assert found.epsilon is not None
    assert exact - 1e-9 <= found.epsilon <= exact * (1.0 + 1e-5) + 1e-9
    assert found.epsilon >= max(run.epsilon for run in runs if run.epsilon is not None) - 1e-9


def test_runs_that_cannot_be_composed_are_said_to_be() -> None:
    # What drawing the noise costs is no small part of that.
    run = dataclasses.replace(_run(0.9, 9.0), delta=1e-15)
    found = run_compositions.composition([run] * 4 + [_run(None, None)])
    assert found.epsilon is None
    assert found.reason is not None
    assert run_compositions.sentences(found) == (
        f"No guarantee of all 4 private runs together can be stated: {found.reason}"
    )


def test_sampled_runs_compose_with_others() -> None:
    runs = [_run(0.9, 3.0, "poisson")] * 3 + [_run(2.0, 2.0)] * 2
    found = run_compositions.composition(runs)
    sampled = accounting.amplified_event(0.9, **_SIZES)
    events = [sampled] * 3 + [accounting.event(2.0)] * 2
    assert found.epsilon == pytest.approx(accounting.composed_epsilon(events, 1e-4), rel=1e-3)
    unamplified = 1.0 / math.sqrt(3 * 6 / 0.9**2 + 2 / 2.0**2)
    assert found.epsilon is not None
    assert found.epsilon < 0.9 * gaussian.exact_epsilon(unamplified, 1e-4)


@pytest.mark.parametrize("sampling", ["fixed_size", "shuffling"])
def test_other_samplers_enter_without_amplification(sampling: str) -> None:
    scheme = sampling_schemes.create(sampling, **_SIZES)
    found = run_compositions.composition([_run(1.9, 3.0, sampling)] * 2)
    # A client is in at most so many rounds, whose rows no other of its rounds changes.
    passes = 6 if sampling == "fixed_size" else scheme.num_passes  # type: ignore[union-attr]
    one = 1.9 / math.sqrt(2 * passes)
    exact = gaussian.exact_epsilon(one, 1e-4)
    assert found.epsilon == pytest.approx(exact, rel=1e-3)


def test_what_is_said_of_one_run_and_of_none() -> None:
    one = run_compositions.composition([_run(1.0, accounting.epsilon(1.0, 1e-4))])
    assert one.epsilon == accounting.epsilon(1.0, 1e-4)
    assert run_compositions.sentences(one).startswith("The one private run: (")
    none = run_compositions.composition([_run(None, None)])
    assert none.epsilon is None
    assert run_compositions.sentences(none) == "No run is private."
