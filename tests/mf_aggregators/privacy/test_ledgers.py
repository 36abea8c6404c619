"""Records of participation: what is written is read, and what is broken is refused."""

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.participation import FixedSizeSampling, MinSeparation
from mf_aggregators.privacy import client_names, ledgers
from mf_aggregators.privacy.ledgers import Ledger, LedgerError
from simulations.runs.round_records import ParticipationLedger
from tests import flipped_bits
from tests.examples import examples
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


def test_a_sampling_scheme_that_is_none_is_refused(tmp_path: pathlib.Path) -> None:
    ParticipationLedger(("ada",), (np.array([0]),)).save(tmp_path / "participation.npz")
    with np.load(tmp_path / "participation.npz") as archive:
        contents = dict(archive)
    np.savez(tmp_path / "other.npz", **contents, sampling=np.array('{"name": "whim"}'))
    with refuses("other.npz", error=ledgers.LedgerError):
        ledgers.load(tmp_path / "other.npz", 1)


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


@pytest.mark.parametrize(
    "contents",
    [
        b"ada,4\nbo,0\nada,1\n",
        b"client,round\nada,4\nbo,0\nada,1\n",
        b"\xef\xbb\xbfada,4\nbo,0\nada,1\n",
        b"\xef\xbb\xbfclient,round\nada,4\nbo,0\nada,1\n",
        b'\xef\xbb\xbf"client","round"\r\n"ada","4"\r\n"bo",0\r\nada,"1"\r\n',
        b"\nClient_ID , Round\n\n  \n ada , 4 \n\tbo,\t0\nada\xc2\xa0,1",
        b"user_id,round_index\rada,4\rbo,00\rada,01\r",
        b'DEVICE,round\n "ada" , 4\nbo, "0"\n" ada "," 1"\n',
    ],
)
def test_text_is_read_in_every_form_in_which_it_may_stand(
    tmp_path: pathlib.Path, contents: bytes
) -> None:
    assert _read(tmp_path, contents) == {"ada": [1, 4], "bo": [0]}


def test_names_are_compared_as_they_are_written(tmp_path: pathlib.Path) -> None:
    """No case folding, no normal form, no numbers: what differs in writing is another client."""
    names = [
        "ada",
        "Ada",
        "e\u0301",
        "\u00e9",
        "7",
        "07",
        "'ada'",
        'a "b" c',
        "a, b",
        "a;b",
        "client",
    ]
    quoted = ['"' + name.replace('"', '""') + '"' for name in names]
    contents = "".join(f"{name},{index % 6}\n" for index, name in enumerate(quoted))
    found = _read(tmp_path, contents.encode())
    assert found == {name: [index % 6] for index, name in enumerate(names)}


