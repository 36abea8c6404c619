r"""Checks a guarantee again with NumPy alone; an amplified one by a Monte Carlo test of its own.

  python tools/check_certificate.py runs/digits
  python tools/check_certificate.py C.npy --timers=4 --most=3 --sigma=1.7 --epsilon=8 --delta=1e-5
  python tools/check_certificate.py C.npy --bins=64 --noise_multiplier=1.2 --epsilon=8 --delta=1e-5

The first argument is a run directory, whose privacy.json has what no flag names, a checkpoint, or
a file of C. docs/privacy-proofs.md (section 3) has the pair: P = sum_S pi(S) N(v_S, I), Q = N(0, I)
in units of sigma, with C over its largest column norm, S the secret rounds of a client and v_S, of
mean v, the sum of their columns of |C|, and of r in each row that roundings of S reach. Both
divergences are means of numbers in [0, M]: with L = log P/Q, Z max(0, 1 - e^(epsilon - L)) e^(-k L)
for x from (P/Q)^(k+1) Q / Z, and max(0, 1 - e^(epsilon + L)) e^(c <v, x> + c^2 |v|^2 / 2) from
N(-c v, I), as L >= <v, x> - mean |v_S|^2 / 2 (Jensen). If a mean is delta or more, the mean over w
in [0, 1 / (M - delta)) of products of 1 + w (delta - number) ever reaches 10^6 in 10^-6 of cases.
"""

import argparse
import itertools
import json
import math
import pathlib
from collections.abc import Callable

import numpy as np

# Samples of a batch and in all. Integers for Z (section 6): number, deviation, tail, largest shift.
BATCH, MOST, GOAL = 2**13, 2**27, math.log(1e6)
Sampler = Callable[[], np.ndarray]
Loss = Callable[[np.ndarray], np.ndarray]
Pair = tuple[np.ndarray, float, Loss, float, np.random.Generator]
NUMBERS, DEVIATION, TAIL, LARGEST_SHIFT = 2.0**40, 2147484672.0, 9.09086972e-28, 5.0


def strategy_matrix(path: pathlib.Path) -> tuple[np.ndarray, bool]:
    """Reads the strategy matrix C, and whether noise rows follow from rounded rows or a state."""
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False), False
    path = path if (path / "arrays.npz").exists() else path / "factorization"
    about = json.loads((path / "factorization.json").read_text())
    kind, n, arrays = about["mechanism"], about["num_rounds"], dict(np.load(path / "arrays.npz"))
    if kind == "banded":
        diagonals = [np.diag(band[t:], -t) for t, band in enumerate(arrays["bands"].T)]
        return np.sum(diagonals, axis=0), True
    matrix, lower = np.zeros((n, n)), np.tril_indices(n)
    if kind == "optimal":
        matrix[lower] = arrays["lower_triangle"]
        return matrix, False
    first, one, column = np.eye(n)[0], np.ones(1), arrays.get("coefficients", np.ones(1))
    decays = zip(arrays.get("buffer_decays", ()), arrays.get("inverse_decays", ()), strict=True)
    blt = [(np.array([1.0, -zero]), np.array([1.0, -pole])) for pole, zero in decays]
    others = {"identity": blt, "toeplitz": [(column, one)], "banded_inverse": [(one, column)]}
    for above, below in blt or others[kind]:  # Generating functions of C's columns: above / below.
        first = np.convolve(first, above)[:n]
        for t in range(n):
            past = first[max(t - len(below) + 1, 0) : t][::-1]
            first[t] = (first[t] - np.dot(below[1 : len(past) + 1], past)) / below[0]
    matrix[lower] = first[lower[0] - lower[1]]
    if about["parameters"].get("equal_column_norms"):
        matrix /= np.linalg.norm(matrix, axis=0)
    return matrix, kind in ("blt", "identity") or (kind == "toeplitz" and first[-1] == 0.0)


def bins(vectors: np.ndarray, order: int, rng: np.random.Generator) -> tuple[float, Sampler]:
    """Returns log Z, and a sampler of sums of ``order`` vectors v_S, in units of sigma."""
    gram, b = vectors.T @ vectors, vectors.shape[1]
    tuples = np.arange(b**order) // b ** np.arange(order)[:, None] % b
    logs = sum((gram[pair] for pair in itertools.combinations(tuples, 2)), np.zeros(b**order))
    log_z = float(np.logaddexp.reduce(logs)) - order * math.log(b)
    p = np.exp(logs - log_z) / b**order
    return log_z, lambda: np.sum(vectors[:, rng.choice(tuples, BATCH, axis=1, p=p)], axis=1)


