"""Epsilon and noise of min-separation sampling and of balls in bins."""

import dataclasses
import itertools
import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest
from scipy import special

from mf_aggregators import accounting, atomic_files
from mf_aggregators.atomic_files import CacheWarning
from mf_aggregators.kernel import certificate as certificates
from mf_aggregators.kernel import draws, sensitivity
from mf_aggregators.kernel.certificate import _BallsInBinsRounds
from mf_aggregators.kernel.losses import SampledRun, StrategyColumns
from mf_aggregators.participation import (
    BallsInBins,
    MinSeparationSampling,
    SamplingScheme,
    _columns_of_matrix,
    certificate_search,
    sampling_scheme,
)
from mf_aggregators.participation.certificate_search import (
    Amplified,
    Certification,
)
from tests.mf_aggregators import brute_force, participation_patterns
from tests.mf_aggregators.participation_patterns import dominating_pair
from tests.refusals import refuses

_QUICK = Certification(max_samples=2**13)
_DELTA = 1e-3
_SCHEMES: list[MinSeparationSampling | BallsInBins] = [
    MinSeparationSampling(12, 3, 200, 10, 3),
    MinSeparationSampling(12, 3, 200, 10, 5),
    BallsInBins(12, 3, 200, 10, 20),
]
_MATRIX = np.eye(12) + 0.5 * np.eye(12, k=-1) + 0.3 * np.eye(12, k=-2)


def _columns(factor: float = 1.0) -> StrategyColumns:
    return StrategyColumns(factor * _columns_of_matrix(_MATRIX, 3))


@pytest.mark.parametrize(
    "scheme", [_SCHEMES[1], *(pytest.param(_SCHEMES[i], marks=pytest.mark.long) for i in (0, 2))]
)
def test_epsilons_are_certified(scheme: MinSeparationSampling | BallsInBins) -> None:
    found = scheme.amplified(1.2, _DELTA, _columns(), _QUICK)
    without = accounting.epsilon(1.2 / math.sqrt(scheme.most_participations()), _DELTA)
    assert found.epsilon < 0.8 * without
    assert found.certificate is not None
    assert found.certificate.epsilon == found.epsilon
    # Delta pays for how noise is drawn, before anything is claimed.
    left = sensitivity.delta_left(_DELTA, 1.2, sensitivity.DEFAULT_NUM_COORDINATES)
    assert found.certificate.delta == left < _DELTA
    pair = certificates.dominating_pair(scheme.run(1.2, _columns()))
    assert certificates.is_proved(pair, found.certificate)
    # A scaling of C changes nothing, and neither do signs.
    for factor in (2.0, -0.25):
        again = scheme.amplified(1.2, _DELTA, _columns(factor), _QUICK)
        assert again == found


@pytest.mark.parametrize("scheme", _SCHEMES[:1])
def test_calibration_meets_its_target(scheme: MinSeparationSampling | BallsInBins) -> None:
    sigma = scheme.calibrated(2.0, _DELTA, _columns(), _QUICK)
    stated = scheme.amplified(sigma, _DELTA, _columns(), _QUICK).epsilon
    assert 1.85 <= stated <= 2.0
    run = scheme.run(1.0, _columns())
    rough = _QUICK.estimated(run, 2.0, _DELTA, is_rough=True)
    assert rough == pytest.approx(sigma, rel=0.05)


