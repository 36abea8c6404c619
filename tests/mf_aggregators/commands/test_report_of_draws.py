"""mf-report of clients that were drawn: what a ledger shows of its sampling, and a seed."""

import json
import math
import pathlib

import numpy as np
import pytest

import mf_aggregators as mfa
from mf_aggregators import accounting, checkpoints, random_streams
from mf_aggregators.kernel.numbers import rounded_up
from mf_aggregators.participation import (
    BallsInBins,
    FixedSizeSampling,
    MinSeparation,
    MinSeparationSampling,
    Participation,
    PoissonSampling,
    SamplingScheme,
    Shuffling,
    sampling_scheme,
)
from mf_aggregators.privacy import guarantees
from simulations.runs.run_directory import ParticipationLedger
from tests import console_commands
from tests.mf_aggregators import small_mechanisms
from tests.mf_aggregators.commands.small_reports import (
    NAMED,
    call_report,
    fields_of_report,
    flag_of_ledger,
)

# Three clients for each of the four parts, which twelve rounds go through three times.
_POISSON = PoissonSampling(12, 4, 12, 1)
# Columns of C have norm 1: relative to three participations that are four rounds apart, 0.9.
_MULTIPLIER = 0.9 * math.sqrt(3.0)
# A client's index modulo the number of parts is its part; the last round draws nobody.
_DRAWN = (*([i % 4, 4 + i % 4] for i in range(11)), [])


def _sampled_ledger(
    tmp_path: pathlib.Path, cohorts: tuple[list[int], ...], scheme: SamplingScheme
) -> str:
    file = tmp_path / "participation.npz"
    ledger = ParticipationLedger(
        tuple(f"{NAMED}{i}" for i in range(12)),
        tuple(np.array(cohort, np.int64) for cohort in cohorts),
        scheme,
    )
    ledger.save(file)
    return f"--ledger={file}"


def _call(tmp_path: pathlib.Path, scheme: SamplingScheme, *flags: str) -> console_commands.Ended:
    """A report of a Mechanism whose clients are drawn, at noise multiplier 0.9 sqrt(3)."""
    matrix = mfa.factorizations.banded(12, 4)
    mfa.Mechanism(matrix, scheme, _MULTIPLIER).save(tmp_path / "mechanism")
    own = f"--checkpoint={tmp_path / 'mechanism'}"
    return console_commands.call("mf-report", own, "--delta=1e-5", *flags)


def test_a_sampled_run_is_not_held_against_a_schema(tmp_path: pathlib.Path) -> None:
    ledger = _sampled_ledger(tmp_path, _DRAWN, _POISSON)
    _, out, _ = _call(tmp_path, _POISSON, ledger, "--format=json")
    fields = json.loads(out)
    assert fields["sampling"] == _POISSON.to_dict()
    # The guarantee of one participation is that of nobody.
    assert (fields["participation"], fields["epsilon"]) == (str(_POISSON), None)
    assert fields["amplified_noise_multiplier"] == _MULTIPLIER
    assert fields["amplified_epsilon"] == pytest.approx(
        sampling_scheme(
            "poisson", num_rounds=12, num_bands=4, population=12, clients_per_round=1
        ).epsilon(_MULTIPLIER, 1e-5)
    )
    # Who knows who was drawn knows three participations of some clients.
    assert fields["realised_epsilon"] == pytest.approx(accounting.epsilon(0.9, 1e-5))
    assert fields["amplified_epsilon"] < fields["realised_epsilon"]
    # A ledger does not show by what rule it was drawn, and gives nobody away.
    assert fields["keeps_plan"] is None
    assert fields["widened_epsilon"] is None
    assert [name for name, value in fields.items() if isinstance(value, list)] == []
    assert NAMED not in out
    _, out, _ = _call(tmp_path, _POISSON, ledger)
    assert NAMED not in out
    assert "WARNING" not in out
    assert "if every client keeps to" not in out
    assert f"({rounded_up(fields['amplified_epsilon'])}, 1e-05)-DP allows" in out
    assert "privacy.json" in out


def test_a_ledger_of_drawn_clients_needs_its_mechanism(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path
) -> None:
    """The noise multiplier of a checkpoint for timers is relative to another sensitivity."""
    call_report(checkpoint, _sampled_ledger(tmp_path, _DRAWN, _POISSON)).refused("were sampled")


