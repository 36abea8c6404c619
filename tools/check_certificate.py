r"""Checks an amplified guarantee again, by a Monte Carlo test of its own, with NumPy alone.

  python tools/check_certificate.py runs/digits
  python tools/check_certificate.py C.npy --bins=64 --noise_multiplier=1.2 --epsilon=8 --delta=1e-5

The first argument is a run directory, whose privacy.json has what no flag names, a checkpoint, or
a file of C. docs/privacy-proofs.md (section 3) has the pair: P = sum_S pi(S) N(v_S, sigma^2 I) and
Q = N(0, sigma^2 I), with C over its largest column norm, S the secret rounds of a client and v_S
the sum of their columns of |C|, and of r in each row that roundings of S reach. With L = log P/Q,
both divergences are means of numbers in [0, M]: Z max(0, 1 - e^(epsilon - L)) e^(-(a - 1) L) for
outputs from (P/Q)^a Q / Z, and max(0, 1 - e^(epsilon + L)) for those from Q. If a mean is delta or
more, the product of 1 + w (delta - number), each w in [0, 1 / (M - delta)) chosen before the number
is drawn, ever reaches 10^6 with probability at most 10^-6 (Ville). Exit status: 0 if both do.
"""

import argparse
import itertools
import json
import math
import pathlib
from typing import Any

import numpy as np

# Samples: of a batch, for a bet, in all. Numbers of Z: how many, standard deviation, tail (sec. 6).
BATCH, KEPT, MOST, GOAL = 2**13, 2**15, 2**27, math.log(1e6)
NUMBERS, DEVIATION, TAIL = 2.0**40, 2147484672.0, 1e-27


def strategy_matrix(path: pathlib.Path) -> tuple[Any, bool]:
    """Returns C, and whether a rounding stays what it is: rows follow from rows or from a state."""
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False), False
    path = path if (path / "arrays.npz").exists() else path / "factorization"
    about = json.loads((path / "factorization.json").read_text())
    kind, n, arrays = about["mechanism"], about["num_rounds"], dict(np.load(path / "arrays.npz"))
    if kind == "banded":
        return sum(np.diag(band[t:], -t) for t, band in enumerate(arrays["bands"].T)), True
    matrix, lower = np.zeros((n, n)), np.tril_indices(n)
    if kind == "optimal":
        matrix[lower] = arrays["lower_triangle"]
        return matrix, False
    first, column = np.eye(n)[0], arrays.get("coefficients")
    decays = zip(arrays.get("buffer_decays", ()), arrays.get("inverse_decays", ()), strict=True)
    blt: list[Any] = [([1.0, -zero], [1.0, -pole]) for pole, zero in decays]
    others = {"identity": blt, "toeplitz": [(column, [1])], "banded_inverse": [([1], column)]}
    for above, below in blt or others[kind]:  # The generating function is above over below.
        first = np.convolve(first, above)[:n]
        for t in range(n):
            past = first[max(t - len(below) + 1, 0) : t][::-1]
            first[t] = (first[t] - np.dot(below[1 : len(past) + 1], past)) / below[0]
    matrix[lower] = first[lower[0] - lower[1]]
    if about["parameters"].get("equal_column_norms"):
        matrix /= np.linalg.norm(matrix, axis=0)
    return matrix, kind in ("blt", "identity") or (kind == "toeplitz" and first[-1] == 0.0)


