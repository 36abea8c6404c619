"""mf-report --statement and --verify: a statement for a run that was trained anywhere."""

import copy
import dataclasses
import datetime
import errno
import functools
import hashlib
import hmac
import json
import os
import pathlib
import re
import shutil
import tempfile
from typing import Any

import numpy as np
import pytest

from mf_aggregators import accounting, checkpoints, random_streams, workloads
from mf_aggregators.commands import stated_runs
from mf_aggregators.factorizations import banded, identity
from mf_aggregators.kernel.numbers import rounded_up
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import MinSeparation, PoissonSampling, SingleParticipation
from mf_aggregators.privacy import statement_file
from simulations.runs.run_directory import ParticipationLedger
from tests import console_commands

_FACTS = (
    "--public_data=none",
    "--enforcement=Each device keeps a timer of 4 rounds.",
    "--population=40",
    "--clients_per_round=10",
    "--clip_norm=0.5",
)
_NOISE = ("--noise_multiplier=1.0", "--delta=1e-6")
# Of a ledger: who took part in the rounds in which neither a nor b did.
_OTHERS = "".join(f"client {i},{i}\n" for i in (2, 3, 4, 6, 7, 8, 9, 10))


_call = functools.partial(console_commands.call, "mf-report")


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder with a checkpoint and a ledger, in which commands run."""
    path = tmp_path / "run"
    path.mkdir()
    factorization = banded(workloads.prefix_sum(12), 4)
    checkpoints.save(factorization, path / "banded", participation=MinSeparation(4))
    (path / "rounds.csv").write_text(f"client,round\na,0\nb,1\na,5\nb,11\n{_OTHERS}")
    (path / "model.bin").write_bytes(b"the final model")
    monkeypatch.chdir(path)
    return path


def _write(*more: str) -> None:
    _call(
        *("--checkpoint=banded", *_NOISE, "--ledger=rounds.csv", "--statement=PRIVACY.md"),
        *(*_FACTS, "--evidence=model.bin", *more),
    ).done()


def _verified(path: str) -> list[str]:
    status, out, err = _call(f"--verify={path}", "--format=json")
    assert status in (0, 1), err
    fields = json.loads(out)
    assert fields["is_verified"] == (status == 0) == (not fields["differences"])
    found: list[str] = fields["differences"]
    return found


def _stated(folder: pathlib.Path, name: str = "PRIVACY.json") -> dict[str, Any]:
    return statement_file.read(folder / name)


def test_a_statement_has_what_was_said_and_what_follows(folder: pathlib.Path) -> None:
    said = ("--responsible=Jane Doe", "--custody=Kept in a vault.", "--secure_aggregation=no")
    _write(*said, "--finished=yes")
    text, data = (folder / "PRIVACY.md").read_text(), _stated(folder)
    assert "The run is finished (told by Jane Doe)." in text
    assert "(its rounds have 1 rows" not in text
    assert "complete: its rounds have 1 rows on average, and the run is said" in text
    for fact in (
        "| custody | Kept in a vault. | told by Jane Doe |",
        "| enforcement | Each device keeps a timer of 4 rounds. | told by Jane Doe |",
        "| model | not stated | not stated |",
        "| server saw sums of updates alone | no | told by Jane Doe |",
    ):
        assert fact in text
    digest = hashlib.sha256(b"the final model").hexdigest()
    assert f"`model.bin` {digest}" in text
    assert "40 clients of the population is 4e-05" in text
    day = datetime.datetime.now(datetime.timezone.utc).date()
    days = (day, day - datetime.timedelta(days=1))
    assert data["date"] in [each.isoformat() for each in days]
    assert data["planned"]["epsilon"] == rounded_up(accounting.epsilon(1.0, 1e-6), ".6g")
    assert data["status"] == "finished"
    assert data["participation"]["observed"]["separation"] == 5
    assert set(data["files"]) == {
        *("banded/arrays.npz", "banded/factorization.json", "rounds.csv", "model.bin")
    }
    told = _call("--verify=PRIVACY.md", "--format=json").fields()["told"]
    assert told["facts.population"] == 40
    assert told["flags.noise_multiplier"] == "1.0"
    assert "flags.population" not in told


def test_a_ledger_that_is_no_file_is_refused(folder: pathlib.Path) -> None:
    """A pipe has no contents that anybody could read again."""
    os.mkfifo(folder / "pipe")
    for path in ("pipe", "/dev/stdin"):
        _call(
            *("--checkpoint=banded", *_NOISE, f"--ledger={path}", "--statement=PRIVACY.md"),
            *_FACTS,
        ).refused(f"--ledger={path} is not a regular file")


def test_a_statement_is_verified_wherever_its_folder_goes(
    folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write()
    assert _verified("PRIVACY.md") == []
    monkeypatch.chdir(tmp_path)
    shutil.move(folder, tmp_path / "archive")
    assert _verified("archive/PRIVACY.md") == []


def test_a_statement_with_counts_is_verified_with_them(folder: pathlib.Path) -> None:
    facts = [each for each in _FACTS if not each.startswith("--clients")]
    _call(
        *("--checkpoint=banded", *_NOISE, "--ledger=rounds.csv", "--statement=PRIVACY.md"),
        *(*facts, "--clients_per_round=1", "--round_counts=counts.csv"),
    ).refused("counts.csv")
    (folder / "counts.csv").write_text(12 * "1\n")
    _write("--clients_per_round=1", "--round_counts=counts.csv")
    stated = _stated(folder)
    assert stated["flags"]["round_counts"] == "counts.csv"
    assert stated["headline"]["guarantee"] == "planned"
    assert float(stated["observed"]["epsilon"]) < float(stated["planned"]["epsilon"])
    assert stated["participation"]["observed"]["gap"] is None
    assert _verified("PRIVACY.md") == []
    (folder / "counts.csv").write_text(11 * "1\n" + "2\n")
    (found,) = _verified("PRIVACY.md")
    assert found.startswith("counts.csv is another file")


@pytest.mark.parametrize(
    ("file", "old", "new", "found"),
    [
        ("rounds.csv", "a,5", "a,4", "rounds.csv is another file"),
        ("model.bin", "final", "first", "model.bin is another file"),
        ("banded/factorization.json", "{", "{ ", "banded/factorization.json is another file"),
        ("PRIVACY.md", "population of 40", "population of 400", "is not the text that follows"),
        ("PRIVACY.json", '"value": 40', '"value": 41', "facts.population.value is 41"),
        ("PRIVACY.json", '"1.0"', '"1.2"', "planned.epsilon is"),
        ("PRIVACY.json", '"delta": "1e-06",\n  "enf', '"delta": "1e-07",\n  "enf', "planned.delta"),
    ],
)
def test_whatever_was_changed_is_found(
    folder: pathlib.Path, file: str, old: str, new: str, found: str
) -> None:
    _write()
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    assert any(found in each for each in _verified("PRIVACY.md"))


def test_a_file_that_is_gone_is_named(folder: pathlib.Path) -> None:
    _write()
    (folder / "model.bin").unlink()
    assert _verified("PRIVACY.md") == ["model.bin is not there."]
    # Who waits for a pipe may wait for ever.
    os.mkfifo(folder / "model.bin")
    assert _verified("PRIVACY.md") == ["model.bin is not there."]


def test_a_run_that_was_extended_says_so(folder: pathlib.Path) -> None:
    first = Mechanism(banded(workloads.prefix_sum(8), 2), MinSeparation(4, 2), 1.0)
    first.extended(12, MinSeparation(4)).save(folder / "extended")
    _call(
        *("--checkpoint=extended", "--delta=1e-6", "--ledger=rounds.csv"),
        *("--statement=PRIVACY.md", *_FACTS),
    ).done()
    assert [plan["num_rounds"] for plan in _stated(folder)["earlier_plans"]] == [8]
    assert "planned before the run was extended.*" in (folder / "PRIVACY.md").read_text()
    assert _verified("PRIVACY.md") == []


@pytest.mark.parametrize("left_out", [*_FACTS, "--ledger=rounds.csv"])
def test_what_nobody_said_is_not_asserted(folder: pathlib.Path, left_out: str) -> None:
    given = [each for each in (*_FACTS, "--ledger=rounds.csv") if each != left_out]
    _call("--checkpoint=banded", *_NOISE, *given, "--statement=PRIVACY.md").refused(
        left_out.split("=")[0]
    )
    assert not (folder / "PRIVACY.md").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--statement=PRIVACY.txt", *_FACTS), ".md"),
        (("--statement=banded/PRIVACY.md", *_FACTS), "--statement"),
        (("--statement=PRIVACY.md", *_FACTS, "--population=0"), "--population"),
        (("--statement=PRIVACY.md", *_FACTS, "--clip_norm=nan"), "--clip_norm"),
        (("--statement=PRIVACY.md", *_FACTS, "--evidence=nowhere"), "--evidence"),
        (("--statement=PRIVACY.md", *_FACTS, "--other_runs=banded,banded"), "twice"),
        # The last one alone would be composed with.
        (
            ("--statement=PRIVACY.md", *_FACTS, "--other_runs=a", "--other_runs=b"),
            "--other_runs is given twice, and only the last one would count",
        ),
        (("--other_runs=banded",), "--other_runs needs --statement"),
        (("--verify=PRIVACY.md",), "leave out"),
        # Words that would begin lines of their own, that nobody sees, or that are none.
        *(
            (
                (
                    "--statement=PRIVACY.md",
                    *(fact for fact in _FACTS if not fact.startswith(f"--{flag}=")),
                    f"--{flag}={text}",
                ),
                f"--{flag} must be a text",
            )
            for flag in ("public_data", "enforcement", "responsible", "model", "period", "custody")
            for text in ("none.\n\n# Verified", " ", "\u202eabc")
        ),
        (
            ("--statement=PRIVACY.md", *_FACTS, "--population=1", "--clients_per_round=1"),
            "--population=1 is less than the 10 clients",
        ),
        # Before anything is written.
        (
            ("--statement=PRIVACY.md", *_FACTS, "--evidence=drawn.npz", "--figure=curve.png"),
            "--evidence=drawn.npz is the ledger of a run with sampled clients",
        ),
        # Files that are read, or written twice.
        (("--statement=model.md", *_FACTS, "--evidence=model.json"), "--statement would replace"),
        (("--figure=model.png", "--sampling_seed=model.png"), "--figure would replace"),
        (("--statement=folder.md", *_FACTS), "--statement=folder.md is a directory"),
        (("--figure=folder.png",), "--figure=folder.png is a directory"),
    ],
)
def test_bad_flags_of_a_statement_are_one_line(
    folder: pathlib.Path, arguments: tuple[str, ...], named: str
) -> None:
    for name in ("folder.md", "folder.png"):
        (folder / name).mkdir()
    for name in ("model.json", "model.png"):
        (folder / name).write_text("mine")
    np.savez(folder / "drawn.npz", client_ids=np.array(["a"]), sampling=np.array("{}"))
    # Replacing a file is one thing, replacing what is read another.
    overwrite = ("--overwrite",) if "--verify=PRIVACY.md" not in arguments else ()
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    _call("--checkpoint=banded", *_NOISE, "--ledger=rounds.csv", *arguments, *overwrite).refused(
        named
    )
    assert before == {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("noise", "schema", "named"),
    [
        # A target would be met anew, with less noise, under whatever is declared.
        ("--target_rho=0.5", "--separation=4", "--target_rho"),
        ("--target_epsilon=8", "--separation=4", "--target_epsilon"),
        # And so would a multiple of a larger sensitivity than the planned one.
        ("--noise_multiplier=1", "--separation=3", "planned schema"),
    ],
)
def test_a_statement_is_of_the_noise_that_the_run_had(
    folder: pathlib.Path, noise: str, schema: str, named: str
) -> None:
    arguments = ("--checkpoint=banded", schema, "--ledger=rounds.csv", "--delta=1e-6", *_FACTS)
    _call(*arguments, noise, "--statement=PRIVACY.md").refused(named)
    assert not (folder / "PRIVACY.md").exists()
    # A plan with more time between participations has less noise for its multiplier.
    _call(*arguments, "--separation=6", "--noise_multiplier=1", "--statement=PRIVACY.md").done(1)


def test_a_statement_that_is_damaged_is_one_line(folder: pathlib.Path) -> None:
    _write()
    file = folder / "PRIVACY.json"
    whole = json.loads(file.read_text())
    changes: list[tuple[tuple[str, ...], Any]] = [
        (("flags", "ledger"), 7),
        (("flags", "evidence"), "model.bin"),
        (("flags", "other_runs"), [None]),
        (("flags", "population"), "many"),
        (("flags", "statement"), "other.md"),
        (("flags", "nonsense"), "1"),
        (("flags",), {"population": "40"}),
        (("key_files",), None),
        (("files",), []),
    ]
    for (*keys, last), value in changes:
        changed = copy.deepcopy(whole)
        inner = changed
        for key in keys:
            inner = inner[key]
        inner[last] = value
        file.write_text(statement_file.canonical(changed))
        assert _call("--verify=PRIVACY.md").refused().startswith("mf-report: --verify: "), last


def test_verifying_needs_no_place_to_write_and_no_other_output(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a medium that is read-only, wherever a figure went."""
    (folder / "figures").mkdir()
    _write("--figure=figures/figure.png")
    shutil.rmtree(folder / "figures")

    def no_place(*unused: Any, **also_unused: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "mkdtemp", no_place)
    assert _verified("PRIVACY.md") == []


