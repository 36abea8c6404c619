"""Workloads: the lower-triangular linear maps whose outputs a training run uses.

A workload A maps the stream of per-round sums of client updates x_1, ..., x_n to
the quantities that matter for learning: row i of ``A @ x`` is the model after
round i (up to sign and learning rate).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.linalg

from mf_aggregators import validation


def prefix_sum(num_rounds: int) -> np.ndarray:
    """Returns the prefix-sum workload: plain SGD with a constant learning rate.

    Args:
      num_rounds: The number of rounds n, at least 1.

    Returns:
      An (n, n) float64 array with ones on and below the diagonal.

    Raises:
      ValueError: If ``num_rounds`` is not a positive integer.
    """
    num_rounds = validation.positive_integer(num_rounds, "num_rounds")
    return np.tri(num_rounds, dtype=np.float64)


def momentum_sgd(
    num_rounds: int,
    momentum: float = 0.9,
    learning_rates: Sequence[float] | np.ndarray | None = None,
) -> np.ndarray:
    """Returns the workload of heavy-ball momentum SGD (Denisov et al., Prop. 4.2).

    The workload is M = M_eta M_beta with M_eta[i, j] = eta_j and
    M_beta[i, j] = beta^(i - j) for i >= j, so that the i-th iterate of momentum
    SGD started at zero is the negative of row i of M applied to the gradients.

    Args:
      num_rounds: The number of rounds n, at least 1.
      momentum: The momentum beta in [0, 1). Zero, with constant learning rates of
        one, gives the prefix sum.
      learning_rates: n positive learning rates, fixed before training; None for
        all ones.

    Returns:
      An (n, n) float64 lower-triangular array.

    Raises:
      ValueError: If an argument is out of its range, or the number of learning
        rates is not n.
    """
    num_rounds = validation.positive_integer(num_rounds, "num_rounds")
    momentum = validation.finite_number(momentum, "momentum")
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum must be at least 0 and below 1, found {momentum}.")
    if learning_rates is None:
        rates = np.ones(num_rounds)
    else:
        rates = np.asarray(learning_rates, dtype=np.float64)
        if rates.shape != (num_rounds,):
            raise ValueError(
                f"learning_rates must hold one rate for each of the {num_rounds} rounds, "
                f"found an array of shape {rates.shape}."
            )
        if not np.all(np.isfinite(rates)) or np.any(rates <= 0.0):
            raise ValueError("learning_rates must be finite and above zero.")
    decay = scipy.linalg.toeplitz(momentum ** np.arange(num_rounds), np.zeros(num_rounds))
    return np.tril(np.cumsum(rates[:, np.newaxis] * decay, axis=0))


def from_description(description: Mapping[str, Any], num_rounds: int) -> np.ndarray:
    """Returns the workload that a checkpoint or a command's flags describe.

    Args:
      description: ``{"name": "prefix_sum"}``, or ``{"name": "momentum_sgd"}`` with
        ``momentum`` and ``learning_rates`` (a list or None).
      num_rounds: The number of rounds n.

    Returns:
      An (n, n) float64 lower-triangular array.

    Raises:
      ValueError: If the description names no workload, or with unknown parameters.
    """
    parameters = dict(description)
    name = parameters.pop("name", None)
    builders: dict[str, Callable[..., np.ndarray]] = {
        "prefix_sum": prefix_sum,
        "momentum_sgd": momentum_sgd,
    }
    if name not in builders:
        raise ValueError(f"a workload must be one of {', '.join(builders)}, found {name!r}.")
    try:
        return builders[name](num_rounds, **parameters)
    except TypeError as error:
        raise ValueError(f"workload {name}: {error}.") from None