def test_all_attempts_of_a_search_share_what_delta_pays_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many noise multipliers are tried, whose epsilons are all above the target."""
    tried = []

    def never(run: SampledRun, *unused: Any) -> Amplified:
        tried.append(run.sigma)
        return Amplified(1e3, None)

    monkeypatch.setattr(certificate_search, "_amplified", never)
    monkeypatch.setattr(certificate_search.Certification, "estimated", lambda *unused: 0.2)
    monkeypatch.setattr(certificate_search, "_RELATIVE_STEP", 1e-12)
    _SCHEMES[0].calibrated(2.0, _DELTA, _columns(), _QUICK)
    assert len(tried) == len(set(tried)) > 1
    attempts = len(tried) * certificates.ATTEMPTS
    assert attempts * certificates.shares_of(_DELTA)[1] <= 0.01 * _DELTA * (1.0 + 1e-12)


def test_the_law_is_that_of_the_scheme() -> None:
    """The rate of participation is B / m, and p is not that rate."""
    scheme = MinSeparationSampling(12, 3, 200, 10, 5)
    distribution = certificates.dominating_pair(scheme.run(1.0, _columns())).rounds
    assert isinstance(distribution, certificates._MinSeparationRounds)
    assert distribution.probability == pytest.approx(10 / (200 - 10 * 4))
    assert distribution.probability > 1.2 * 10 / 200
    np.testing.assert_allclose(
        distribution.first_free_probabilities(),
        np.array([1.0] + [distribution.probability] * 4) / (1.0 + 4 * distribution.probability),
    )
    bins = certificates.dominating_pair(BallsInBins(12, 3, 200, 10, 20).run(1.0, _columns())).rounds
    assert bins == certificates._BallsInBinsRounds(20)


def test_what_rounding_adds_to_a_row_is_within_the_mechanism() -> None:
    """In each row within b of a participation, whatever the participations are.

    There, roundings move a row of d numbers by four steps of Z each at most.
    """
    scheme, sigma, num_parameters = _SCHEMES[0], 1.2, 4_000_000
    plain = _columns().scaled()
    n, b = plain.shape
    pair = certificates.dominating_pair(scheme.run(sigma, _columns()), num_parameters * n)
    added = sigma * 4.0 * math.sqrt(num_parameters) / draws.STANDARD_DEVIATION
    before, after = np.zeros((n, n)), np.zeros((n, n))
    for i in range(n):
        height = min(b, n - i)
        before[i : i + height, i] = plain[i, :height]
        after[i : i + height, i] = pair.columns[i, :height]
    assert np.all(np.triu(after, 1) == 0.0)
    for chosen in itertools.product([0.0, 1.0], repeat=n):
        rounds = np.array(chosen)
        is_near = (np.tri(n) - np.tri(n, k=-b)) @ rounds > 0.0
        assert np.all(after @ rounds >= before @ rounds + added * is_near * (1.0 - 1e-12))


def test_what_rounding_adds_to_rows_that_are_shared_is_within_the_mechanism() -> None:
    """In each row from the first round of a bin on, with as many steps as the noise may move."""
    scheme, sigma, num_parameters, steps = BallsInBins(12, 3, 200, 100, 2), 1.2, 4_000_000, 7.0
    columns = dataclasses.replace(_columns(), rounding=steps)
    pair = certificates.dominating_pair(scheme.run(sigma, columns), 12 * num_parameters)
    added = sigma * steps * math.sqrt(num_parameters) / draws.STANDARD_DEVIATION
    assert added > 1e-6
    matrix = _MATRIX / np.max(np.linalg.norm(_MATRIX, axis=0))
    for first in range(2):
        shifts = matrix @ (np.arange(12) % 2 == first) + added * (np.arange(12) >= first)
        assert np.sum(pair.blocks[0][1] ** 2, axis=0)[first] == pytest.approx(
            shifts @ shifts, rel=1e-12
        )


def test_nearer_columns_hide_less() -> None:
    scheme = _SCHEMES[0]
    same = np.tril(np.ones((12, 12))) * (np.tri(12, k=-3) == 0)
    apart = np.eye(12)
    columns = [StrategyColumns(_columns_of_matrix(matrix, 3)) for matrix in (apart, _MATRIX, same)]
    epsilons = [scheme.amplified(1.2, _DELTA, each, _QUICK).epsilon for each in columns]
    assert epsilons == sorted(epsilons)
    assert epsilons[0] < 0.9 * epsilons[2]


@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.parametrize(
    "sampling", [pytest.param("min_separation", marks=pytest.mark.long), "balls_in_bins"]
)
def test_public_functions(sampling: str) -> None:
    sizes: dict[str, Any] = {
        "num_rounds": 12,
        "num_bands": 3,
        "population": 200,
        "clients_per_round": 40,
    }
    scheme = sampling_scheme(sampling, **sizes)
    found = scheme.epsilon(2.0, _DELTA, strategy_matrix=_MATRIX)
    assert found == scheme.amplified(2.0, _DELTA, _columns(), Certification()).epsilon
    without = accounting.epsilon(2.0 / math.sqrt(scheme.most_participations()), _DELTA)
    assert found <= without
    with refuses("strategy matrix"):
        scheme.epsilon(2.0, _DELTA)
    with refuses("3 bands"):
        scheme.epsilon(2.0, _DELTA, strategy_matrix=np.tri(12))


def test_proved_certificates_are_kept(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = _SCHEMES[0]
    kept = dataclasses.replace(_QUICK, directory=tmp_path / "certificates")
    found = scheme.amplified(1.2, _DELTA, _columns(), kept)

    def fail(*unused: Any, **also_unused: Any) -> None:
        raise AssertionError("proved again")

    with monkeypatch.context() as patch:
        patch.setattr(certificate_search, "_proved", fail)
        assert scheme.amplified(1.2, _DELTA, _columns(), kept) == found
        # This process has proved it. Another one does so once, and never believes the entry alone.
        certificates._proves.cache_clear()
        tests, is_proved = [], certificates.is_proved

        def counted(*arguments: Any, **others: Any) -> bool:
            tests.append(arguments)
            return is_proved(*arguments, **others)

        patch.setattr(certificates, "is_proved", counted)
        for _ in range(2):
            assert scheme.amplified(1.2, _DELTA, _columns(), kept) == found
        assert len(tests) == 1
        for other in (
            (scheme, 1.3, _DELTA, _columns(), kept),
            (scheme, 1.2, 2 * _DELTA, _columns(), kept),
            (_SCHEMES[1], 1.2, _DELTA, _columns(), kept),
            (scheme, 1.2, _DELTA, StrategyColumns(_columns().entries + 0.01), kept),
            (scheme, 1.2, _DELTA, StrategyColumns(_columns().entries, 5.0), kept),
            (scheme, 1.2, _DELTA, _columns(), dataclasses.replace(kept, seed=1)),
        ):
            with pytest.raises(AssertionError):
                SamplingScheme.amplified(*other)
    # Of another version of the accounting, or of NumPy, it is computed again.
    for module, name in ((certificate_search, "ACCOUNTING_VERSION"), (np, "__version__")):
        with monkeypatch.context() as patch:
            patch.setattr(certificate_search, "_proved", fail)
            patch.setattr(module, name, "another one")
            with pytest.raises(AssertionError):
                scheme.amplified(1.2, _DELTA, _columns(), kept)


def _altered(entry: pathlib.Path, certificate: Any, *, has_digest: bool) -> None:
    """Writes another certificate into an entry, with or without a checksum that fits."""
    contents = json.loads(entry.read_text())
    del contents["sha256"]
    if not has_digest:
        digest = atomic_files.digest(contents)
    contents["claim"] = certificate
    if has_digest:
        digest = atomic_files.digest(contents)
    entry.write_text(json.dumps({**contents, "sha256": digest}))


def test_a_certificate_with_a_checksum_that_fits_is_proved_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write an entry can compute its checksum."""
    scheme, directory = _SCHEMES[0], tmp_path / "certificates"
    kept = dataclasses.replace(_QUICK, directory=directory)
    found = scheme.amplified(1.2, _DELTA, _columns(), kept)
    assert found.certificate is not None
    (entry,) = directory.iterdir()
    text, certificate = entry.read_text(), found.certificate
    # Another search finds what the first one did.
    monkeypatch.setattr(certificate_search, "_proved", lambda *unused, **also_unused: certificate)
    alterations: list[dict[str, Any]] = [
        {"epsilon": 0.01},
        {"epsilon": -1.0},
        {"epsilon": 0.01, "delta": 0.5},
        {"delta": 2.0 * certificate.delta},
        # Larger, so that it would be proved; but not below what is known without a certificate.
        {"epsilon": 100.0},
        # Another seed may have been chosen by its result, and another attempt as well.
        {"epsilon": 1.2 * certificate.epsilon, "seed": 1},
        {"epsilon": 1.2 * certificate.epsilon, "attempt": certificates.ATTEMPTS},
        {"epsilon": 1.2 * certificate.epsilon, "num_samples": 2**14},
        {"num_samples": 1},
        {"epsilon": 1.2 * certificate.epsilon, "num_untilted": 2**17},
        {"order": 40},
        {"order": 0},
        {"bet": 1e9},
        {"thresholds": [-9.0, -8.0]},
        {"thresholds": [-8.0, -9.0]},
        # What is no number of a certificate.
        {"epsilon": "0.01"},
        {"epsilon": None},
        {"order": 2.5},
        {"num_samples": True},
        {"thresholds": [-9.0, float("nan")]},
    ]
    for changes in alterations:
        _altered(entry, {**certificate.to_dict(), **changes}, has_digest=True)
        with pytest.warns(CacheWarning):
            again = scheme.amplified(1.2, _DELTA, _columns(), kept)
        assert again == found
        assert entry.read_text() == text


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (None, "needs the strategy matrix"),
        (StrategyColumns(np.ones((11, 3))), "a C of 11 and 3"),
        (StrategyColumns(np.ones((12, 4))), "a C of 12 and 4"),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns: StrategyColumns | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _SCHEMES[0].amplified(1.2, _DELTA, columns, _QUICK)