@pytest.mark.parametrize("text", ["[]", "null", "3", "{}", '{"library_version": "2.0.0"}'])
def test_a_run_directory_of_something_else_is_one_line(folder: pathlib.Path, text: str) -> None:
    (folder / "PRIVACY.md").write_text("# Privacy statement")
    (folder / "privacy.json").write_text(text)
    assert _call("--verify=PRIVACY.md").refused().startswith("mf-report: --verify: ")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2, "flags": {}}'])
def test_what_is_no_statement_is_one_line(folder: pathlib.Path, text: str) -> None:
    (folder / "mine.md").write_text("# Privacy statement")
    for _ in range(2):
        _call("--verify=mine.md").refused("mine.json")
        (folder / "mine.json").write_text(text)


def test_nothing_is_replaced_unless_asked(folder: pathlib.Path) -> None:
    (folder / "PRIVACY.json").write_text("mine")
    arguments = ("--checkpoint=banded", *_NOISE, "--ledger=rounds.csv", *_FACTS)
    _call(*arguments, "--statement=PRIVACY.md").refused("--overwrite")
    assert (folder / "PRIVACY.json").read_text() == "mine"
    _write("--overwrite")
    assert _verified("PRIVACY.md") == []


def test_a_statement_of_times_names_nobody_and_says_what_it_rests_on(folder: pathlib.Path) -> None:
    hours = [1_770_000_000 + 3600 * number for number in range(13)]
    lines = [f"{number},{hours[number]},{hours[number + 1]}" for number in range(12)]
    (folder / "times.csv").write_text("\n".join(lines))
    arguments = ("--checkpoint=banded", *_NOISE, "--round_times=times.csv", "--timer_hours=6")
    _call(*arguments, *_FACTS, "--statement=PRIVACY.md").done()
    text, data = (folder / "PRIVACY.md").read_text(), _stated(folder)
    assert "if each device accepts no request within 6 hours" in text
    assert data["participation"]["observed"]["num_clients"] is None
    assert "times.csv" in data["files"]
    assert "By the times of 12 released rounds, a client could take part at most" in text
    assert _verified("PRIVACY.md") == []
    (folder / "times.csv").write_text((folder / "times.csv").read_text().replace("11,", "011,"))
    assert any("times.csv" in each for each in _verified("PRIVACY.md"))