# Each is one line, the second of a file whose first is a record.
_REFUSED_LINES = {
    "a round that is a decimal number": b"bo,1.0",
    "a round in scientific notation": b"bo,1e0",
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
    "a comma at the end": b"bo,1,",
    "no comma but a tabulator": b"bo\t1",
    "no comma but a semicolon": b"bo;1",
    "a comment": b"# of the second day",
    "a second heading": b"client,round",
    "a client without a name": b",1",
    "a client whose name is white space": b'" ",1',
    "a mark within the file, as where files were joined": b"\xef\xbb\xbfbo,1",
    "a name with an invisible character": "b\u200bo,1".encode(),
    "a name with a control character": b"b\x00o,1",
    "a round in full-width digits": "bo,\uff11".encode(),
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
        b"alice,first",
        b"alice,-1",
        b"client,cohort",
        b"round,client",
        b"client",
        b"client,round,model",
        b"client;round",
        b"client\tround",
        b"sep=,",
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
        st.text(
            st.characters(codec="utf-8"),
            min_size=1,
            max_size=8,
        )
        .map(str.strip)
        .filter(lambda name: client_names.hidden_character(name) is None)
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
    np.savez(
        file,
        client_ids=np.array(["ada"]),
        offsets=np.array([0, 3]),
        rounds=np.array([1]),
        num_rounds=np.array(4),
    )
    with refuses("participation.npz", error=ledgers.LedgerError):
        ledgers.load(file, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": [0.9, 3.0, 1.0]}, "cannot be read as a ledger"),
        ({"offsets": [0.0, 2.0, 3.0]}, "cannot be read as a ledger"),
        ({"num_rounds": 4.9}, "cannot be read as a ledger"),
        ({"num_rounds": [6]}, "do not fit together"),
        ({"num_rounds": -1}, "num_rounds must be at least 0"),
        ({"num_rounds": 3}, "do not fit together"),
        ({"rounds": [3, 0, 1]}, "do not fit together"),
        ({"rounds": [3, 3, 1]}, "do not fit together"),
        ({"rounds": [-1, 3, 1]}, "do not fit together"),
        ({"rounds": [[0, 1], [3, 4], [1, 5]]}, "do not fit together"),
        ({"client_ids": [["ada", "x"], ["bo", "y"]]}, "do not fit together"),
        ({"client_ids": [0.5, 1.5]}, "float64, neither texts nor integers"),
        ({"client_ids": [True, False]}, "bool, neither texts nor integers"),
        ({"client_ids": [b"ada", b"\xff"]}, "cannot be read as a ledger"),
        ({"offsets": [0, 3]}, "do not fit together"),
        ({"offsets": [1, 2, 3]}, "do not fit together"),
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


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("counts.csv", "3\n0\n62\n"),
        ("counts.csv", "\ufeffclients\r\n3\r\n\r\n00\r\n 62 \r\n"),
        ("counts.txt", "3\n0\n62"),
        ("counts.json", " [3, 0, 62]\n"),
        ("COUNTS.JSON", "[3,0,62]"),
    ],
)
def test_counts_of_rounds_are_read_in_every_form(
    tmp_path: pathlib.Path, name: str, contents: str
) -> None:
    (tmp_path / name).write_text(contents, encoding="utf-8")
    assert ledgers.round_counts(tmp_path / name) == (3, 0, 62)


@pytest.mark.parametrize(
    ("name", "contents", "found"),
    [
        ("counts.csv", "3\nclients\n", "found 'clients'"),
        ("counts.csv", "0,3\n1,4\n", "found '0,3'"),
        ("counts.csv", "3 4\n", "found '3 4'"),
        ("counts.csv", "3.0\n", "found '3.0'"),
        ("counts.csv", "-3\n", "found '-3'"),
        ("counts.csv", "3\n\u0664\n", "one number a round"),
        ("counts.csv", "\xff\xfe3".encode("latin-1"), "counts.csv"),
        ("counts.json", "[3, -1]", "at least 0"),
        ("counts.json", "[3, 1.5]", "integer"),
        ("counts.json", "[3, true]", "integer"),
        ("counts.json", "3", "one number a round"),
        ("counts.json", '"counts.json"', "found 'counts.json'"),
        ("counts.json", "null", "found None"),
        ("counts.json", '{"3": 0}', "found {'3': 0}"),
        ("counts.json", "[3", "one number a round"),
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
        ({"client_ids": ("ada", "ada")}, "two clients of the same name"),
        ({"client_ids": ("ada",)}, "1 client_ids and 2 rounds_of_clients"),
        ({"client_ids": ("ada", 3)}, "do not fit together"),
        ({"rounds_of_clients": (np.array([[0, 1]]), np.array([2]))}, "do not fit together"),
        ({"rounds_of_clients": (np.array([0.5, 1.0]), np.array([2]))}, "do not fit together"),
        ({"rounds_of_clients": (np.array([True]), np.array([2]))}, "do not fit together"),
        ({"rounds_of_clients": (np.array([1, 1]), np.array([2]))}, "do not fit together"),
        ({"rounds_of_clients": (np.array([1, 0]), np.array([2]))}, "do not fit together"),
        ({"rounds_of_clients": (np.array([-1]), np.array([2]))}, "do not fit together"),
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
