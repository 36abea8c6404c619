"""Learning rates of every round, and the optimizer that applies them."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import mf_aggregators as mfa
from simulations.examples import digits
from simulations.runs import planned_runs
from simulations.training import learning_rate_schedules
from simulations.training.learning_rate_schedules import Schedule
from tests.refusals import refuses
from tests.simulations.parsed_flags import config_of

_BANDMF_ROUNDS = 2052
_DENISOV_ROUNDS = 2048


def _rates(name: str, num_rounds: int) -> np.ndarray:
    return learning_rate_schedules.SCHEDULES[name].rates(num_rounds, 1.0)


def test_warm_up_reaches_the_full_rate_in_round_309_of_bandmf() -> None:
    rates = _rates("warmup_cooldown", _BANDMF_ROUNDS)
    assert rates[0] == pytest.approx(0.05, rel=1e-12)
    np.testing.assert_allclose(rates[:309], np.linspace(0.05, 1.0, 309), rtol=1e-12)
    assert rates[307] < 1.0
    assert rates[308] == 1.0


@pytest.mark.parametrize(
    ("name", "num_rounds", "reduced"),
    [("warmup_cooldown", _BANDMF_ROUNDS, 513), ("cooldown", _DENISOV_ROUNDS, 512)],
)
def test_the_cool_down_is_linear_over_the_papers_last_rounds(
    name: str, num_rounds: int, reduced: int
) -> None:
    rates = _rates(name, num_rounds)
    assert rates[-reduced - 1] == 1.0
    assert rates[-reduced] < 1.0
    assert rates[-1] == pytest.approx(0.05, rel=1e-12)
    np.testing.assert_allclose(
        rates[-reduced - 1 :], np.linspace(1.0, 0.05, reduced + 1), rtol=1e-12
    )
    if name == "cooldown":
        assert np.all(rates[:-reduced] == 1.0)
    else:
        assert np.all(rates[308:-reduced] == 1.0)


def test_decay_drops_to_15_percent_for_the_last_512_of_2048_rounds() -> None:
    rates = _rates("decay", _DENISOV_ROUNDS)
    np.testing.assert_array_equal(rates[:-512], np.ones(1536))
    np.testing.assert_array_equal(rates[-512:], np.full(512, 0.15))


@pytest.mark.parametrize(
    "fields",
    [
        {"warmup_share": -0.1},
        {"cooldown_share": 1.5},
        {"warmup_share": 0.6, "cooldown_share": 0.5},
        {"cooldown": "cosine"},
        {"warmup_factor": 0.0},
        {"cooldown_factor": 2.0},
    ],
)
def test_bad_schedules_are_refused(fields: dict[str, Any]) -> None:
    with refuses(*fields):
        Schedule(**fields)


def test_the_rate_of_a_round_is_gathered_in_a_graph_and_ends_with_the_last() -> None:
    rate = tf.function(learning_rate_schedules.rate_of_round([0.5, 0.25, 0.125]), autograph=False)
    found = [float(rate(tf.constant(i))) for i in range(5)]
    assert found == [0.5, 0.25, 0.125, 0.125, 0.125]


def _models_of_tff(gradients: np.ndarray, momentum: float, rates: np.ndarray) -> np.ndarray:
    """The model after every round of TFF's momentum SGD, started at zero."""
    optimizer = tff.learning.optimizers.schedule_learning_rate(
        # The rate that is given here must not matter.
        tff.learning.optimizers.build_sgdm(123.0, momentum),
        learning_rate_schedules.rate_of_round(rates),
    )
    weights = tf.zeros(gradients.shape[1:], tf.float32)
    state = optimizer.initialize(tf.TensorSpec(weights.shape, tf.float32))
    models = []
    for gradient in gradients:
        state, weights = optimizer.next(state, weights, tf.constant(gradient, tf.float32))
        models.append(weights.numpy())
    return np.array(models, np.float64)


def _models_of_algorithm_2(gradients: np.ndarray, momentum: float, rates: np.ndarray) -> np.ndarray:
    """Denisov et al. Alg. 2, in NumPy."""
    model, velocity = np.zeros(gradients.shape[1:]), np.zeros(gradients.shape[1:])
    models = []
    for gradient, rate in zip(gradients, rates, strict=True):
        velocity = momentum * velocity + gradient
        model = model - rate * velocity
        models.append(model)
    return np.array(models)


@pytest.mark.parametrize("momentum", [0.0, 0.95])
@pytest.mark.parametrize("name", learning_rate_schedules.SCHEDULES)
def test_tffs_momentum_sgd_is_algorithm_2_under_every_schedule(name: str, momentum: float) -> None:
    num_rounds = 40
    gradients = np.random.default_rng(3).normal(size=(num_rounds, 3))
    rates = learning_rate_schedules.SCHEDULES[name].rates(num_rounds, 0.7)
    found = _models_of_tff(gradients, momentum, rates)
    expected = _models_of_algorithm_2(gradients, momentum, rates)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("num_bands", [1, 4, 24])
def test_noisy_training_is_the_momentum_workload(num_bands: int) -> None:
    # What the optimizer makes of noisy gradients G + C^-1 Z is -(M G + B Z), B = M C^-1, for
    # any C: a C that is optimised for M needs no other run.
    num_rounds, momentum = 24, 0.9
    generator = np.random.default_rng(num_bands)
    rates = learning_rate_schedules.SCHEDULES["warmup_cooldown"].rates(num_rounds, 0.7)
    workload = mfa.workloads.momentum_sgd(num_rounds, momentum, rates)
    factorization = mfa.factorizations.banded(workload, num_bands)
    gradients = generator.normal(size=(num_rounds, 3))
    z = 2.0 * generator.normal(size=(num_rounds, 3))
    found = _models_of_tff(gradients + factorization.noise_rows(z), momentum, rates)
    expected = -(workload @ gradients + factorization.decoder_matrix(workload) @ z)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("cooldown", "last"), [("linear", 0.05), ("drop", 0.15)])
def test_the_flags_of_a_run_are_the_schedules_of_the_papers(cooldown: str, last: float) -> None:
    """Denisov et al. Sec. 5: linearly to 0.05, or at once to 0.15, over 512 of 2048 rounds."""
    falls = ("--server_warmup=0", "--server_cooldown=0.25", f"--cooldown={cooldown}")
    options = config_of(digits.COMMAND, "--num_rounds=2048", *falls)
    rates = planned_runs.server_rates(options, [])
    assert np.all(rates[:1536] == 2.0)
    assert np.all(rates[1536:] < 2.0)
    assert rates[-1] == pytest.approx(2.0 * last)
    if cooldown == "drop":
        assert np.all(rates[1536:] == rates[-1])