def test_a_statement_counts_other_runs_and_is_verified_with_them(folder: pathlib.Path) -> None:
    once = Mechanism(identity(3), SingleParticipation(), 0.5)
    once.save(folder / "other")
    _write("--other_runs=other")
    data = _stated(folder)
    # rho 0.5 and 2: squares of 1 / sigma add up.
    expected = accounting.epsilon(5.0**-0.5, 1e-6)
    assert data["other_runs"]["names"] == ["other"]
    assert float(data["other_runs"]["epsilon"]) == pytest.approx(expected, rel=1e-3)
    assert "other/mechanism.json" in data["files"]
    assert _verified("PRIVACY.md") == []
    less = dataclasses.replace(once, noise_multiplier=0.4)
    less.save(folder / "other")
    found = _verified("PRIVACY.md")
    assert any("other/mechanism.json is another file" in each for each in found)


def test_other_runs_of_a_file_are_in_the_headline(folder: pathlib.Path) -> None:
    """A pair of another library, and a statement of this one."""
    _write()
    os.rename("PRIVACY.md", "first.md")
    os.rename("PRIVACY.json", "first.json")
    runs: list[dict[str, Any]] = [
        {"name": "last year", "source": "its report", "epsilon": 3, "delta": 1e-8},
        {"name": "first", "source": "its statement", "statement": "first.json"},
    ]
    given = {"format": stated_runs.FORMAT, "unit": "client", "adjacency": "zero-out", "runs": runs}
    (folder / "others.json").write_text(json.dumps(given))
    _write("--other_runs=others.json")
    document, text = _stated(folder), (folder / "PRIVACY.md").read_text()
    together = document["other_runs"]
    assert together["names"] == ["last year (its report)", "first (its statement)"]
    assert together["delta"] == "1.01e-06"
    # The pair adds 3 to two Gaussian mechanisms.
    expected = 3.0 + accounting.epsilon(2.0**-0.5, 1e-6)
    assert float(together["epsilon"]) == pytest.approx(expected, rel=1e-2)
    pair = f"**({together['epsilon']}, 1.01e-06)-differential privacy** of all together"
    assert pair in text.partition("1. **DP setting.**")[0]
    assert {"others.json", "first.json"} <= set(document["files"])
    assert _verified("PRIVACY.md") == []
    runs[0]["epsilon"] = 2
    (folder / "others.json").write_text(json.dumps(given))
    assert any("others.json is another file" in each for each in _verified("PRIVACY.md"))


