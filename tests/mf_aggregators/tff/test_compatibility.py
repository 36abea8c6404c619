"""Another TensorFlow Federated than the one that is known is refused by its missing name."""

import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("lacks", "name"), [("federated_zip", "federated_zip"), ("framework", "SyncContext")]
)
def test_a_name_that_is_not_there_is_said(lacks: str, name: str, tmp_path: pathlib.Path) -> None:
    """A package that has every name but one, as the main branch lacks many."""
    package = tmp_path / "tensorflow_federated"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from unittest import mock\n__version__ = '0.88.0'\n"
        "def __getattr__(name):\n"
        f"    if name in ('__path__', {lacks!r}):\n"
        "        raise AttributeError(name)\n"
        "    return mock.MagicMock()\n"
    )
    (tmp_path / "tensorflow_privacy.py").write_text("SumAggregationDPQuery = NormalizedQuery = 0\n")
    ran = subprocess.run(
        [sys.executable, "-c", f"from mf_aggregators.tff.compatibility import {name}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(_ROOT)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    for words in ("ImportError", "0.88.0", lacks, "docs/installing.md"):
        assert words in last
