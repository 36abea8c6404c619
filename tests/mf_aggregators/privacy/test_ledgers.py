"""Ledgers, times of rounds and names: what is written is read, and what is broken is refused."""

import dataclasses
import io
import pathlib
import sys
import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import accounting
from mf_aggregators.factorizations import banded, blt, toeplitz
from mf_aggregators.kernel.ledger import ObservedParticipation
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import (
    FixedSizeSampling,
    MinSeparation,
    PoissonSampling,
    SingleParticipation,
)
from mf_aggregators.privacy import ledgers
from mf_aggregators.privacy.ledgers import Ledger, LedgerError, RoundTimes
from simulations.devices.device_behaviour import (
    Always,
    Availability,
    DeviceBehaviour,
    Diurnal,
    Independent,
)
from simulations.devices.device_populations import DevicePopulation, TooFewEligibleClientsError
from simulations.devices.reference_timer import Device, Policy, Request
from simulations.runs.run_directory import ParticipationLedger
from tests import flipped_bits
from tests.examples import examples
from tests.mf_aggregators import small_mechanisms
from tests.mf_aggregators.small_mechanisms import plan_of
from tests.refusals import refuses


def test_the_ledger_of_a_run_is_read(tmp_path: pathlib.Path) -> None:
    ledger = ParticipationLedger(
        ("ada", "bo", "cy"), (np.array([0, 2]), np.array([1]), np.array([0]))
    )
    ledger.save(tmp_path / "participation.npz")
    record = ledgers.load(tmp_path / "participation.npz", 99)
    assert record.client_ids == ("ada", "bo", "cy")
    assert [list(rounds) for rounds in record.rounds_of_clients] == [[0, 2], [1], [0]]
    assert record.num_rounds == 3
    assert record.sampling is None


def _read(directory: pathlib.Path, contents: bytes, num_rounds: int = 6) -> dict[str, list[int]]:
    file = directory / "rounds.csv"
    file.write_bytes(contents)
    record = ledgers.load(file, num_rounds)
    assert record.num_rounds == num_rounds
    assert record.sampling is None
    return {
        client: rounds.tolist()
        for client, rounds in zip(record.client_ids, record.rounds_of_clients, strict=True)
    }


def test_names_are_compared_as_they_are_written(tmp_path: pathlib.Path) -> None:
    """No case folding, no normal form, no numbers: what differs in writing is another client."""
    names = ["ada", "Ada", "e\u0301", "\u00e9", "7", "07", "'ada'"]
    names += ['a "b" c', "a, b", "a;b", "client"]
    quoted = ['"' + name.replace('"', '""') + '"' for name in names]
    contents = "".join(f"{name},{index % 6}\n" for index, name in enumerate(quoted))
    found = _read(tmp_path, contents.encode())
    assert found == {name: [index % 6] for index, name in enumerate(names)}


# Each is one line, the second of a file whose first is a record.
_REFUSED_LINES = {
    "a round that is a decimal number": b"bo,1.0",
    "a round with a sign": b"bo,+1",
    "a negative round": b"bo,-2",
    "a round in Arabic digits": "bo,\u0661".encode(),
    "no round": b"bo,",
    "digits apart": b"bo,1 2",
    "a round after the last": b"bo,6",
    "a round that no 64 bits hold": b"bo,18446744073709551616",
    "a round of more digits than Python reads": b"bo," + b"9" * 5000,
    "one field": b"bo",
    "three fields": b"bo,1,2",
    "no comma but a tabulator": b"bo\t1",
    "a comment": b"# of the second day",
    "a second heading": b"client,round",
    "a client without a name": b",1",
    "a mark within the file, as where files were joined": b"\xef\xbb\xbfbo,1",
    "a name with an invisible character": "b\u200bo,1".encode(),
    "a quote that is not closed": b'"bo,1',
    "a quote within a field": b'b"o",1',
    "text after a quote": b'"b"o,1',
    "a record that was written twice": b"ada,0",
    "a record that was written twice in another form": b'"ada", 00',
}