def test_batches_of_a_sampler_need_its_seed(folder: pathlib.Path) -> None:
    scheme = PoissonSampling(12, 4, 40, 2)
    sampler = scheme.sampler(1)
    cohorts = tuple(sampler.draw(number) for number in range(12))
    names = tuple(f"client {number}" for number in range(40))
    ParticipationLedger(names, cohorts, scheme).save("participation.npz")
    Mechanism(banded(workloads.prefix_sum(12), 4), scheme, 1.0).save(folder / "drawn")
    arguments = ("--checkpoint=drawn", "--delta=1e-6", "--ledger=participation.npz", *_FACTS)
    _call(*arguments, "--statement=PRIVACY.md").refused("--sampling_seed")
    random_streams.save_seed(1, folder / "sampling_seed.json")
    _call(*arguments, "--statement=PRIVACY.md", "--sampling_seed=sampling_seed.json").done()
    basis = "the draws: checked by the sampler's seed; that they stay secret: not checked"
    assert basis in (folder / "PRIVACY.md").read_text().partition("1. **DP setting.**")[0]
    assert _verified("PRIVACY.md") == []
    # What was said of enforcement is there, and nothing confirms a guess of who was drawn.
    texts = [(folder / name).read_text() for name in ("PRIVACY.md", "PRIVACY.json")]
    assert "Each device keeps a timer of 4 rounds." in texts[0]
    for secret in ("participation.npz", "sampling_seed.json"):
        digest = hashlib.sha256((folder / secret).read_bytes()).hexdigest()
        assert not any(digest in text for text in texts)
    # Nor by another name, as a copy or a link, in a folder or as evidence.
    secrets = ("participation.npz", "sampling_seed.json")
    for secret in secrets:
        (folder / f"copy of {secret}").write_bytes((folder / secret).read_bytes())
        (folder / "drawn" / secret).symlink_to(folder / secret)
    copies = [f"--evidence=copy of {secret}" for secret in secrets]
    given = ("--sampling_seed=sampling_seed.json", "--evidence=model.bin", *copies)
    _call(*arguments, "--statement=again.md", *given).done()
    files = _stated(folder, "again.json")["files"]
    assert {"model.bin", "drawn/arrays.npz", "participation.npz"} <= set(files)
    assert f"copy of {secrets[1]}" not in files
    for secret in secrets:
        assert hashlib.sha256((folder / secret).read_bytes()).hexdigest() not in files.values()
    assert _verified("again.md") == []
    # The ledger of another run is as secret, and its hash has the same key.
    ParticipationLedger(names, cohorts[::-1], scheme).save("other.npz")
    _call(*arguments, "--statement=third.md", *given, "--evidence=other.npz").done()
    stated = _stated(folder, "third.json")
    other, key = (folder / "other.npz").read_bytes(), (folder / secrets[1]).read_bytes()
    assert stated["files"]["other.npz"] == hmac.digest(key, other, "sha256").hex()
    assert hashlib.sha256(other).hexdigest() not in (folder / "third.json").read_text()
    assert {"participation.npz", "other.npz"} <= set(stated["key_files"])
    assert _verified("third.md") == []
    ParticipationLedger(names, cohorts, scheme).save("other.npz")
    assert any("other.npz is another" in each for each in _verified("third.md"))
    # Without secret bits of its own, a statement has no key for it.
    of_timers = ("--checkpoint=banded", *_NOISE, "--ledger=rounds.csv", *_FACTS)
    _call(*of_timers, "--statement=timers.md", "--evidence=copy of participation.npz").refused(
        "--other_runs"
    )
    assert not (folder / "timers.md").exists()
    random_streams.save_seed(2, folder / "sampling_seed.json")
    assert any("participation.npz is another" in each for each in _verified("PRIVACY.md"))