# Certified epsilons of balls in bins against enumeration, integration and attacks.


# Where normal numbers are integrated over, with what exponentials make of them; and more coarsely.
_FINE, _COARSE = np.linspace(-9.0, 15.0, 241), np.linspace(-7.0, 11.0, 73)
_KINDS = ("positive", "signs", "alternating", "decaying")


def _matrix(kind: str, num_rounds: int) -> np.ndarray:
    """A lower-triangular matrix whose largest column has norm one."""
    rng = np.random.default_rng(num_rounds)
    lags = np.subtract.outer(np.arange(num_rounds), np.arange(num_rounds))
    matrix = {
        "positive": rng.uniform(0.05, 1.0, lags.shape),
        "signs": rng.uniform(-1.0, 1.0, lags.shape),
        "alternating": np.where(lags % 2, -0.6, 0.5),
        "decaying": 0.7 ** np.abs(lags),
    }[kind]
    matrix[np.diag_indices(num_rounds)] = 1.0
    matrix = np.tril(matrix)
    return np.asarray(matrix / np.sqrt(np.max(np.sum(matrix**2, axis=0))))


def _chosen(num_rounds: int, num_bins: int) -> np.ndarray:
    return np.equal.outer(np.arange(num_rounds) % num_bins, np.arange(num_bins)).astype(float)


