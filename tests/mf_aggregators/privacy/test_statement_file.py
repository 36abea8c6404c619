"""Files of statements: a signature by OpenSSH is that of the document alone.

Signatures need ``ssh-keygen`` 8.1 or newer: ``apt-get install openssh-client``.
"""

import functools
import pathlib
import shutil
import subprocess

import pytest

import mf_aggregators as mfa
from mf_aggregators.participation import MinSeparation
from mf_aggregators.privacy import statement_file
from mf_aggregators.privacy.statements import Statement

_SIGNER, _NAMESPACE = "ada@example.org", "privacy-statement"


def _ssh_keygen(*arguments: str, given: bytes = b"") -> int:
    program = shutil.which("ssh-keygen")
    assert program, "ssh-keygen signs statements: apt-get install openssh-client"
    return subprocess.run(
        [program, *arguments], input=given, capture_output=True, check=False
    ).returncode


@functools.cache
def _document() -> Statement:
    mechanism = mfa.Mechanism(mfa.factorizations.banded(6, 3), MinSeparation(3), 1.0)
    aggregator = mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=2)
    return aggregator.statement(
        [["ada", "bo"]], population=40, public_data="none", enforcement="A timer.", signer=_SIGNER
    )


def _key(folder: pathlib.Path, name: str) -> pathlib.Path:
    assert _ssh_keygen("-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)) == 0
    return folder / name


def _sign(key: pathlib.Path, file: pathlib.Path, namespace: str = _NAMESPACE) -> None:
    file.with_name(f"{file.name}.sig").unlink(missing_ok=True)
    assert _ssh_keygen("-Y", "sign", "-f", str(key), "-n", namespace, str(file)) == 0


def _is_signed(folder: pathlib.Path, contents: bytes, signer: str = _SIGNER) -> bool:
    named = ("-f", str(folder / "signers"), "-I", signer, "-n", _NAMESPACE)
    signature = str(folder / "PRIVACY.json.sig")
    return not _ssh_keygen("-Y", "verify", *named, "-s", signature, given=contents)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with a signed statement, and the public key of its signer."""
    key = _key(tmp_path, "signer")
    public = key.with_suffix(".pub").read_text()
    (tmp_path / "signers").write_text(f'{_SIGNER} namespaces="{_NAMESPACE}" {public}')
    _document().write(tmp_path / "PRIVACY.md", tmp_path / "PRIVACY.json")
    _sign(key, tmp_path / "PRIVACY.json")
    return tmp_path


def test_a_signature_is_that_of_the_document_alone(folder: pathlib.Path) -> None:
    contents = (folder / "PRIVACY.json").read_bytes()
    assert _is_signed(folder, contents)
    document = statement_file.read(folder / "PRIVACY.json")
    assert statement_file.told(document)["facts.signer"] == _SIGNER
    for at in range(0, len(contents), len(contents) // 40):
        assert not _is_signed(
            folder, contents[:at] + bytes([contents[at] ^ 1]) + contents[at + 1 :]
        )
    for other in (contents[:-1], contents + b"\n", contents.replace(b"\n", b"\r\n"), b""):
        assert not _is_signed(folder, other)