def coins(columns: np.ndarray, b: int, p: float, rng: np.random.Generator) -> tuple[Sampler, Loss]:
    """Returns a sampler of v_S for a coin in each round b or more after the last, and L."""
    n, stay = len(columns), math.log1p(-p) if p < 1.0 else -math.inf
    first = np.append(1.0, np.full(b - 1, p)) / (1.0 + (b - 1) * p)

    def sums() -> np.ndarray:
        free, joins = rng.choice(b, BATCH, p=first), np.zeros((n, BATCH))
        for t in range(n):
            joins[t] = (free <= t) & (rng.random(BATCH) < p)
            free[joins[t] > 0.0] = t + b
        return columns @ joins

    def loss(exponents: np.ndarray) -> np.ndarray:
        logs = np.zeros((n + b, BATCH))
        for t in reversed(range(n)):  # Columns of rounds b or more apart are orthogonal.
            logs[t] = np.logaddexp(stay + logs[t + 1], math.log(p) + exponents[t] + logs[t + b])
        return np.logaddexp.reduce(np.log(first)[:, None] + logs[:b])

    return sums, loss


def is_shown(delta: float, a: int, log_z: float, sums: Sampler, pair: Pair) -> bool:
    """Tests whether a divergence (the second if a = 0) is below delta, and prints the result."""
    (vectors, rate, loss, eps, rng), count, total = pair, 0, np.zeros(2)
    half, v, k = 0.5 * np.sum(vectors**2, axis=0), rate * np.sum(vectors, axis=1), max(a - 1, 0)
    most = rate * np.sum(half) - eps  # A bound on <v, x> if L <= -epsilon.
    c = 0.0 if a else max(0.0, -most / (v @ v))
    known = log_z + 0.5 * c**2 * (v @ v)
    m = math.exp(known + c * most - k * eps) * k**k / (k + 1) ** (k + 1)
    bets, grown, wealth = np.geomspace(1e-4, 0.99, 33), np.zeros(33), 0.0 if m > delta else GOAL
    while wealth < GOAL and total[0] - 5.0 * math.sqrt(total[1]) <= delta * count < delta * MOST:
        outputs = rng.standard_normal((len(v), BATCH)) + (sums() if a else -c * v[:, None])
        x = loss(vectors.T @ outputs - half[:, None])
        logs = known - k * np.maximum(x, eps) + c * np.minimum(v @ outputs, most)
        numbers = -np.expm1(np.minimum(eps - (x if a else -x), 0.0)) * np.exp(logs)
        grown += np.sum(np.log1p(np.outer(bets / (m - delta), delta - numbers)), axis=1)
        wealth = np.logaddexp.reduce(grown) - math.log(len(grown))
        count, total = count + BATCH, total + np.array([np.sum(numbers), numbers @ numbers])
    print("P from Q:" if a else "Q from P:", f"{total[0] / max(count, 1):.4g}, {count} samples")
    return bool(wealth >= GOAL)


def largest_norm(c: np.ndarray, b: int, k: int) -> float:
    """Returns an upper bound on norms of sums of k columns b rounds apart, of any signs."""
    n, first = len(c), c[:, 0]
    alike = all(np.array_equal(c[t:, t], first[: n - t]) for t in range(n))
    if alike and first[-1] >= 0.0 and np.all(np.diff(first) <= 0.0):  # Kalinin, Lampert, Thm 2.
        return float(np.linalg.norm(np.sum(c[:, : b * k : b], axis=1)))

    def best(weights: np.ndarray) -> np.ndarray:
        top = np.zeros((k + 1, n + b, len(weights)))
        for t in reversed(range(n)):
            top[1:, t] = np.maximum(top[1:, t + 1], weights[:, t] + top[:-1, t + b])
        return top[-1, 0]

    return math.sqrt(best(best(np.abs(c.T @ c))[None])[0])