def _above(weights: np.ndarray, gram: np.ndarray, level: float) -> np.ndarray:
    """E max(0, w_1 e_1 + w_2 e_2 - level), for e of normal numbers of covariances ``gram``.

    Args:
      weights: (..., 2), not negative.
      gram: (..., 2, 2), of both exponents, with the same axes before.
      level: Above 0.
    """
    nodes, masses = _FINE, _masses(_FINE)
    long = np.sqrt(gram[..., 0, 0])
    across = gram[..., 0, 1] / np.where(long > 0.0, long, 1.0)
    rest = np.sqrt(np.maximum(gram[..., 1, 1] - across**2, 0.0))[..., None]
    long, across = long[..., None], across[..., None]
    left = level - weights[..., :1] * np.exp(long * nodes - long**2 / 2)
    mean = weights[..., 1:] * np.exp(across * nodes - across**2 / 2)
    mean, left = np.broadcast_arrays(mean, left)
    # The mean of max(0, m e^(r z - r^2 / 2) - left), as the price of an option.
    spread = np.maximum(np.broadcast_to(rest, mean.shape), 1e-9)
    with np.errstate(divide="ignore", invalid="ignore"):
        first = np.log(mean / left) / spread + spread / 2
        option = mean * special.ndtr(first) - left * special.ndtr(first - spread)
    option = np.where(left <= 0.0, mean - left, np.where(mean > 0.0, option, 0.0))
    return np.asarray(option @ masses)


def _masses(nodes: np.ndarray) -> np.ndarray:
    density = np.exp(-(nodes**2) / 2) / math.sqrt(2.0 * math.pi)
    return np.asarray(density * (nodes[1] - nodes[0]))