@pytest.mark.parametrize("line", _REFUSED_LINES.values(), ids=_REFUSED_LINES.keys())
def test_a_line_that_is_no_record_is_refused_and_named(tmp_path: pathlib.Path, line: bytes) -> None:
    for before, number in ((b"ada,0\n", 2), (b"client,round\r\n\r\nada,0\r\n", 4)):
        for after in (b"", b"\n", b"\ncy,2\n", b'\ncy",2\n'):
            with refuses(f"line {number}", error=ledgers.LedgerError):
                _read(tmp_path, before + line + after)


@pytest.mark.parametrize(
    "line",
    [
        b"alice,0.0",
        b"alice,-1",
        b"round,client",
        b"client",
        b"client,round,model",
        b"client;round",
        b"\xef\xbb\xbf\xef\xbb\xbfalice,0",
    ],
)
def test_a_first_line_that_is_neither_record_nor_known_heading_is_refused(
    tmp_path: pathlib.Path, line: bytes
) -> None:
    """It may be a client's first round, which must not be lost for a heading."""
    with refuses("line 1", error=ledgers.LedgerError):
        _read(tmp_path, line + b"\nalice,3\nbo,1\n")


@pytest.mark.parametrize("contents", [b"", b"client,round\n", b"\n \n", b"\xef\xbb\xbf"])
def test_a_file_without_a_record_is_refused(tmp_path: pathlib.Path, contents: bytes) -> None:
    with refuses("rounds.csv", "participation", error=ledgers.LedgerError):
        _read(tmp_path, contents)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"])
def test_text_in_another_encoding_is_refused(tmp_path: pathlib.Path, encoding: str) -> None:
    with pytest.raises(ledgers.LedgerError, match=r"UTF-8|line 1:"):
        _read(tmp_path, "client,round\nad\u00e9,1\nbo,1\n".encode(encoding))


@given(
    records=st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
        .map(str.strip)
        .filter(lambda name: ledgers._hidden_character(name) is None)
        .filter(bool),
        st.lists(st.integers(0, 40), min_size=1, max_size=5, unique=True),
        min_size=1,
        max_size=5,
    ),
    mark=st.booleans(),
    heading=st.sampled_from(["", "client,round", "Client_ID, round", '"user","ROUND_INDEX"']),
    line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    last_line_ends=st.booleans(),
    data=st.data(),
)
@settings(max_examples=examples(200), deadline=None)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    records: dict[str, list[int]],
    mark: bool,
    heading: str,
    line_end: str,
    last_line_ends: bool,
    data: st.DataObject,
) -> None:
    def field(text: str) -> str:
        needs_quotes = any(character in text for character in '",')
        if needs_quotes or data.draw(st.booleans(), "quoted"):
            text = '"' + text.replace('"', '""') + '"'
        spaces = st.sampled_from(["", " ", "\t", "  "])
        return data.draw(spaces, "before") + text + data.draw(spaces, "after")

    lines = [heading] if heading else []
    pairs = [(client, index) for client, rounds in records.items() for index in rounds]
    for client, index in data.draw(st.permutations(pairs), "order"):
        lines.append(f"{field(client)},{field(str(index))}")
        if data.draw(st.integers(0, 5), "blank") == 0:
            lines.append("")
    text = line_end.join(lines) + (line_end if last_line_ends else "")
    contents = text.encode("utf-8-sig" if mark else "utf-8")
    found = _read(tmp_path_factory.mktemp("text"), contents, 41)
    assert found == {client: sorted(rounds) for client, rounds in records.items()}


def test_a_damaged_ledger_of_drawn_clients_stays_a_secret(tmp_path: pathlib.Path) -> None:
    scheme = FixedSizeSampling(num_rounds=4, num_bands=2, population=8, clients_per_round=2)
    file = tmp_path / "participation.npz"
    ledgers.Ledger(("ada",), (np.array([0]),), 4, scheme).save(file)
    found = [ledgers.is_of_drawn_clients(file) for _ in flipped_bits.flipped(file)]
    # The others are no archives any more, or have other names.
    assert sum(found) > len(found) / 2
    file.write_bytes(file.read_bytes()[:-9])
    assert ledgers.is_of_drawn_clients(file)


