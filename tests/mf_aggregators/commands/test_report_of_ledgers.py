"""mf-report --ledger: the guarantee of what was observed."""

import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest

import mf_aggregators as mfa
from mf_aggregators import accounting, checkpoints, printed_guarantees, random_streams, workloads
from mf_aggregators.commands import command_line, report
from mf_aggregators.factorizations import banded
from mf_aggregators.participation import (
    BallsInBins,
    FixedEpochOrder,
    FixedSizeSampling,
    MinSeparation,
    MinSeparationSampling,
    PoissonSampling,
    SamplingScheme,
    Shuffling,
    sampling_scheme,
)
from mf_aggregators.printed_guarantees import rounded_up
from mf_aggregators.privacy import guarantees
from simulations.runs.round_records import ParticipationLedger

_PLANNED = ("--separation=4", "--max_participations=3", "--noise_multiplier=0.9", "--delta=1e-5")

# What clients' names begin with, where nothing that is printed may hold it.
_NAMED = "zebra-"


@pytest.fixture
def checkpoint(tmp_path: pathlib.Path) -> pathlib.Path:
    factorization = banded(workloads.prefix_sum(12), 4)
    checkpoints.save(factorization, tmp_path / "banded", participation=MinSeparation(4, 3))
    return tmp_path / "banded"


def _call(
    capsys: pytest.CaptureFixture[str], checkpoint: pathlib.Path, *arguments: str
) -> tuple[int, str, str]:
    status = command_line.run(
        report.__doc__ or "",
        report.define_flags,
        report.main,
        ["mf-report", f"--checkpoint={checkpoint}", *_PLANNED, *arguments],
    )
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def _ledger(tmp_path: pathlib.Path, lines: str) -> str:
    file = tmp_path / "rounds.csv"
    file.write_text(lines)
    return f"--ledger={file}"