def _both(gram: np.ndarray, epsilon: float) -> np.ndarray:
    """Both hockey-stick divergences of two bins at most, by covariances of their exponents."""
    half = np.full((*gram.shape[:-2], 2), 0.5)
    forward = _above(half, gram, math.exp(epsilon))
    # max(0, k - x) is max(0, x - k) + k - x, and the mean of P/Q is one.
    low = math.exp(-epsilon)
    backward = math.exp(epsilon) * (_above(half, gram, low) + low - 1.0)
    return np.stack([forward, backward])


def _certified(matrix: np.ndarray, num_bins: int, sigma: float) -> float:
    pair = dominating_pair(_BallsInBinsRounds(num_bins), np.abs(matrix), sigma)
    found = certificate_search._proved(
        pair, _DELTA, certificate_search.Certification(max_samples=2**15)
    )
    assert found is not None
    return found.epsilon


def test_integrals_are_those_of_one_and_two_normal_numbers() -> None:
    """Against the closed form of one Gaussian mechanism, and the sum over a grid of two numbers."""
    gram = np.full((2, 2), 0.8)
    mu, epsilon = math.sqrt(0.8), 0.7
    expected = special.ndtr(mu / 2 - epsilon / mu)
    expected -= math.exp(epsilon) * special.ndtr(-mu / 2 - epsilon / mu)
    np.testing.assert_allclose(_both(gram, epsilon), expected, rtol=1e-3)
    means = np.array([[1.1, 0.0], [0.3, 0.9]])
    axis = np.linspace(-9.0, 10.0, 1201)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"))
    q = np.exp(-np.sum(grid**2, axis=0) / 2) / (2 * math.pi) * (axis[1] - axis[0]) ** 2
    exponents = np.tensordot(means, grid, axes=1) - np.sum(means**2, axis=1)[:, None, None] / 2
    p = q * np.mean(np.exp(exponents), axis=0)
    found = [brute_force.hockey_stick(*pair, 0.4) for pair in ((p, q), (q, p))]
    np.testing.assert_allclose(_both(means @ means.T, 0.4), found, rtol=2e-3)


_SHORT = [("positive", 3), ("signs", 5), ("decaying", 8)]
_ALL = [(kind, n) for kind in _KINDS for n in range(2, 9) if (kind, n) not in _SHORT]