def test_damaged_archives_are_refused(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "participation.npz"
    with refuses("participation.npz", error=ledgers.LedgerError):
        ledgers.load(file, 6)
    ledger = ParticipationLedger(("ada", "bo"), (np.array([0, 1]),))
    ledger.save(file)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with refuses("participation.npz", error=ledgers.LedgerError):
        ledgers.load(file, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": [0.9, 3.0, 1.0]}, "do not fit together"),
        ({"offsets": [0.0, 2.0, 3.0]}, "cannot be read as a ledger"),
        ({"num_rounds": 4.9}, "cannot be read as a ledger"),
        ({"num_rounds": -1}, "num_rounds must be at least 0"),
        ({"num_rounds": 3}, "do not fit together"),
        ({"rounds": [3, 0, 1]}, "do not fit together"),
        ({"rounds": [3, 3, 1]}, "do not fit together"),
        ({"rounds": [-1, 3, 1]}, "do not fit together"),
        ({"rounds": [[0, 1], [3, 4], [1, 5]]}, "do not fit together"),
        ({"client_ids": [["ada", "x"], ["bo", "y"]]}, "do not fit together"),
        ({"client_ids": [0.5, 1.5]}, "texts or integers, found float64"),
        ({"client_ids": [True, False]}, "texts or integers, found bool"),
        ({"client_ids": [b"ada", b"\xff"]}, "cannot be read as a ledger"),
        ({"offsets": [1, 2, 3]}, "do not fit together"),
        ({"offsets": [0, 2, 4]}, "do not fit together"),
        ({"offsets": [0, 1, 2]}, "do not fit together"),
        ({"sampling": '{"name": "whim"}'}, "record.npz .*whim"),
        (
            {"client_ids": ["ada", "bo", "cy"], "offsets": [0, 2, 1, 3], "rounds": [0, 3, 4]},
            "do not fit together",
        ),
    ],
)
def test_arrays_that_are_no_record_are_refused(
    tmp_path: pathlib.Path, changes: dict[str, object], message: str
) -> None:
    lists = {"client_ids": ["ada", "bo"], "offsets": [0, 2, 3], "rounds": [0, 3, 1]}
    arrays = {name: np.array(each) for name, each in {**lists, "num_rounds": 6}.items()}
    np.savez(tmp_path / "record.npz", **arrays)
    record = ledgers.load(tmp_path / "record.npz", 6)
    assert [cohort.tolist() for cohort in record.cohorts()] == [[0], [1], [], [0], [], []]
    arrays |= {name: np.array(each) for name, each in changes.items()}
    np.savez(tmp_path / "record.npz", **arrays)
    with pytest.raises(ledgers.LedgerError, match=message):
        ledgers.load(tmp_path / "record.npz", 6)


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (np.array([2**64 - 1, 7], np.uint64), ("18446744073709551615", "7")),
        (np.array([-1, 7], np.int8), ("-1", "7")),
        (np.array(["ad\u00e9".encode(), b"bo"]), ("ad\u00e9", "bo")),
    ],
)
def test_clients_of_other_programs_are_named_by_texts(
    tmp_path: pathlib.Path, names: np.ndarray, read: tuple[str, str]
) -> None:
    file, offsets, rounds = tmp_path / "record.NPZ", np.arange(3), np.array([0, 1])
    with file.open("wb") as archive:
        np.savez(archive, client_ids=names, offsets=offsets, rounds=rounds, num_rounds=np.array(2))
    assert ledgers.load(file, 2).client_ids == read


@pytest.mark.parametrize("contents", ["3\n0\n62\n", "\ufeffclients\r\n3\r\n\r\n00\r\n 62 \r\n"])
def test_counts_of_rounds_are_read_in_every_form(tmp_path: pathlib.Path, contents: str) -> None:
    (tmp_path / "counts.csv").write_text(contents, encoding="utf-8")
    assert ledgers.round_counts(tmp_path / "counts.csv") == (3, 0, 62)