def test_a_run_that_kept_its_plan(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = _ledger(tmp_path, "ada,0\nada,4\nada,8\nbo,3\nbo,11\n")
    status, out, _ = _call(capsys, checkpoint, ledger, "--format=json")
    fields = json.loads(out)
    assert status == 0
    assert fields["keeps_plan"] is True
    assert fields["realised_separation"] == 4
    assert fields["realised_max_participations"] == 3
    assert fields["realised_sensitivity_is_exact"] is True
    assert fields["realised_epsilon"] == pytest.approx(fields["epsilon"])
    assert fields["widened_epsilon"] is None
    assert fields["worst_client_num_rounds"] == 3
    # Columns of norm one, four rounds apart and so orthogonal.
    assert fields["worst_client_sensitivity"] == pytest.approx(math.sqrt(3))


@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.parametrize("rounds", [(0, 4, 8), (0, 1, 2)])
def test_no_client_is_named_that_nobody_asked_for(
    tmp_path: pathlib.Path,
    checkpoint: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    rounds: tuple[int, ...],
) -> None:
    """Neither by its name nor by its rounds, in nothing that is printed or written."""
    ledger = _ledger(tmp_path, "".join(f"{_NAMED}ada,{each}\n" for each in rounds))
    page, figure = tmp_path / "page.html", tmp_path / "figure.png"
    outputs = (f"--report={page}", f"--figure={figure}", "--overwrite")
    for flags in (("--format=text", *outputs), ("--format=json",)):
        _, out, err = _call(capsys, checkpoint, ledger, *flags)
        for written in (out, err, page.read_text(), figure.read_bytes().decode("latin-1")):
            assert _NAMED not in written
            assert str(list(rounds)) not in written
    assert json.loads(out)["worst_client"] is None
    _, out, _ = _call(capsys, checkpoint, ledger, "--name_clients", "--format=json", *outputs)
    fields = json.loads(out)
    assert fields["worst_client"] == f"{_NAMED}ada"
    assert fields["worst_client_rounds"] == list(rounds)
    assert f"{_NAMED}ada" in page.read_text()


def test_a_run_in_a_fixed_order_of_epochs_kept_its_plan(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of more bands than rounds between: exact there, where at least three rounds are not."""
    order = FixedEpochOrder(epochs=3, separation=3)
    checkpoints.save(checkpoints.load(checkpoint), checkpoint, participation=order)
    arguments = ("--participation=fixed_epoch", "--separation=3", "--format=json")
    ledger = _ledger(tmp_path, "ada,0\nada,3\nada,6\nbo,7\nbo,10\ncy,2\n")
    _, out, _ = _call(capsys, checkpoint, ledger, *arguments)
    fields = json.loads(out)
    assert fields["keeps_plan"] is True
    assert fields["realised_separation"] == fields["realised_largest_separation"] == 3
    assert fields["realised_epsilon"] == pytest.approx(fields["epsilon"])
    assert fields["realised_sensitivity"] == fields["sensitivity"]
    assert fields["realised_sensitivity_is_exact"] is True
    # One participation a round later, and no epoch follows the other.
    ledger = _ledger(tmp_path, "ada,0\nada,3\nada,6\nbo,7\nbo,11\ncy,2\n")
    _, out, _ = _call(capsys, checkpoint, ledger, *arguments)
    fields = json.loads(out)
    assert fields["keeps_plan"] is False
    assert fields["realised_largest_separation"] == 4
    assert fields["realised_epsilon"] >= fields["epsilon"]


def test_a_run_that_broke_its_plan(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = _ledger(tmp_path, "ada,0\nada,4\nada,8\nbo,3\nbo,5\ncy,11\n")
    status, out, _ = _call(capsys, checkpoint, ledger)
    assert status == 1
    assert out.startswith("WARNING: the ledger breaks the schema")
    # Nothing that the plan would have given stands in the sentences.
    assert "if every client keeps to" not in out
    status, out, _ = _call(capsys, checkpoint, ledger, "--format=json")
    assert status == 1
    fields = json.loads(out)
    assert fields["keeps_plan"] is False
    # bo, whose rounds are two apart.
    assert fields["clients_beyond_plan"] == 1
    assert fields["realised_sensitivity_is_exact"] is False
    assert fields["widened_epsilon"] >= fields["realised_epsilon"] > fields["epsilon"]
    assert fields["widened_zcdp_rho"] >= fields["realised_zcdp_rho"] > fields["zcdp_rho"]
    assert fields["realised_epsilon"] == pytest.approx(
        accounting.epsilon(fields["realised_noise_multiplier"], 1e-5)
    )


_TIMES = "start,2026-03-01T00:00:00Z\n" + "".join(
    f"{index},2026-03-01T{index + 1:02}:00:00Z\n" for index in range(12)
)


def test_times_in_the_place_of_a_ledger(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A timer of more than four hours, and devices that count to two."""
    file = tmp_path / "times.csv"
    file.write_text(_TIMES)
    given = (f"--round_times={file}", "--timer_hours=5", "--clock_margin_minutes=5")
    status, out, _ = _call(
        capsys, checkpoint, *given, "--timer_max_participations=2", "--format=json"
    )
    fields = json.loads(out)
    assert status == 0
    assert fields["keeps_plan"] is True
    assert (fields["realised_separation"], fields["realised_max_participations"]) == (4, 2)
    assert (fields["timer_hours"], fields["clock_drift"]) == (5.0, 0.001)
    assert fields["realised_num_clients"] is None
    assert fields["realised_epsilon"] < fields["epsilon"]
    # Columns of norm one, four rounds apart and so orthogonal.
    assert fields["realised_sensitivity"] == pytest.approx(math.sqrt(2))
    status, out, _ = _call(capsys, checkpoint, *given[:1], "--timer_hours=3")
    assert status == 1
    assert out.startswith("WARNING")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("--round_times={}",), "--timer_hours"),
        (("--timer_hours=5",), "--round_times"),
        (("--round_times={}", "--timer_hours=0"), "--timer_hours must be above zero"),
        (("--round_times={}", "--timer_hours=inf"), "--timer_hours must be finite"),
        (("--round_times={}", "--timer_hours=x"), "--timer_hours"),
        (("--round_times={}", "--timer_hours=1"), "timer_hours"),
        (("--round_times={}.gone", "--timer_hours=5"), "--round_times: "),
        (("--round_times={}", "--timer_hours=5", "--clock_drift=1"), "--clock_drift must"),
        (("--round_times={}", "--timer_hours=5", "--clock_drift=nan"), "--clock_drift must"),
        (("--round_times={}", "--timer_hours=5", "--clock_margin_minutes=-1"), "--clock_margin"),
        (("--round_times={}", "--timer_hours=5", "--clock_margin_minutes=300"), "clock_margin"),
        (("--round_times={}", "--timer_hours=5", "--clock_margin_minutes=1e308"), "clock_margin"),
        (("--round_times={}", "--timer_hours=1e308", "--clock_margin_minutes=1e308"), "leaves"),
        (("--round_times={}", "--timer_hours=5", "--timer_max_participations=0"), "--timer_max"),
        (("--clock_drift=0.1",), "--round_times"),
        (("--clock_margin_minutes=1",), "--round_times"),
        (("--timer_max_participations=1",), "--round_times"),
        (("--round_times={}", "--timer_hours=5", "--ledger={}"), "--ledger"),
        (("--round_times={}", "--timer_hours=5", "--released_rounds=3"), "--released_rounds"),
    ],
)
def test_times_that_mean_nothing_are_refused_in_one_line(
    tmp_path: pathlib.Path,
    checkpoint: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    given: tuple[str, ...],
    named: str,
) -> None:
    file = tmp_path / "times.csv"
    file.write_text(_TIMES)
    status, out, err = _call(capsys, checkpoint, *(each.format(file) for each in given))
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert named in err


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("", "12,2026-03-01T13:00:00Z\n"), "13 rounds were released"),
        (("11,2026-03-01T12", "11,2026-03-02T12"), "round 11 lasted 25 hours"),
        (("1,2026-03-01T02:00:00Z", "1,noon"), "times.csv, line 3: 'noon' is no time"),
        (("start,2026-03-01", "start,0001-01-01"), "starts must be finite"),
    ],
)
def test_a_file_of_times_is_refused_by_its_flag(
    tmp_path: pathlib.Path,
    checkpoint: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    change: tuple[str, str],
    named: str,
) -> None:
    file = tmp_path / "times.csv"
    file.write_text(_TIMES.replace(*change) if change[0] else _TIMES + change[1])
    status, out, err = _call(capsys, checkpoint, f"--round_times={file}", "--timer_hours=5")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("mf-report: --round_times: ")
    assert named in err