@pytest.mark.long_cases(5)
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("kind", "num_rounds"),
    [*_SHORT, *(pytest.param(*each, marks=pytest.mark.long) for each in _ALL)],
)
def test_no_server_gets_beyond_what_two_bins_are_certified_for(kind: str, num_rounds: int) -> None:
    """All updates of -1, 0 and 1, and servers that choose one of them by what was released.

    The best of them has nearly the delta that is certified where entries are of one sign.
    """
    matrix, chosen = _matrix(kind, num_rounds), _chosen(num_rounds, 2)
    sigma = 0.6 * math.sqrt(num_rounds)
    epsilon = _certified(matrix, 2, sigma)
    vectors = np.abs(matrix) @ chosen / sigma
    pair = float(np.max(_both(vectors.T @ vectors, epsilon)))
    assert 0.6 * _DELTA <= pair <= _DELTA

    updates = np.array(list(itertools.product([-1.0, 0.0, 1.0], repeat=num_rounds - 1)))
    updates = np.concatenate([np.ones((len(updates), 1)), updates], axis=1)
    means = np.einsum("ij,uj,jb->uib", matrix, updates, chosen) / sigma
    grams = np.einsum("uib,uic->ubc", means, means)
    attacks = np.max(_both(grams, epsilon), axis=0)
    assert np.max(attacks) <= pair * (1.0 + 1e-6) + 1e-9
    if np.all(matrix >= 0.0):
        # A tenth less than what is certified is false.
        assert np.max(_both(grams[np.argmax(attacks)], 0.9 * epsilon)) > _DELTA

    # In two dimensions, of all updates along both axes.
    if num_rounds <= 5:
        choices = np.array([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
        picked = np.array(list(itertools.product(range(4), repeat=num_rounds)))
        planar = np.einsum("ij,ujd,jb->uibd", matrix, choices[picked], chosen) / sigma
        found = _both(np.einsum("uibd,uicd->ubc", planar, planar), epsilon)
        assert np.max(attacks) <= np.max(found) * (1.0 + 1e-9) <= pair * (1.0 + 1e-6)

    # One update is chosen for each output of the rounds before, those after it are as before.
    best = updates[np.argmax(attacks)]
    for turn in sorted({1, num_rounds // 2, num_rounds - 1}):
        adaptive = _adaptive(matrix, best, turn, sigma, epsilon)
        assert np.max(attacks) * (1.0 - 1e-2) <= adaptive <= pair * (1.0 + 1e-2)


def _adaptive(
    matrix: np.ndarray, updates: np.ndarray, turn: int, sigma: float, epsilon: float
) -> float:
    """The larger divergence if the update of one round is the worst one for what came before."""
    chosen = _chosen(len(matrix), 2)
    before: Any = np.linalg.qr(matrix[:turn] @ (updates[:, None] * chosen) / sigma, mode="r")
    axes = np.meshgrid(*[_COARSE] * len(before), indexing="ij")
    grid = np.stack(axes).reshape(len(before), -1)
    masses = np.prod(_masses(_COARSE)[np.searchsorted(_COARSE, grid)], axis=0)
    exponents = before.T @ grid - 0.5 * np.sum(before**2, axis=0)[:, None]
    weights = 0.5 * np.exp(exponents.T)
    best = np.zeros((2, len(weights)))
    for choice in (-1.0, 0.0, 1.0):
        changed = updates.copy()
        changed[turn] = choice
        later = matrix[turn:] @ (changed[:, None] * chosen) / sigma
        gram = np.broadcast_to(later.T @ later, (len(weights), 2, 2))
        low = math.exp(-epsilon)
        forward = _above(weights, gram, math.exp(epsilon))
        below = _above(weights, gram, low) + low - np.sum(weights, axis=1)
        best = np.maximum(best, [forward, math.exp(epsilon) * below])
    return float(np.max(best @ masses))


def _sampled(
    distribution: _BallsInBinsRounds, matrix: np.ndarray, sigma: float, epsilon: float, count: int
) -> tuple[float, float]:
    """The divergence of P from Q and its standard error, by a mixture of P and larger means."""
    rng, pattern = np.random.default_rng(7), participation_patterns.of(distribution, matrix, sigma)
    means, squares = pattern.means, np.sum(pattern.means**2, axis=1)[:, None]
    scales = rng.choice([1.0, 1.6], size=count)
    which = rng.integers(len(means), size=count)
    outputs = scales * means[which].T + rng.normal(0.0, sigma, (means.shape[1], count))
    products = means @ outputs
    p, far = (
        np.mean(np.exp((scale * products - scale**2 * squares / 2) / sigma**2), axis=0)
        for scale in (1.0, 1.6)
    )
    terms = np.maximum(p - math.exp(epsilon), 0.0) / (0.5 * (p + far))
    return float(np.mean(terms)), float(np.std(terms)) / math.sqrt(count)


_SHORT_BINS = [("signs", 5, 1), ("positive", 5, 3), ("alternating", 8, 8)]
_ALL_BINS = [
    (kind, n, bins)
    for kind in _KINDS
    for n in range(2, 9)
    for bins in range(1, n + 2)
    if (kind, n, bins) not in _SHORT_BINS
]


@pytest.mark.long_cases(15)
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("kind", "num_rounds", "num_bins"),
    [
        *_SHORT_BINS,
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [*_ALL_BINS, ("decaying", 40, 6), ("signs", 60, 16)]
        ),
    ],
)
def test_what_is_certified_holds_for_any_number_of_bins(
    kind: str, num_rounds: int, num_bins: int
) -> None:
    """And hardly more does; five standard errors are exceeded once in three million tests."""
    matrix = np.abs(_matrix(kind, num_rounds))
    sigma = 0.8 * math.sqrt(num_rounds / num_bins) + 0.4
    epsilon = _certified(matrix, num_bins, sigma)
    found, error = _sampled(_BallsInBinsRounds(num_bins), matrix, sigma, epsilon, 2**17)
    assert error < 0.1 * _DELTA
    assert found - 5.0 * error <= _DELTA
    # The larger of both divergences is nearly what is certified, in bins that are few the other.
    less, _ = _sampled(_BallsInBinsRounds(num_bins), matrix, sigma, 0.8 * epsilon, 2**17)
    assert less > 1.2 * _DELTA