@pytest.mark.parametrize(
    ("name", "contents", "found"),
    [
        ("counts.csv", "3\nclients\n", "found 'clients'"),
        ("counts.csv", "0,3\n1,4\n", "line 1: expected one number"),
        ("counts.csv", "-3\n", "found '-3'"),
        ("counts.csv", "3\n\u0664\n", "line 2: expected one number"),
        ("counts.csv", "\xff\xfe3".encode("latin-1"), "counts.csv"),
        ("gone.csv", None, "cannot be read"),
    ],
)
def test_counts_that_mean_something_else_are_refused(
    tmp_path: pathlib.Path, name: str, contents: str | bytes | None, found: str
) -> None:
    if contents is not None:
        data = contents if isinstance(contents, bytes) else contents.encode("utf-8")
        (tmp_path / name).write_bytes(data)
    with refuses(name, found, error=ledgers.LedgerError):
        ledgers.round_counts(tmp_path / name)


@pytest.mark.parametrize("given", [{0: 3, 1: 0}, {3, 0}, b"counts.csv"])
def test_numbers_that_are_no_counts_in_order_are_refused(given: Any) -> None:
    with refuses("round_counts must be a list", type(given).__name__, error=TypeError):
        ledgers.round_counts(given)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"client_ids": ("ada", "ada")}, "two clients have the same name"),
        ({"client_ids": ("ada",)}, "1 client_ids and 2 rounds_of_clients"),
        ({"client_ids": ("ada", 3)}, "do not fit together"),
        ({"rounds_of_clients": (np.array([True]), np.array([2]))}, "do not fit together"),
        ({"rounds_of_clients": (np.array([0]), np.array([4]))}, "do not fit together"),
        ({"num_rounds": 4.0}, "num_rounds must be an integer"),
        ({"num_rounds": True}, "num_rounds must be an integer"),
        ({"num_rounds": -1}, "num_rounds must be at least 0"),
    ],
)
def test_a_ledger_that_is_made_is_checked_as_one_that_is_read(
    changes: dict[str, Any], said: str
) -> None:
    given: dict[str, Any] = {
        "client_ids": ("ada", "bo"),
        "rounds_of_clients": (np.array([0, 3]), np.array([], np.int64)),
        "num_rounds": 4,
    }
    assert len(Ledger(**given).cohorts()) == 4
    with refuses(said, error=LedgerError):
        Ledger(**{**given, **changes})


def test_a_ledger_keeps_what_was_checked() -> None:
    ledger = Ledger(["ada"], [[0, 2]], np.int64(3))  # type: ignore[arg-type]
    assert ledger.client_ids == ("ada",)
    assert ledger.rounds_of_clients[0].dtype == np.int64
    with refuses("sampling", error=TypeError):
        dataclasses.replace(ledger, sampling=MinSeparation(2))  # type: ignore[arg-type]