def test_a_ledger_is_refused_by_its_flag(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = _ledger(tmp_path, "a,0\na,12\n")
    status, out, err = _call(capsys, checkpoint, ledger)
    assert (status, out) == (2, "")
    assert err.startswith("mf-report: --ledger: ")
    status, out, err = _call(capsys, checkpoint, ledger, "--released_rounds=13")
    assert (status, out) == (2, "")
    assert err.startswith("mf-report: --released_rounds: 13 rounds were released")


def test_names_that_look_alike_are_the_first_thing_said(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three participations of one person under three names give the epsilon of one each."""
    lines = "\u00e9va,0\ne\u0301va,4\n\u00c9VA,8\nbo,3\n"
    ledger = _ledger(tmp_path, lines)
    status, out, _ = _call(capsys, checkpoint, ledger)
    assert status == 0
    sentences = out.split("\n\n")
    assert sentences[0].startswith("WARNING: 3 clients have names that look like")
    assert "WARNING" not in "".join(sentences[1:])
    fields = json.loads(_call(capsys, checkpoint, ledger, "--format=json")[1])
    assert fields["alike_client_names"] == 3
    assert fields["realised_max_participations"] == 1
    other = json.loads(
        _call(capsys, checkpoint, _ledger(tmp_path, "ada,0\nbo,3\n"), "--format=json")[1]
    )
    assert other["alike_client_names"] == 0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("ada,0\nada,0\n", "line 2: repeats line 1"),
        ("ada,0.0\nada,4\nada,8\n", "line 1"),
        ("ada,12\n", "12 rounds were released"),
        ("ada\n", "line 1"),
    ],
)
def test_ledgers_that_cannot_be_true_are_refused(
    tmp_path: pathlib.Path,
    checkpoint: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    lines: str,
    message: str,
) -> None:
    status, out, error = _call(capsys, checkpoint, _ledger(tmp_path, lines))
    assert status == 2
    assert out == ""
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_no_line_of_a_text_ledger_is_lost(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The three rounds of one client have a sensitivity of sqrt(3), of two only sqrt(2)."""
    for mark in ("", "\ufeff"):
        ledger = _ledger(tmp_path, f"{mark}ada,0\nada,4\nada,8\n")
        status, out, _ = _call(capsys, checkpoint, ledger, "--format=json")
        fields = json.loads(out)
        assert status == 0
        assert fields["worst_client_num_rounds"] == 3
        assert fields["realised_sensitivity"] == pytest.approx(math.sqrt(3))
        assert fields["realised_num_clients"] == 1


def test_rounds_without_the_client_count_as_released(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a client contributed in round 0 is in the noise-hidden sums of rounds 1 to 3 too."""
    ledger = _ledger(tmp_path, "ada,0\n")
    _, out, _ = _call(capsys, checkpoint, ledger, "--format=json")
    fields = json.loads(out)
    assert fields["realised_num_rounds"] == 12
    assert fields["realised_sensitivity"] == pytest.approx(1.0)
    _, out, _ = _call(capsys, checkpoint, ledger, "--released_rounds=1", "--format=json")
    assert json.loads(out)["realised_sensitivity"] < 0.99
    _, out, _ = _call(capsys, checkpoint, ledger, "--released_rounds=1")
    assert "Only 1 of 12 rounds were released" in out


def test_the_effective_error_is_that_of_the_average(
    checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """BandMF Eq. 11: rmse times noise multiplier over clients per round."""
    _, out, _ = _call(capsys, checkpoint, "--clients_per_round=50", "--format=json")
    fields = json.loads(out)
    assert fields["effective_rmse"] == pytest.approx(fields["rmse"] * 0.9 / 50)
    _, out, _ = _call(capsys, checkpoint, "--format=json")
    assert json.loads(out)["effective_rmse"] is None


# Three clients for each of the four parts, which twelve rounds go through three times.
_POISSON = PoissonSampling(12, 4, 12, 1)
# A client's index modulo the number of parts is its part; the last round draws nobody.
_DRAWN = (*([i % 4, 4 + i % 4] for i in range(11)), [])


def _sampled_ledger(
    tmp_path: pathlib.Path, cohorts: tuple[list[int], ...], scheme: SamplingScheme
) -> str:
    file = tmp_path / "participation.npz"
    ledger = ParticipationLedger(
        tuple(f"{_NAMED}{i}" for i in range(12)),
        tuple(np.array(cohort, np.int64) for cohort in cohorts),
        scheme,
    )
    ledger.save(file)
    return f"--ledger={file}"


def test_a_sampled_run_is_not_held_against_a_schema(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = _sampled_ledger(tmp_path, _DRAWN, _POISSON)
    _, out, _ = _call(capsys, checkpoint, ledger, "--format=json")
    fields = json.loads(out)
    # Columns of norm one: three participations four rounds apart have sensitivity sqrt(3), to
    # which the given multiplier is relative; that of a sampled run is relative to one column.
    multiplier = 0.9 * math.sqrt(3.0)
    assert fields["sampling"] == _POISSON.to_dict()
    # The guarantee of one participation is that of nobody.
    assert (fields["participation"], fields["epsilon"]) == (str(_POISSON), None)
    assert fields["amplified_noise_multiplier"] == pytest.approx(multiplier)
    assert fields["amplified_epsilon"] == pytest.approx(
        sampling_scheme(
            "poisson", num_rounds=12, num_bands=4, population=12, clients_per_round=1
        ).epsilon(multiplier, 1e-5)
    )
    # Who knows who was drawn knows three participations of some clients.
    assert fields["realised_epsilon"] == pytest.approx(accounting.epsilon(0.9, 1e-5))
    assert fields["amplified_epsilon"] < fields["realised_epsilon"]
    # A ledger does not show by what rule it was drawn, and gives nobody away.
    assert fields["keeps_plan"] is None
    assert fields["worst_client"] is None
    assert fields["widened_epsilon"] is None
    assert [name for name, value in fields.items() if isinstance(value, list)] == []
    assert _NAMED not in out
    _, out, _ = _call(capsys, checkpoint, ledger)
    assert _NAMED not in out
    assert "WARNING" not in out
    assert "if every client keeps to" not in out
    assert f"({rounded_up(fields['amplified_epsilon'])}, 1e-05)-DP allows" in out
    assert "privacy.json" in out


def test_noise_of_sampled_clients_is_not_taken_for_that_of_another_schema(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint for timers: relative to their sensitivity, so much noise would be too much."""

    def call(*arguments: str) -> tuple[int, str, str]:
        status = command_line.run(
            report.__doc__ or "",
            report.define_flags,
            report.main,
            [
                "mf-report",
                f"--checkpoint={checkpoint}",
                _sampled_ledger(tmp_path, _DRAWN, _POISSON),
                "--noise_multiplier=0.9",
                "--delta=1e-5",
                "--format=json",
                *arguments,
            ],
        )
        return status, *capsys.readouterr()

    status, out, err = call()
    assert (status, out) == (2, "")
    assert "--participation=single" in err
    assert len(err.splitlines()) == 1
    status, out, _ = call("--participation=single")
    assert status == 0
    assert json.loads(out)["amplified_noise_multiplier"] == 0.9


def test_a_ledger_that_contradicts_its_sampling_is_warned_of(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Client 0 in two rounds in a row, which draw from different parts.
    ledger = _sampled_ledger(tmp_path, ([0], [0], *_DRAWN[2:]), _POISSON)
    _, out, _ = _call(capsys, checkpoint, ledger, "--format=json")
    fields = json.loads(out)
    assert fields["keeps_plan"] is False
    assert fields["realised_separation"] == 1
    amplified = sampling_scheme(
        "poisson", num_rounds=12, num_bands=4, population=12, clients_per_round=1
    ).epsilon(fields["amplified_noise_multiplier"], 1e-5)
    assert fields["widened_epsilon"] >= fields["realised_epsilon"] > amplified
    assert fields["amplified_epsilon"] is None
    _, out, _ = _call(capsys, checkpoint, ledger)
    assert out.startswith("WARNING: the ledger contradicts its sampling scheme")
    assert f"({rounded_up(fields['widened_epsilon'])}, 1e-05)-DP" in out


def _shuffled() -> tuple[list[int], ...]:
    """Three batches of one client make a pass over each part of three."""
    return tuple([4 * (i // 4) + i % 4] for i in range(12))


@pytest.mark.short_cases(3)
@pytest.mark.parametrize(
    ("scheme", "cohorts", "deviation"),
    [
        # Of a larger population each client would be drawn less often, and hidden better.
        (PoissonSampling(12, 4, 1200, 1), _DRAWN, "12 clients, not 1200"),
        (PoissonSampling(12, 4, 12, 1), ([0], [0]), "round of another group"),
        (PoissonSampling(12, 4, 12, 1), ([0, 1, 2, 3],), "more clients took part"),
        (PoissonSampling(12, 4, 12, 3), ([0, 1],), "had 2 clients, not 3"),
        (FixedSizeSampling(12, 4, 12, 1), ([0], [1], [2], [3], [0], [5, 9]), "had 2 clients"),
        (FixedSizeSampling(12, 4, 12, 1), ([0], []), "had 0 clients, not 1"),
        (FixedSizeSampling(12, 4, 12, 2), _DRAWN, "round 12 (counted from 1) had 0 clients"),
        (FixedSizeSampling(12, 4, 11, 1), _shuffled(), "12 clients, not 11"),
        (Shuffling(12, 4, 12, 1), ([0], [1], [2], [3], [0]), "twice in one pass"),
        (Shuffling(12, 4, 12, 1), ([0], [1], [2], [3], [4], [0]), "another group"),
        (Shuffling(12, 4, 12, 1), ([0, 4],), "had 2 clients, not 1"),
    ],
)
def test_nothing_is_amplified_that_the_ledger_contradicts(
    tmp_path: pathlib.Path,
    checkpoint: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    scheme: SamplingScheme,
    cohorts: tuple[list[int], ...],
    deviation: str,
) -> None:
    ledger = _sampled_ledger(tmp_path, cohorts, scheme)
    status, out, _ = _call(capsys, checkpoint, ledger, "--format=json")
    fields = json.loads(out)
    assert status == 1
    assert fields["keeps_plan"] is False
    assert fields["amplified_epsilon"] is None
    assert deviation in fields["sampling_deviation"]
    assert _NAMED not in out
    assert fields["widened_epsilon"] >= fields["realised_epsilon"]
    _, out, _ = _call(capsys, checkpoint, ledger)
    text = out.partition("\n\n")[0]
    assert text.startswith("WARNING: the ledger contradicts its sampling scheme (")
    assert deviation in text
    assert "allows" not in text
    assert _NAMED not in text
    assert [name for name, value in fields.items() if isinstance(value, list)] == []


@pytest.mark.short_cases(3)
@pytest.mark.parametrize("rounds", [1, 5, 12])
@pytest.mark.parametrize(
    "scheme",
    [FixedSizeSampling(12, 4, 12, 1), Shuffling(12, 4, 12, 1), PoissonSampling(12, 4, 12, 1)],
)
def test_a_ledger_that_its_scheme_may_have_drawn_is_amplified_finished_or_not(
    tmp_path: pathlib.Path,
    checkpoint: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    scheme: SamplingScheme,
    rounds: int,
) -> None:
    ledger = _sampled_ledger(tmp_path, _shuffled()[:rounds], scheme)
    _, out, _ = _call(capsys, checkpoint, ledger, "--format=json")
    fields = json.loads(out)
    assert fields["keeps_plan"] is None
    assert fields["sampling_deviation"] is None
    # Of all rounds, however early the run ended.
    assert fields["amplified_epsilon"] == pytest.approx(
        sampling_scheme(
            scheme.name, num_rounds=12, num_bands=4, population=12, clients_per_round=1
        ).epsilon(fields["amplified_noise_multiplier"], 1e-5)
    )


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (FixedSizeSampling(12, 3, 12, 1), "at most 3 bands"),
        (FixedSizeSampling(8, 4, 12, 1), "for 8 rounds"),
    ],
)
def test_sampling_that_is_not_of_the_checkpoint_is_refused(
    tmp_path: pathlib.Path,
    checkpoint: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    scheme: SamplingScheme,
    message: str,
) -> None:
    status, out, error = _call(capsys, checkpoint, _sampled_ledger(tmp_path, _DRAWN, scheme))
    assert status != 0
    assert not out
    assert message in error


_SEPARATED = [
    MinSeparationSampling(12, 4, 12, 1, 4),
    MinSeparationSampling(12, 4, 12, 1, 6),
    BallsInBins(12, 4, 12, 2, 6),
]


def _drawn(tmp_path: pathlib.Path, scheme: SamplingScheme, seed: int) -> tuple[str, str]:
    """The flags of a ledger that a seed has drawn, and of the seed."""
    sampler = scheme.sampler(seed)
    cohorts = tuple(sampler.draw(index).tolist() for index in range(12))
    random_streams.save_seed(seed, tmp_path / "sampling_seed.json")
    flag = f"--sampling_seed={tmp_path / 'sampling_seed.json'}"
    return _sampled_ledger(tmp_path, cohorts, scheme), flag


@pytest.mark.short_cases(2)
@pytest.mark.parametrize(
    "scheme",
    [
        PoissonSampling(12, 4, 12, 1),
        pytest.param(FixedSizeSampling(12, 4, 12, 1), marks=pytest.mark.long),
        Shuffling(12, 4, 12, 1),
        _SEPARATED[0],
        pytest.param(_SEPARATED[1], marks=pytest.mark.long),
        _SEPARATED[2],
    ],
    ids=str,
)
def test_the_seed_of_a_sampler_shows_that_a_ledger_is_amplified(
    tmp_path: pathlib.Path,
    checkpoint: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    scheme: SamplingScheme,
) -> None:
    flags = _drawn(tmp_path, scheme, 2**100 + 17)
    status, out, _ = _call(capsys, checkpoint, *flags, "--format=json")
    fields = json.loads(out)
    assert status == 0
    assert fields["keeps_plan"] is True
    assert fields["sampling_deviation"] is None
    assert fields["widened_epsilon"] is None
    planned = guarantees.sampled(checkpoints.load(checkpoint), scheme, 0.9 * math.sqrt(3.0), 1e-5)
    assert fields["amplified_epsilon"] == pytest.approx(planned.epsilon)
    assert fields["amplified_true_positive_rate_at_0.01"] == pytest.approx(
        planned.true_positive_rate(0.01)
    )
    has_certificate = scheme.name not in ["poisson", "fixed_size", "shuffling"]
    assert (fields["amplified_certificate"] is not None) == has_certificate
    _, out, _ = _call(capsys, checkpoint, *flags)
    assert "WARNING" not in out
    assert "Every batch of the ledger is the one that the sampler's seed draws" in out
    assert f"({rounded_up(planned.epsilon)}, 1e-05)-DP allows" in out
    assert "For whoever knows who was drawn, nothing is amplified." in out
    assert printed_guarantees.rates_in_brief(planned.attacker()) in out
    assert _NAMED not in out
    # Nobody else's seed does.
    random_streams.save_seed(2**100 + 16, tmp_path / "sampling_seed.json")
    _, out, _ = _call(capsys, checkpoint, *flags, "--format=json")
    fields = json.loads(out)
    assert fields["keeps_plan"] is False
    assert fields["amplified_epsilon"] is None
    assert fields["amplified_true_positive_rate_at_0.01"] is None
    assert fields["widened_epsilon"] >= planned.epsilon
    assert "that the sampler draws" in fields["sampling_deviation"]
    # Without a seed, it may be right.
    _, out, _ = _call(capsys, checkpoint, flags[0], "--format=json")
    assert json.loads(out)["keeps_plan"] is None
    _, out, _ = _call(capsys, checkpoint, flags[0])
    assert "--sampling_seed, with the secret seed of the run, compares every draw" in out


@pytest.mark.short_cases(2)
@pytest.mark.parametrize("scheme", _SEPARATED, ids=str)
def test_tampered_draws_are_found(
    tmp_path: pathlib.Path,
    checkpoint: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    scheme: SamplingScheme,
) -> None:
    """One participation that is put in, moved to another client, or left out."""
    _, flag = _drawn(tmp_path, scheme, 5)
    sampler = scheme.sampler(5)
    drawn = [sampler.draw(index) for index in range(12)]
    index = next(index for index in range(12) if 0 < len(drawn[index]) < 12)
    outside = np.setdiff1d(np.arange(12), drawn[index])[:1]

    def changed(cohort: np.ndarray) -> str:
        cohorts = [*drawn[:index], cohort, *drawn[index + 1 :]]
        return _sampled_ledger(tmp_path, tuple(each.tolist() for each in cohorts), scheme)

    for cohort in (np.union1d(drawn[index], outside), np.union1d(drawn[index][1:], outside)):
        ledger = changed(cohort)
        _, out, _ = _call(capsys, checkpoint, ledger, flag, "--format=json")
        fields = json.loads(out)
        assert fields["keeps_plan"] is False
        assert fields["amplified_epsilon"] is None
        assert fields["absent_participations"] is None
        assert _NAMED not in out
    # Who is not there may not have been asked, which the amplified guarantee covers.
    ledger = changed(drawn[index][1:])
    _, out, _ = _call(capsys, checkpoint, ledger, flag, "--format=json")
    fields = json.loads(out)
    assert fields["keeps_plan"] is True
    assert fields["absent_participations"] == 1
    assert fields["amplified_epsilon"] > 0.0
    status, out, _ = _call(capsys, checkpoint, ledger, flag)
    assert status == 0
    assert out.startswith("WARNING: of the participations that the sampler's seed draws, 1 are not")


def test_a_seed_that_does_not_fit_is_refused(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger, seed = _drawn(tmp_path, PoissonSampling(12, 4, 12, 1), 3)
    of_timers = _ledger(tmp_path, "ada,0\n")
    for flags, message in (
        ([seed], "--sampling_seed needs --ledger"),
        ([of_timers, seed], "needs a ledger that names the scheme of its draws"),
        ([ledger, f"--sampling_seed={tmp_path / 'nowhere'}"], "nowhere cannot be read"),
        ([ledger, f"--sampling_seed={checkpoint / 'factorization.json'}"], "holds no seed"),
    ):
        status, out, err = _call(capsys, checkpoint, *flags)
        assert status == 2
        assert out == ""
        assert message in err


def _report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    words = ["mf-report", "--delta=1e-5", "--format=json", *arguments]
    assert command_line.run("", report.define_flags, report.main, words) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    del found["seconds"]
    return found


def test_a_mechanism_is_reported_with_its_own_participation_and_noise(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mechanism = mfa.Mechanism(checkpoints.load(checkpoint), MinSeparation(4, 2), 0.7)
    mechanism.save(tmp_path / "mechanism")
    own = f"--checkpoint={tmp_path / 'mechanism'}"
    ledger = _ledger(tmp_path, "a,0\na,4\nb,1\n")
    flags = (f"--checkpoint={checkpoint}", "--separation=4", "--max_participations=2")
    for more in ([], [ledger]):
        assert _report(capsys, own, *more) == _report(
            capsys, *flags, "--noise_multiplier=0.7", *more
        )
    # Flags go before it.
    assert _report(capsys, own, "--noise_multiplier=0.9") == _report(
        capsys, *flags, "--noise_multiplier=0.9"
    )
    # The noise that it has, beside the sensitivity of another schema.
    several = _report(capsys, own, "--separation=1", "--max_participations=2")
    matrix, close = mechanism.factorization, MinSeparation(1, 2)
    ratio = matrix.sensitivity(mechanism.schema).value / matrix.sensitivity(close).value
    assert several["noise_multiplier"] == pytest.approx(0.7 * ratio, rel=1e-12)
    assert ratio < 0.9
    words = ["mf-report", own, "--separation=1", "--max_participations=2", "--noise_multiplier=0.7"]
    assert command_line.run("", report.define_flags, report.main, words) == 2
    assert "--noise_multiplier=0.7 is more noise than" in capsys.readouterr().err
    words = ["mf-report", own, "--separation=6", ledger, "--delta=1e-5"]
    assert command_line.run("", report.define_flags, report.main, words) == 2
    assert "leave out the flags that name another" in capsys.readouterr().err


@pytest.mark.parametrize("has_mechanism", [True, False])
@pytest.mark.parametrize("source", ["ledger", "round_times"])
def test_a_broken_plan_is_not_declared_anew(
    tmp_path: pathlib.Path,
    checkpoint: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    has_mechanism: bool,
    source: str,
) -> None:
    """Neither with noise for the new schema, nor with the multiplier of the old one."""
    ledger = _ledger(tmp_path, "a,0\na,3\na,7\nb,1\n")
    times = tmp_path / "times.csv"
    times.write_text(_TIMES)
    of_run = [ledger] if source == "ledger" else [f"--round_times={times}", "--timer_hours=4"]
    matrix, planned, noise = checkpoints.load(checkpoint), MinSeparation(4, 3), 0.9
    if has_mechanism:
        mfa.Mechanism(matrix, planned, noise).save(checkpoint)

    def refused(*flags: str) -> str:
        words = ["mf-report", f"--checkpoint={checkpoint}", "--delta=1e-5", *of_run, *flags]
        assert command_line.run("", report.define_flags, report.main, words) == 2
        captured = capsys.readouterr()
        assert (captured.out, len(captured.err.splitlines())) == ("", 1)
        return captured.err

    for target in ("--target_epsilon=8", "--target_rho=0.5"):
        for schema in ([], ["--separation=3"]):
            said = refused(target, *schema)
            assert f"--{source} is of a run that took place" in said
            assert target.partition("=")[0] in said
    assert "--separation: " in refused(f"--noise_multiplier={noise}", "--separation=3")
    if has_mechanism:
        # Relative to the sensitivity of one participation in the place of sqrt(3) as well.
        assert "--noise_multiplier=" in refused("--noise_multiplier=0.9001")
        same = noise * math.sqrt(3.0)
        once = "--participation=single"
        assert "--noise_multiplier=" in refused(once, f"--noise_multiplier={same + 1e-4}")
        words = ["mf-report", f"--checkpoint={checkpoint}", "--delta=1e-5", *of_run, once]
        words.append(f"--noise_multiplier={same - 1e-4}")
        assert command_line.run("", report.define_flags, report.main, words) == 1
        capsys.readouterr()
    # What is left of the noise that the run had: of sqrt(3), for columns four apart.
    words = ["mf-report", f"--checkpoint={checkpoint}", "--delta=1e-5", "--format=json", *of_run]
    words += [] if has_mechanism else [f"--noise_multiplier={noise}"]
    assert command_line.run("", report.define_flags, report.main, words) == 1
    fields = json.loads(capsys.readouterr().out)
    assert (fields["keeps_plan"], fields["realised_separation"]) == (False, 3)
    observed = MinSeparation(3, fields["realised_max_participations"])
    ratio = mfa.sensitivity.compute(matrix.strategy_matrix(), observed).value / math.sqrt(3.0)
    assert ratio > 1.01
    assert fields["realised_epsilon"] == pytest.approx(accounting.epsilon(noise / ratio, 1e-5))


def test_a_mechanism_of_drawn_clients_is_reported_as_they_are_drawn(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mechanism = mfa.Mechanism(checkpoints.load(checkpoint), _POISSON, 0.8)
    mechanism.save(tmp_path / "mechanism")
    own = f"--checkpoint={tmp_path / 'mechanism'}"
    page = tmp_path / "page.html"
    fields = _report(capsys, own, f"--report={page}")
    planned = mechanism.guarantee(1e-5)
    assert fields["amplified_epsilon"] == pytest.approx(planned.epsilon)
    assert fields["delta"] == 1e-5
    # The guarantee of one participation is that of nobody.
    assert [fields[name] for name in ("epsilon", "zcdp_rho", "epsilon_at_delta_1e-06")] == [
        None
    ] * 3
    assert fields["participation"] == str(_POISSON)
    assert "every client keeps to" not in page.read_text()
    flags = _drawn(tmp_path, _POISSON, 5)
    assert _report(capsys, own, *flags)["amplified_epsilon"] == fields["amplified_epsilon"]
    # Asked for, there is that of the matrix alone.
    assert _report(capsys, own, "--participation=single")["noise_multiplier"] == 0.8


def test_errors_of_another_workload_than_the_matrix_is_for_are_said_to_be(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix = mfa.factorizations.banded(mfa.workloads.momentum_sgd(12, 0.9), num_bands=3)
    mfa.Mechanism(matrix, MinSeparation(3), 1.0).save(tmp_path)
    for flags, is_said in (([], True), (["--workload=momentum_sgd", "--momentum=0.9"], False)):
        words = ["mf-report", f"--checkpoint={tmp_path}", *flags]
        assert command_line.run("", report.define_flags, report.main, words) == 0
        said = "made for another workload than prefix_sum" in capsys.readouterr().out
        assert said == is_said


@pytest.mark.long
def test_the_trade_off_curve_of_a_mechanism_is_that_of_drawn_clients(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mechanism = mfa.Mechanism(checkpoints.load(checkpoint), _POISSON, 0.8)
    mechanism.save(tmp_path / "mechanism")
    curve = tmp_path / "curve.json"
    _report(capsys, f"--checkpoint={tmp_path / 'mechanism'}", f"--trade_off={curve}")
    expected = json.dumps(mechanism.trade_off_curve())
    assert json.loads(curve.read_text()) == json.loads(expected)
