"""What is printed of states, queries and aggregators tells no seed and no row of noise."""

import collections
import os
import pprint
import traceback
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators.tff.noise_states import NoiseState

_PARTICIPATION = mfa.participation.MinSeparation(3)
_TYPE = tff.TensorType(np.float32, [3])
_CLIP_NORMS = [1.0, mfa.AdaptiveClip(0.5)]


def _aggregator(clip_norm: float | mfa.AdaptiveClip = 1.0) -> Any:
    return mfa.mf_dp_aggregator(
        mfa.factorizations.banded(mfa.workloads.prefix_sum(6), 3),
        participation=_PARTICIPATION,
        noise_multiplier=1.0,
        clip_norm=clip_norm,
        clients_per_round=2,
        noise_storage="state",
    )


def _printed(value: Any) -> str:
    """All that Python, a notebook, a debugger and a log print of a value."""
    return "\n".join([repr(value), str(value), f"{value}", pprint.pformat(value), f"{[value]!r}"])


def _check(text: str, seed: Any, history: Any = ()) -> None:
    """No integer of the seed or of the history stands in a text."""
    integers = [*np.ravel(seed), *(each for rows in history for each in np.ravel(rows))]
    # Short ones stand in any text.
    secrets = {digits for digits in map(str, integers) if len(digits) > 6}
    assert len(secrets) >= 2
    assert not [digits for digits in secrets if digits in text]


def test_a_state_of_tff_prints_no_seed_wherever_it_is_nested() -> None:
    process = tff.aggregators.zeroing_factory(10.0, _aggregator()).create(_TYPE)
    state = process.next(process.initialize(), [np.ones(3, np.float32)]).state
    noise = state["inner_agg"].query_state.numerator_state
    assert isinstance(noise, NoiseState)
    learning = tff.learning.templates.LearningAlgorithmState(
        global_model_weights=(),
        distributor=(),
        client_work=collections.OrderedDict(rate=0.1),
        aggregator=state,
        finalizer=(),
    )
    text = _printed(learning)
    assert "round_index=1, seed=<secret>" in text
    _check(text, noise.seed, noise.history)
    for argument in (learning, (state, state), {"state": state}):
        with pytest.raises(TypeError) as raised:
            process.next(argument, [np.ones(3, np.float32)])
        _check("".join(traceback.format_exception(raised.value)), noise.seed, noise.history)