def test_hidden_characters_are_those_of_unicode() -> None:
    """Default_Ignorable_Code_Point (DerivedCoreProperties.txt, 14.0 to 17.0) and white space."""
    ranges = (
        *((0xAD, 0xAD), (0x34F, 0x34F), (0x61C, 0x61C), (0x115F, 0x1160), (0x17B4, 0x17B5)),
        *((0x180B, 0x180F), (0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F)),
        *((0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0)),
        *((0xFFF0, 0xFFF8), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF)),
    )
    ignorable = {code for first, last in ranges for code in range(first, last + 1)}
    # The number that the file ends its list with.
    assert len(ignorable) == 4174
    every = range(sys.maxunicode + 1)
    hidden = {code for code in every if ledgers._hidden_character(chr(code)) is not None}
    assert ignorable <= hidden
    others = hidden - ignorable
    spaces = {code for code in every if chr(code).isspace()} - {0x20}
    assert spaces <= others
    controls = {code for code in every if unicodedata.category(chr(code)) in ("Cc", "Cf")}
    blanks = {0x2800, 0x1D159, 0x13441, 0x13442, 0x16FE4}
    assert others == spaces | (controls - ignorable) | blanks
    for character in map(chr, hidden):
        assert ledgers._hidden_character(f"a{character}b") == character
        assert ledgers.num_alike_names(["ab", "a b", f"a{character}b"]) == 2
        assert ledgers.name_in_one_form(f"{character}a{character}") == "a"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("stra\u00dfe", "STRASSE"),
        ("\u00e9", "e\u0301"),
        ("\uff41\uff44\uff41\uff11", "ada1"),
        ("\u1e9b\u0323", "\u1e69"),
        ("\u0390", "\u1fd3"),
        ("a b", "a  b"),
        ("\u0345\u0301", "\u0301\u03b9"),
    ],
)
def test_names_that_look_alike_are_counted(one: str, other: str) -> None:
    assert ledgers.num_alike_names([one, other, "somebody", "else"]) == 2
    assert ledgers.num_alike_names([one, "somebody", "else"]) == 0


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=6))
def test_names_keep_what_they_fold_to(name: str) -> None:
    """One form and folding change nothing a second time, and see no case, width or normal form."""
    form, folded = ledgers.name_in_one_form(name), ledgers._folded(name)
    assert ledgers.name_in_one_form(form) == form
    assert ledgers._hidden_character(form) is None
    assert ledgers._folded(form) == folded
    assert ledgers._folded(folded) == folded
    normalize = unicodedata.normalize
    normal = [normalize("NFC", name), normalize("NFD", name)]
    normal += [normalize("NFKC", name), normalize("NFKD", name)]
    assert {ledgers._folded(each) for each in normal} == {folded}
    assert ledgers._folded(name.casefold()) == folded


@given(st.lists(st.text(max_size=3), max_size=4))
def test_a_ledger_keeps_the_names_that_pass(names: list[str]) -> None:
    """Against NumPy itself: what passes is written and read as it was."""
    try:
        ledgers.check_names(names)
    except ValueError:
        is_whole = all("\0" not in name and name.isprintable() for name in names)
        assert not is_whole or "" in names or len(set(names)) != len(names)
        return
    archive = io.BytesIO()
    np.savez(archive, names=np.array(names, dtype=np.str_))
    archive.seek(0)
    assert [str(each) for each in np.load(archive)["names"]] == names


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([1, 2], ["1", "int"]),
        (["a", None], ["NoneType"]),
        (["a", ""], ["empty"]),
        (["a", "b\0"], ["null"]),
        (["\ud83d", "\ude00"], ["surrogate"]),
        (["a", "b", "a"], ["clients", "name"]),
    ],
)
def test_names_that_no_ledger_keeps_are_refused(names: list[str], words: list[str]) -> None:
    # Texts of other libraries are names.
    ledgers.check_names(list(np.array(["a", "\u00e9"])))
    with refuses(*words):
        ledgers.check_names(names)


_HOUR = 3600.0


def _exact(starts: object, ends: object, hours: float, **others: object) -> RoundTimes:
    """Timers without drift and margin."""
    options = {"clock_drift": 0.0, "clock_margin_minutes": 0.0, **others}
    return RoundTimes(np.asarray(starts), np.asarray(ends), hours, **options)  # type: ignore[arg-type]


def _dated(seconds: float) -> str:
    return str(np.datetime64("2026-03-01T00:00:00") + np.timedelta64(int(seconds), "s"))