@pytest.mark.short_cases(3)
@pytest.mark.parametrize(
    ("scheme", "cohorts", "deviation"),
    [
        (PoissonSampling(12, 4, 12, 1), ([0], [0]), "round of another group"),
        (FixedSizeSampling(12, 4, 12, 1), ([0], [1], [2], [3], [0], [5, 9]), "had 2 clients"),
        (Shuffling(12, 4, 12, 1), ([0], [1], [2], [3], [0]), "twice in one cycle"),
    ],
)
def test_nothing_is_amplified_that_the_ledger_contradicts(
    tmp_path: pathlib.Path,
    scheme: SamplingScheme,
    cohorts: tuple[list[int], ...],
    deviation: str,
) -> None:
    ledger = _sampled_ledger(tmp_path, cohorts, scheme)
    ended = _call(tmp_path, scheme, ledger, "--format=json")
    fields = ended.fields(1)
    assert fields["keeps_plan"] is False
    assert fields["amplified_epsilon"] is None
    assert deviation in fields["sampling_deviation"]
    assert NAMED not in ended.printed
    assert fields["widened_epsilon"] >= fields["realised_epsilon"]
    _, out, _ = _call(tmp_path, scheme, ledger)
    text = out.partition("\n\n")[0]
    assert text.startswith("WARNING: the ledger contradicts its sampling scheme (")
    assert deviation in text
    assert "allows" not in text
    assert NAMED not in text


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
    tmp_path: pathlib.Path, scheme: SamplingScheme
) -> None:
    flags = _drawn(tmp_path, scheme, 2**100 + 17)
    fields = _call(tmp_path, scheme, *flags, "--format=json").fields()
    assert fields["keeps_plan"] is True
    assert fields["sampling_deviation"] is None
    assert fields["widened_epsilon"] is None
    multiplier = fields["amplified_noise_multiplier"]
    assert multiplier == _MULTIPLIER
    # Seeds of simulations follow from all of its bits, which processors round differently.
    planned = small_mechanisms.sampled(mfa.factorizations.banded(12, 4), scheme, multiplier, 1e-5)
    assert fields["amplified_epsilon"] == pytest.approx(planned.epsilon)
    assert fields["amplified_true_positive_rate_at_0.01"] == pytest.approx(
        guarantees.true_positive_rate(planned, 0.01)
    )
    has_certificate = scheme.name not in ["poisson", "fixed_size", "shuffling"]
    assert (fields["amplified_certificate"] is not None) == has_certificate
    _, out, _ = _call(tmp_path, scheme, *flags)
    assert "WARNING" not in out
    assert "Every batch of the ledger is the one that the sampler's seed draws" in out
    assert f"({rounded_up(planned.epsilon)}, 1e-05)-DP allows" in out
    assert "For whoever knows who was drawn, nothing is amplified." in out
    assert guarantees.rates_in_brief(planned) in out
    assert NAMED not in out
    # Nobody else's seed does.
    random_streams.save_seed(2**100 + 16, tmp_path / "sampling_seed.json")
    fields = _call(tmp_path, scheme, *flags, "--format=json").fields(1)
    assert fields["keeps_plan"] is False
    assert fields["amplified_epsilon"] is None
    assert fields["amplified_true_positive_rate_at_0.01"] is None
    assert fields["widened_epsilon"] >= planned.epsilon
    assert "that the sampler draws" in fields["sampling_deviation"]
    # Without a seed, it may be right.
    assert _call(tmp_path, scheme, flags[0], "--format=json").fields()["keeps_plan"] is None
    _, out, _ = _call(tmp_path, scheme, flags[0])
    assert "--sampling_seed, with the secret seed of the run, compares every draw" in out


def test_a_seed_that_does_not_fit_is_refused(tmp_path: pathlib.Path) -> None:
    ledger, seed = _drawn(tmp_path, PoissonSampling(12, 4, 12, 1), 3)
    of_timers = flag_of_ledger(tmp_path, "ada,0\n")
    for flags, message in (
        ([seed], "--sampling_seed needs --ledger"),
        ([of_timers, seed], "needs a ledger that names its sampling scheme"),
        ([ledger, f"--sampling_seed={tmp_path / 'nowhere'}"], "nowhere cannot be read"),
        (
            [ledger, f"--sampling_seed={tmp_path / 'mechanism' / 'factorization.json'}"],
            "has no seed",
        ),
    ):
        _call(tmp_path, _POISSON, *flags).refused(message)


def test_a_mechanism_of_drawn_clients_is_reported_as_they_are_drawn(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path
) -> None:
    mechanism = mfa.Mechanism(checkpoints.load(checkpoint), _POISSON, 0.8)
    mechanism.save(tmp_path / "mechanism")
    own = f"--checkpoint={tmp_path / 'mechanism'}"
    fields = fields_of_report(own)
    planned = mechanism.guarantee(1e-5)
    assert fields["amplified_epsilon"] == pytest.approx(planned.epsilon)
    assert fields["delta"] == 1e-5
    # The guarantee of one participation is that of nobody.
    assert (fields["epsilon"], fields["zcdp_rho"]) == (None, None)
    assert fields["participation"] == str(_POISSON)
    flags = _drawn(tmp_path, _POISSON, 5)
    assert fields_of_report(own, *flags)["amplified_epsilon"] == fields["amplified_epsilon"]
    # Asked for, there is that of the matrix alone.
    alone = fields_of_report(own, "--participation=single", "--noise_multiplier=0.8")
    assert alone["epsilon"] == pytest.approx(accounting.epsilon(0.8, 1e-5))