def is_gaussian(c: np.ndarray, claim: dict) -> bool:
    """Returns whether timers and noise give the epsilon of a claim (section 1)."""
    eps, delta, n = float(claim["epsilon"]), float(claim["delta"]) - NUMBERS * TAIL, len(c)
    b, k = claim["timers"], n if claim.get("most") is None else claim["most"]
    if np.any(np.triu(c, 1)) or not np.all(np.diag(c)) or min(b, k) < 1:
        raise ValueError("C must be lower triangular and invertible, and timers at least 1")
    norm = largest_norm(c, min(b, n), min(k, -(-n // b)))
    size = min(norm, float(claim.get("sensitivity", norm)))  # Statements round sensitivities up.
    shift = norm / (claim.get("sigma") or claim["noise_multiplier"] * size)
    above, below = (math.erfc((eps / shift + sign * shift / 2) / 2**0.5) / 2 for sign in (-1, 1))
    print(f"sensitivity over sigma at most {shift:.9g}: delta {above - math.exp(eps) * below:.6g}")
    return 0.0 < shift <= LARGEST_SHIFT and above - math.exp(eps) * below <= delta


def is_certified(path: pathlib.Path, claim: dict) -> bool:
    """Returns whether both divergences of a claim are shown to be below its delta."""
    if (path / "privacy.json").exists():
        stated = json.loads((path / "privacy.json").read_text())
        plan, exact = stated["planned"], float(stated["noise"]["noise_multipliers"][-1])
        if plan["sampling"] is None:
            schema = plan["schema"]
            most = 1 if schema["schema"] == "single" else schema.get("max_participations")
            plan |= {"timers": schema.get("separation", 1), "most": most or schema.get("epochs")}
        else:
            name, *_, m, size, b = plan["sampling"].values()
            plan["bins" if name == "balls_in_bins" else "separation"] = b
            plan["probability"] = size / (m - size * (b - 1))
        claim = {**plan, "noise_multiplier": exact, **claim}
    if "timers" in claim:
        return is_gaussian(strategy_matrix(path)[0], claim)
    (c, stays), rng = strategy_matrix(path), np.random.default_rng()  # Fresh random bits.
    n, b, columns = len(c), claim.get("bins") or claim["separation"], np.abs(c)
    lags = np.subtract.outer(np.arange(n), np.arange(n))
    if np.any(np.triu(c, 1)) or ((bands := 1 + np.max(lags[c != 0.0])) > b and "bins" not in claim):
        raise ValueError(f"C must be lower triangular, with timers of at most {b} bands")
    row = 0.0 if stays else 1.5 * np.max(np.sum(columns / np.diag(columns), axis=1))
    rounding = max(4.0, row) * math.sqrt(NUMBERS / n) / DEVIATION
    columns /= np.max(np.linalg.norm(columns, axis=0)) * float(claim["noise_multiplier"])
    near = (lags >= 0) & (lags < (bands if bands <= b else n))
    eps, delta = float(claim["epsilon"]) - 1e-9, float(claim["delta"]) - NUMBERS * TAIL
    if "bins" in claim:
        chosen = np.resize(np.eye(b), (n, b))
        columns = np.linalg.qr(columns @ chosen + rounding * (near @ chosen > 0.0), mode="r")
        draws = {a: bins(columns, a, rng) for a in range(1, 9) if a < 2 or b**a <= 3e5}
        rate, loss = 1.0 / b, lambda each: np.logaddexp.reduce(each) - math.log(b)
    else:
        columns, p = columns + rounding * near, claim["probability"]
        sums, loss = coins(columns, b, p, rng)
        draws, rate = {1: (0.0, sums)}, p / (1.0 + (b - 1) * p)
    a = min(draws, key=lambda a: draws[a][0] - (a - 1) * eps - math.log(4.0) * (a > 1))
    pair = columns, rate, loss, eps, rng
    shown = [is_shown(delta, *each, pair) for each in ((a, *draws[a]), (0, 0.0, draws[a][1]))]
    print("shown" if all(shown) else "not shown", f"to be at most {claim['delta']}")
    return all(shown)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("matrix", type=pathlib.Path)
    names = "noise_multiplier epsilon delta bins separation probability timers most sigma"
    for name in names.split():
        parser.add_argument(f"--{name}", type=json.loads)
    claim = {k: each for k, each in vars(parser.parse_args()).items() if each is not None}
    try:
        parser.exit(0 if is_certified(claim.pop("matrix"), claim) else 1)
    except (ArithmeticError, AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        parser.exit(2, f"check_certificate: the claim is not covered: {error!r}\n")