def test_a_statement_has_other_units_and_is_verified_with_them(folder: pathlib.Path) -> None:
    """A client in a window, a device in all of them, and people with a client more than most."""
    (folder / "rounds.csv").write_text(f"client,round\na,0\na,5\nb,5\nb2,11\n{_OTHERS}")
    (folder / "counts.csv").write_text("1\n0\n1\n1\n1\n2\n1\n1\n1\n1\n1\n1\n")
    people = "".join(f"c{i},client {i}\n" for i in (2, 3, 4, 6, 7, 8, 9, 10))
    (folder / "people.csv").write_text(f"person,client\nada,a\nada,b\nbo,b2\n{people}")
    facts = [each for each in _FACTS if "clients_per_round" not in each]
    flags = ("--round_counts=counts.csv", "--id_window=6", "--people=people.csv")
    _call(
        *("--checkpoint=banded", *_NOISE, "--ledger=rounds.csv", "--statement=PRIVACY.md"),
        *(*facts, "--clients_per_round=1", *flags),
    ).done()
    window, device, planned, realised = _stated(folder)["units"]
    text = (folder / "PRIVACY.md").read_text()
    for unit in (window, device, planned, realised):
        assert f"For {unit['who']}, and for no larger unit: ({unit['epsilon']}, 1e-06)-DP" in text
        assert text.index(f"{unit['who']}: ({unit['epsilon']}, 1e-06)-DP") < text.index("| basis |")
    assert window["who"] == "each client in a window of 6 rounds"
    assert planned["who"] == "each person with 2 clients"
    # Round 0 once and round 5 twice, in columns that are orthogonal.
    assert float(realised["sensitivity"]) == pytest.approx(5.0**0.5, rel=1e-5)
    assert "No person has other clients" in " ".join(realised["assumptions"])
    epsilons = [float(unit["epsilon"]) for unit in (window, device, planned)]
    assert epsilons == sorted(epsilons)
    assert not {"ada", "bo"} & set(re.findall(r"\w+", text))
    assert _verified("PRIVACY.md") == []
    (folder / "people.csv").write_text(f"person,client\nada,a\nbo,b\nbo,b2\n{people}")
    assert "people.csv is another file" in " ".join(_verified("PRIVACY.md"))
