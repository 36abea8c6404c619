"""A small file of text, for each test its own."""

import pathlib

import pytest

from stackoverflow_nwp import federated_text
from tests.stackoverflow_nwp.small_text import small_examples


@pytest.fixture
def small_file(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file of all three splits."""
    path = tmp_path / "small.sqlite"
    federated_text.write(path, small_examples())
    return path
