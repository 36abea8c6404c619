"""Epsilon and noise of min-separation sampling and of balls in bins."""

import dataclasses
import itertools
import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest

from mf_aggregators import accounting, atomic_files
from mf_aggregators.atomic_files import CacheWarning
from mf_aggregators.kernel import certificate as certificates
from mf_aggregators.kernel import draws, draws_of_clients, gaussian
from mf_aggregators.kernel.draws_of_clients import SampledRun, StrategyColumns
from mf_aggregators.participation import (
    BallsInBins,
    MinSeparationSampling,
    SeparatedScheme,
    certificate_search,
    sampling_scheme,
)
from mf_aggregators.participation.certificate_search import (
    Amplified,
    Certification,
    columns_of_matrix,
)
from tests.refusals import refuses

_QUICK = Certification(max_samples=2**13)
_DELTA = 1e-3
_SCHEMES: list[SeparatedScheme] = [
    MinSeparationSampling(12, 3, 200, 10, 3),
    MinSeparationSampling(12, 3, 200, 10, 5),
    BallsInBins(12, 3, 200, 10, 20),
]
_MATRIX = np.eye(12) + 0.5 * np.eye(12, k=-1) + 0.3 * np.eye(12, k=-2)


def _columns(factor: float = 1.0) -> StrategyColumns:
    return StrategyColumns(factor * columns_of_matrix(_MATRIX, 3))


@pytest.mark.parametrize(
    "scheme", [_SCHEMES[1], *(pytest.param(_SCHEMES[i], marks=pytest.mark.long) for i in (0, 2))]
)
def test_epsilons_are_certified(scheme: SeparatedScheme) -> None:
    found = scheme.amplified(1.2, _DELTA, _columns(), _QUICK)
    without = accounting.epsilon(1.2 / math.sqrt(scheme.most_participations()), _DELTA)
    assert found.epsilon < 0.8 * without
    assert found.certificate is not None
    assert found.certificate.epsilon == found.epsilon
    # Delta pays for how noise is drawn, before anything is claimed.
    left = gaussian.delta_left(_DELTA, 1.2, gaussian.DEFAULT_NUM_COORDINATES)
    assert found.certificate.delta == left < _DELTA
    pair = certificates.dominating_pair(scheme.run(1.2, _columns()))
    assert certificates.is_proved(pair, found.certificate)
    # A scaling of C changes nothing, and neither do signs.
    for factor in (2.0, -0.25):
        again = scheme.amplified(1.2, _DELTA, _columns(factor), _QUICK)
        assert again == found


@pytest.mark.parametrize("scheme", _SCHEMES[:1])
def test_calibration_meets_its_target(scheme: SeparatedScheme) -> None:
    sigma = scheme.calibrated(2.0, _DELTA, _columns(), _QUICK)
    stated = scheme.amplified(sigma, _DELTA, _columns(), _QUICK).epsilon
    assert 1.85 <= stated <= 2.0
    run = scheme.run(1.0, _columns())
    rough = certificate_search.estimated(run, 2.0, _DELTA, _QUICK, is_rough=True)
    assert rough == pytest.approx(sigma, rel=0.05)


def test_all_attempts_of_a_search_share_what_delta_pays_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many noise multipliers are tried, whose epsilons are all above the target."""
    tried = []

    def never(run: SampledRun, *unused: Any) -> Amplified:
        tried.append(run.sigma)
        return Amplified(1e3, None)

    monkeypatch.setattr(certificate_search, "amplified", never)
    monkeypatch.setattr(certificate_search, "estimated", lambda *unused: 0.2)
    monkeypatch.setattr(certificate_search, "_RELATIVE_STEP", 1e-12)
    _SCHEMES[0].calibrated(2.0, _DELTA, _columns(), _QUICK)
    assert len(tried) == len(set(tried)) > 1
    attempts = len(tried) * certificates.ATTEMPTS
    assert attempts * certificates.failure_probability(_DELTA) <= 0.01 * _DELTA * (1.0 + 1e-12)


def test_the_law_is_that_of_the_scheme() -> None:
    """The rate of participation is B / m, and p is not that rate."""
    scheme = MinSeparationSampling(12, 3, 200, 10, 5)
    distribution = certificates._rounds_of(scheme.as_draws())
    assert isinstance(distribution, certificates._MinSeparationRounds)
    assert distribution.probability == pytest.approx(10 / (200 - 10 * 4))
    assert distribution.probability > 1.2 * 10 / 200
    np.testing.assert_allclose(
        distribution.first_free_probabilities(),
        np.array([1.0] + [distribution.probability] * 4) / (1.0 + 4 * distribution.probability),
    )
    bins = certificates._rounds_of(BallsInBins(12, 3, 200, 10, 20).as_draws())
    assert bins == certificates._BallsInBinsRounds(20)


def test_what_rounding_adds_to_a_row_is_within_the_mechanism() -> None:
    """In each row within b of a participation, whatever the participations are.

    There, roundings move a row of d numbers by four steps of Z each at most.
    """
    scheme, sigma, num_parameters = _SCHEMES[0], 1.2, 4_000_000
    plain = draws_of_clients._normalised(_columns().entries)
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
        assert pair.products.squared_norms[first] == pytest.approx(shifts @ shifts, rel=1e-12)


def test_nearer_columns_hide_less() -> None:
    scheme = _SCHEMES[0]
    same = np.tril(np.ones((12, 12))) * (np.tri(12, k=-3) == 0)
    apart = np.eye(12)
    columns = [StrategyColumns(columns_of_matrix(matrix, 3)) for matrix in (apart, _MATRIX, same)]
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
        patch.setattr(certificate_search, "proved", fail)
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
                SeparatedScheme.amplified(*other)
    # Of another version of the accounting, or of NumPy, it is computed again.
    for module, name in ((certificate_search, "ACCOUNTING_VERSION"), (np, "__version__")):
        with monkeypatch.context() as patch:
            patch.setattr(certificate_search, "proved", fail)
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
    monkeypatch.setattr(certificate_search, "proved", lambda *unused, **also_unused: certificate)
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
