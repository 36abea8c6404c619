"""What a change of code makes void, and what it leaves."""

import pathlib
import shutil

import pytest

from reproduction import results


def test_what_computes_makes_results_void_and_what_draws_does_not(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = results.fingerprint.__wrapped__()
    for path in pathlib.Path(results.__file__).parent.glob("*.py"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(results, "__file__", str(tmp_path / "results.py"))
    assert results.fingerprint.__wrapped__() == here
    for module, is_void in (("drawings", False), ("results", False), ("matrices", True)):
        with (tmp_path / f"{module}.py").open("a") as file:
            file.write("# A comment.\n")
        assert (results.fingerprint.__wrapped__() != here) == is_void