def test_a_file_of_times_is_read(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "times.csv"
    for heading, zone in (
        ("", "Z"),
        ("round,start,end\n", "+00:00"),
        ("\ufeffRound,Start,END\n", "z"),
    ):
        first, second, third = (f"{_dated(seconds)}{zone}" for seconds in (0, 3600, 9000))
        text = f"{heading}0,{first},{second}\n\n1,{second},{third}\n"
        file.write_text(text, encoding="utf-8")
        read = RoundTimes.load(file, 5.0, max_participations=2)
        assert list(read.starts - read.starts[0]) == [0.0, 3600.0]
        assert list(read.ends - read.starts[0]) == [3600.0, 9000.0]
        assert (read.timer_hours, read.max_participations) == (5.0, 2)
    file.write_text("0,1772323200,1772326800.5\n")
    assert list(RoundTimes.load(file, 5.0).ends) == [1772326800.5]


_ROUND = "0,2026-03-01T00:00:00Z,2026-03-01T01:00:00Z\n"
_BROKEN = {
    "no start": ("0,2026-03-01T01:00:00Z\n", "line 1"),
    "a round is missing": (f"{_ROUND}2{_ROUND[1:]}", "line 2"),
    "a round is there twice": (2 * _ROUND, "line 2"),
    "rounds from 1": (f"1{_ROUND[1:]}", "line 1"),
    "no UTC offset": (_ROUND.replace("Z", ""), "UTC"),
    "milliseconds": ("0,1772323200000,1772326800000\n", "1970"),
    "dates and seconds": (f"{_ROUND}1,1772326800,1772330400\n", "line 2"),
    "nan": ("0,nan,nan\n", "line 1"),
    "four fields": (f"{_ROUND.strip()},1\n", "line 1"),
    "nothing": ("", "times.csv"),
    "no UTF-8": ("\udcff\udcfe0\0", "times.csv"),
}


@pytest.mark.parametrize("what", _BROKEN)
def test_a_file_with_another_meaning_is_refused(what: str, tmp_path: pathlib.Path) -> None:
    text, named = _BROKEN[what]
    file = tmp_path / "times.csv"
    with refuses("times.csv", error=LedgerError):
        RoundTimes.load(file, 48.0)
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    with refuses(named, error=LedgerError):
        RoundTimes.load(file, 48.0)


def _observed_by_devices(seed: int) -> tuple[RoundTimes, list[list[int]]]:
    """Rounds at random times, and devices that ask and upload whenever they may, by the reference.

    Their clocks differ by up to a minute from the server's, which the margin covers twice.
    """
    generator = np.random.default_rng(seed)
    number, hours = int(generator.integers(5, 80)), float(generator.uniform(3.0, 30.0))
    gaps = generator.choice([0.0, 0.0, 0.5, 4.0], number)
    lengths = generator.uniform(0.05, 2.5, number)
    ends = np.cumsum(gaps + lengths) * _HOUR
    starts = ends - lengths * _HOUR
    most = None if generator.random() < 0.5 else int(generator.integers(1, 5))
    policy = Policy(seconds=hours * _HOUR, tolerance=60.0, most=most)
    rounds: list[list[int]] = [[] for _ in range(4)]
    devices = [Device(-1.0)] * len(rounds)
    for index in range(number):
        for asked in np.sort(generator.uniform(starts[index], ends[index], 3)).tolist():
            for device in range(len(rounds)):
                request = Request("run", index, asked, 0.0, "token")
                clock = asked + generator.uniform(-60.0, 60.0)
                after = devices[device].ask(request, policy, clock)
                if after.job is not None and generator.random() < 0.9:
                    rounds[device].append(index)
                    after = after.upload()
                devices[device] = after.end(False)
    times = _exact(starts, ends, hours, clock_margin_minutes=2.0, max_participations=most)
    return times, rounds


def _observed_by_simulation(seed: int) -> tuple[RoundTimes, list[list[int]]]:
    """A population of ``simulate-participation``: hours, zones, and all that fails."""
    generator = np.random.default_rng(seed)
    models: list[Availability] = [
        Always(),
        Independent(float(generator.uniform(0.2, 1.0))),
        Diurnal(),
        Diurnal(utc_offsets=(-5.0,)),
    ]
    hours = float(generator.uniform(2.0, 60.0))
    most = None if generator.random() < 0.5 else int(generator.integers(1, 6))
    behaviour = DeviceBehaviour(
        availability=models[int(generator.integers(len(models)))],
        timer_hours=hours,
        over_selection=float(generator.uniform(1.0, 1.5)),
        dropout_probability=float(generator.uniform(0.0, 0.2)),
        upload_loss_probability=float(generator.uniform(0.0, 0.1)),
        history_loss_probability=float(generator.choice([0.0, 0.01])),
        round_minutes=float(generator.uniform(5.0, 60.0)),
        max_attempts=100,
    )
    population = DevicePopulation(400, MinSeparation(1, most), 6, behaviour, seed)
    starts, rounds = [], [list[int]() for _ in range(400)]
    for index in range(int(generator.integers(20, 120))):
        try:
            device_round = population.next_round()
        except TooFewEligibleClientsError:
            break
        starts.append(device_round.start_seconds)
        for device in device_round.cohort.tolist():
            rounds[device].append(index)
    begun = np.array(starts)
    times = _exact(begun, begun + behaviour.round_seconds, hours, max_participations=most)
    return times, rounds


def _check_never_better(seed: int) -> int | None:
    """Compares times with ids, and returns by how much the separation from times is lower."""
    observe = (_observed_by_devices, _observed_by_simulation)[seed % 2]
    times, rounds = observe(seed)
    if not times.num_rounds:
        return None
    by_times = times.participation()
    by_ids = ObservedParticipation.of(rounds, times.num_rounds)
    assert by_ids.max_participations <= by_times.max_participations
    if by_ids.separation is not None:
        assert by_times.separation is not None
        assert by_times.separation <= by_ids.separation
    schema = MinSeparation(4, 3)
    # Participations overlap within 4 rounds, and at any distance.
    for bands in (min(4, times.num_rounds), None):
        factorization = toeplitz(times.num_rounds, num_bands=bands, coefficients="square_root")
        plan = plan_of(factorization, schema, 1.0, 1e-6)
        stated, true = (each.guarantee(plan) for each in (by_times, by_ids))
        assert stated.epsilon >= true.epsilon - 1e-9
        assert stated.noise_multiplier <= true.noise_multiplier * (1.0 + 1e-12)
    if by_ids.separation is None or by_times.separation is None:
        return None
    return by_ids.separation - by_times.separation


def test_times_are_never_better_than_ids() -> None:
    assert any(_check_never_better(seed) is not None for seed in range(16))


@pytest.mark.long
def test_times_are_never_better_than_ids_of_many_populations() -> None:
    found = [_check_never_better(seed) for seed in range(200)]
    known = [each for each in found if each is not None]
    # They agree in some: no condition is stronger than it has to be.
    assert len(known) > 100
    assert min(known) == 0


def _rounds_of_ten_minutes(number: int, separation: int) -> RoundTimes:
    ends = 600.0 * np.arange(1, number + 1)
    return _exact(ends - 600.0, ends, 600.0 * (separation + 1) / _HOUR)


_PUBLISHED = [
    (1300, 400, 484, 3, 0.15),
    (2000, 1000, 1428, 2, 0.0144),
    (2000, 1000, 1132, 2, 0.0144),
]


@pytest.mark.parametrize(("number", "bands", "separation", "most", "rho"), _PUBLISHED)
def test_published_guarantees_follow_from_times(
    number: int, bands: int, separation: int, most: int, rho: float
) -> None:
    """Of models of Gboard, for another matrix of as many bands: theirs cannot be had.

    With no more bands than the separation, k participations have the root of k of the sensitivity
    of one, so that rho is k times that of one, whatever the entries are.
    """
    times = _rounds_of_ten_minutes(number, separation)
    factorization = toeplitz(
        number, num_bands=bands, coefficients="square_root", equal_column_norms=True
    )
    found = times.participation()
    assert (found.separation, found.max_participations) == (separation, most)
    once = Mechanism(factorization, SingleParticipation(), np.sqrt(0.5 * most / rho))
    guarantee = once.observed(times).guarantee(1e-10)
    assert guarantee.sensitivity.is_exact
    assert guarantee.rho == pytest.approx(rho)


@pytest.mark.parametrize(("rho", "epsilon"), [(0.15, 3.42), (0.0144, 0.994)])
def test_published_epsilons_follow_from_rho(rho: float, epsilon: float) -> None:
    """Within the last digit that was printed of either."""
    digit = 0.5 * 10.0 ** -len(f"{rho}".partition(".")[2])
    least, most = (
        accounting.epsilon(accounting.noise_multiplier_of_zcdp(each), 1e-10)
        for each in (rho - digit, rho + digit)
    )
    assert least - 0.005 <= epsilon <= most + 0.005


@pytest.mark.long
@pytest.mark.parametrize(("number", "bands", "separation", "most", "rho"), _PUBLISHED)
def test_a_blt_in_their_place_has_a_little_more(
    number: int, bands: int, separation: int, most: int, rho: float
) -> None:
    """Its participations overlap at any distance: by as much as its sensitivity says."""
    factorization = blt(number, 4, participation=MinSeparation(bands, most))
    once = Mechanism(factorization, SingleParticipation(), np.sqrt(0.5 * most / rho))
    times = _rounds_of_ten_minutes(number, separation)
    guarantee = once.observed(times).guarantee(1e-10)
    ratio = guarantee.sensitivity / factorization.sensitivity(SingleParticipation()).value
    assert guarantee.rho == pytest.approx(rho * ratio**2 / most)
    assert rho < guarantee.rho < 1.04 * rho


def test_a_mechanism_takes_times_in_the_place_of_a_ledger() -> None:
    """What follows is that of a ledger of the closest and the most participations."""
    schema = MinSeparation(4, 3)
    mechanism = Mechanism(banded(12, 4), schema, 1.0)
    hour = np.arange(12.0) * _HOUR
    times = _exact(hour, hour + 0.5 * _HOUR, 4.5)
    observed = mechanism.observed(times)
    ledger = Ledger(("ada", "bo"), (np.array([0, 5, 10]), np.array([1, 5])), 12)
    by_ids = mechanism.observed(ledger)
    assert observed.participation.separation == 4
    assert (observed.ledger, observed.keeps_participation) == (None, True)
    assert (observed.worst_client(1e-6), observed.num_alike_names) == (None, 0)
    assert observed.guarantee(1e-6).epsilon == by_ids.guarantee(1e-6).epsilon
    statement = observed.statement(small_mechanisms.facts(), 1e-6)
    assert "at least 4 rounds apart" in statement.to_markdown()
    assert observed.participation.conditions is not None
    assert observed.participation.conditions in statement.to_markdown()
    told = dict[str, Any](statement.to_dict())["participation"]["observed"]
    assert (told["num_clients"], told["conditions"]) == (None, observed.participation.conditions)
    assert by_ids.participation.to_dict().get("conditions") is None
    # A shorter timer: the plan is not shown, and what is stated is worse.
    sooner = mechanism.observed(_exact(hour, hour + 0.5 * _HOUR, 3.0))
    assert sooner.keeps_participation is False
    assert sooner.guarantee(1e-6).epsilon > mechanism.guarantee(1e-6).epsilon
    assert sooner.worst_case(1e-6).epsilon >= sooner.guarantee(1e-6).epsilon
    with refuses("12", "11"):
        Mechanism(banded(11, 4), schema, 1.0).observed(times)
    scheme = PoissonSampling(num_rounds=12, num_bands=4, population=40, clients_per_round=2)
    with refuses("poisson"):
        Mechanism(banded(12, 4), scheme, 1.0).observed(times)


def test_files_say_whose_clients_are_whose(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "people.csv"
    file.write_text('person,client\nAda,phone\n\n"Bo, the second", tablet \nAda,tablet\n')
    found = ledgers.people_of(file)
    assert found == {"Ada": ("phone", "tablet"), "Bo, the second": ("tablet",)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no person"),
        ("Ada,phone,7\n", "line 1: expected a person"),
        ("Ada,phone\nAda,phone\n", "line 2: repeats"),
        ("Ada,\n", "a name is empty"),
        ("Ada\u200b,phone\n", "U\\+200B"),
        # One person would count as two, each with fewer clients.
        ("Ada,phone\nADA,tablet\n", "2 people have names that look alike"),
    ],
)
def test_other_files_of_people_are_refused(tmp_path: pathlib.Path, text: str, message: str) -> None:
    file = tmp_path / "people.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(LedgerError, match=message):
        ledgers.people_of(file)
    with pytest.raises(LedgerError, match="cannot be read"):
        ledgers.people_of(tmp_path / "missing.csv")
    with pytest.raises(ValueError, match="needs clients"):
        ledgers.people_of({"A": ("a", "a")})