def _saved(tmp_path: pathlib.Path, participation: Participation) -> str:
    """The flag of a Mechanism's checkpoint, for twelve rounds at noise multiplier 1."""
    mechanism = mfa.Mechanism(mfa.factorizations.banded(12, 4), participation, 1.0)
    mechanism.save(tmp_path / "mechanism")
    return f"--checkpoint={tmp_path / 'mechanism'}"


def test_a_ledger_without_a_scheme_is_held_against_that_of_the_mechanism(
    tmp_path: pathlib.Path,
) -> None:
    flag = _saved(tmp_path, _POISSON)
    lines = [f"{NAMED}{client},{i}" for i, cohort in enumerate(_DRAWN) for client in cohort]
    ledger = flag_of_ledger(tmp_path, "\n".join(lines))
    fields = fields_of_report(flag, ledger)
    assert fields["keeps_plan"] is None
    assert fields["sampling"] == _POISSON.to_dict()
    assert fields["amplified_epsilon"] == pytest.approx(_POISSON.epsilon(1.0, 1e-5))
    assert fields["worst_client_num_rounds"] is None
    # Client 0 in two rounds in a row, of two parts.
    broken = flag_of_ledger(tmp_path, "\n".join([f"{NAMED}0,1", *lines]))
    ended = console_commands.call("mf-report", flag, broken, "--delta=1e-5", "--format=json")
    assert ended.fields(1)["amplified_epsilon"] is None
    assert NAMED not in ended.printed
    # Nothing shows who was drawn, or when somebody could have been.
    times = tmp_path / "times.csv"
    times.write_text(
        "\n".join(f"{i},{10**9 + 3600 * i},{10**9 + 3600 * i + 60}" for i in range(12))
    )
    words = (
        *("public_data=none", "enforcement=Drawn.", "population=12", "clients_per_round=1"),
        "clip_norm=1",
    )
    statement = f"--statement={tmp_path / 'PRIVACY.md'}"
    complete = flag_of_ledger(tmp_path, "\n".join([*lines, f"{NAMED}3,11"]))
    for wrong, why in (
        ([complete, statement, *(f"--{each}" for each in words)], "--sampling_seed"),
        ([f"--round_times={times}", "--timer_hours=2"], "do not show the draws of poisson"),
    ):
        console_commands.call("mf-report", flag, "--delta=1e-5", *wrong).refused(why)


def test_no_ledger_changes_how_the_clients_of_a_mechanism_were_drawn(
    tmp_path: pathlib.Path,
) -> None:
    """The guarantee was planned for other draws."""
    flags = _drawn(tmp_path, PoissonSampling(12, 4, 12, 2), 2**100 + 17)
    planned = (_POISSON, MinSeparation(4))
    for participation in planned:
        flag = _saved(tmp_path, participation)
        ended = console_commands.call("mf-report", flag, *flags, "--delta=1e-5", "--format=json")
        assert ended.errors == ""
        seen = mfa.load(tmp_path / "mechanism").observed(
            tmp_path / "participation.npz", sampling_seed=2**100 + 17
        )
        fields = ended.fields(0 if seen.keeps_participation else 1)
        assert fields["keeps_plan"] is seen.keeps_participation
        assert fields["realised_epsilon"] == pytest.approx(seen.guarantee(1e-5).epsilon)
        assert fields.get("amplified_epsilon") is None


def test_other_units_of_drawn_clients_have_every_draw(tmp_path: pathlib.Path) -> None:
    """Three participations of columns that are orthogonal, and who was drawn stays a secret."""
    file = tmp_path / "people.csv"
    file.write_text("".join(f"person {i // 2},{NAMED}{i}\n" for i in range(12)))
    flags = (_sampled_ledger(tmp_path, _DRAWN, _POISSON), f"--people={file}", "--id_window=12")
    fields = _call(tmp_path, _POISSON, *flags, "--format=json").fields()
    for name, expected in (("window", 1.0), ("device", 1.0), ("person_planned", 2.0)):
        assert fields[f"{name}_sensitivity"] == pytest.approx(expected * math.sqrt(3.0))
    assert fields["person_realised_epsilon"] is None
    assert fields["person_planned_epsilon"] > fields["window_epsilon"]