def bins(vectors: Any, order: int, rng: np.random.Generator) -> Any:
    """Yields log Z, and then L of outputs: in units of sigma, in the span of the v_S."""
    vectors, b = np.linalg.qr(vectors, mode="r"), vectors.shape[1]
    gram, replicas = vectors.T @ vectors, [np.arange(b**order) // b**k % b for k in range(order)]
    logs = sum((gram[pair] for pair in itertools.combinations(replicas, 2)), np.zeros(b**order))
    table = np.cumsum(np.exp(logs - np.max(logs)))
    yield float(np.max(logs)) + math.log(table[-1] / len(table))
    while True:  # (P/Q)^a Q: normals around sums of a of the v_S.
        drawn = np.searchsorted(table, rng.random(BATCH) * table[-1])
        outputs = sum((vectors[:, each[drawn]] for each in replicas), np.zeros((1, BATCH)))
        exponents = vectors.T @ (outputs + rng.standard_normal((len(vectors), BATCH)))
        yield np.logaddexp.reduce(exponents - 0.5 * np.diag(gram)[:, None]) - math.log(b)


def coins(columns: Any, b: int, p: float, order: int, rng: np.random.Generator) -> Any:
    """Yields 0, and then L: of a coin in each round that is b or more after the last one."""
    n, first = len(columns), np.append(1.0, np.full(b - 1, p)) / (1.0 + (b - 1) * p)
    yield 0.0
    while True:
        free, joins = rng.choice(b, BATCH, p=first), np.zeros((n, BATCH))
        for t in range(n * order):
            joins[t] = (free <= t) & (rng.random(BATCH) < p)
            free[joins[t] > 0.0] = t + b
        exponents = columns.T @ (columns @ joins + rng.standard_normal((n, BATCH)))
        exponents += math.log(p) - 0.5 * np.sum(columns**2, axis=0)[:, None]
        logs, stay = np.zeros((n + b, BATCH)), math.log1p(-p) if p < 1.0 else -math.inf
        for t in reversed(range(n)):  # The columns of S are b or more apart, and orthogonal.
            logs[t] = np.logaddexp(stay + logs[t + 1], exponents[t] + logs[t + b])
        yield np.logaddexp.reduce(np.log(first)[:, None] + logs[:b])


def is_shown(name: str, losses: Any, a: int, log_z: float, eps: float, delta: float) -> bool:
    """Prints whether Z max(0, 1 - e^(eps - x)) e^((1 - a) x) of losses x has a mean below delta."""
    wealth, numbers, sums, count = 0.0, np.zeros(0), np.zeros(2), 0
    largest = math.exp(log_z + (1 - a) * eps) * (a - 1) ** (a - 1) / a**a
    kept, bets = np.array([largest]), np.append(np.geomspace(1e-4, 0.5, 30), [0.7, 0.9, 0.99])
    while delta < largest and wealth < GOAL and count < MOST:
        if len(kept) < KEPT:
            kept, w = np.append(kept, numbers), bets / (largest - delta)
            grown = np.sum(np.log1p(np.outer(w, delta - kept[kept > 0.0])), axis=1)
            bet = w[np.argmax(grown + np.sum(kept == 0.0) * np.log1p(w * delta))]
        x = np.maximum(next(losses), eps)
        numbers = -np.expm1(eps - x) * np.exp(log_z + (1 - a) * x)
        wealth += float(np.sum(np.log1p(bet * (delta - numbers))))
        count, sums = count + BATCH, sums + np.array([np.sum(numbers), numbers @ numbers])
        if sums[0] - 5.0 * math.sqrt(sums[1]) > delta * count:
            break
    print(f"{name}: about {sums[0] / max(count, 1):.4g}, by {count} samples")
    return largest <= delta or wealth >= GOAL


def is_certified(path: pathlib.Path, claim: dict[str, Any]) -> bool:
    """Returns whether both divergences of a claim are shown to be below its delta."""
    if (path / "privacy.json").exists():
        plan = json.loads((path / "privacy.json").read_text())["planned"]
        name, *_, m, size, b = plan["sampling"].values()
        plan["bins" if name == "balls_in_bins" else "separation"] = b
        claim = {**plan, "probability": size / (m - size * (b - 1)), **claim}
    (c, stays), rng = strategy_matrix(path), np.random.default_rng()  # Fresh random bits.
    n, b, columns = len(c), claim.get("bins") or claim["separation"], np.abs(c)
    lags = np.subtract.outer(np.arange(n), np.arange(n))
    if np.any(np.triu(c, 1)) or ((bands := 1 + np.max(lags[c != 0.0])) > b and "bins" not in claim):
        raise ValueError(f"C must be lower triangular, with timers of at most {b} bands")
    row = 0.0 if stays else 1.5 * np.max(np.sum(columns / np.diag(columns), axis=1))
    rounding = max(4.0, row) * math.sqrt(NUMBERS / n) / DEVIATION
    columns /= np.max(np.linalg.norm(columns, axis=0)) * claim["noise_multiplier"]
    near = (lags >= 0) & (lags < (bands if bands <= b else n))
    if "bins" in claim:
        chosen = (np.arange(n)[:, None] % b == np.arange(b)).astype(float)
        vectors = columns @ chosen + rounding * (near @ chosen > 0.0)
        draws = {a: bins(vectors, a, rng) for a in range(9) if a < 2 or b**a <= 3e5}
    else:
        p, columns = claim["probability"], columns + rounding * near
        draws = {a: coins(columns, b, p, a, rng) for a in (0, 1)}
    log_z, eps, delta = [next(draws[a]) for a in draws], claim["epsilon"] - 1e-9, claim["delta"]
    a = min(range(1, len(log_z)), key=lambda a: log_z[a] - (a - 1) * eps - math.log(4.0) * (a > 1))
    forward = is_shown("P from Q", draws[a], a, log_z[a], eps, delta - NUMBERS * TAIL)
    backward = is_shown("Q from P", map(np.negative, draws[0]), 1, 0.0, eps, delta - NUMBERS * TAIL)
    print("shown" if forward and backward else "not shown", f"to be at most {delta}")
    return forward and backward


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("matrix", type=pathlib.Path)
    for name in ("noise_multiplier", "epsilon", "delta", "bins", "separation", "probability"):
        parser.add_argument(f"--{name}", type=json.loads)
    claim = {k: each for k, each in vars(parser.parse_args()).items() if each is not None}
    try:
        parser.exit(0 if is_certified(claim.pop("matrix"), claim) else 1)
    except (KeyError, OSError, TypeError, ValueError) as error:
        parser.exit(2, f"check_certificate: not a claim that is covered, {error!r}\n")
