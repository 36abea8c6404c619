"""What tests of commands share."""

import pathlib

import pytest

from mf_aggregators import checkpoints, workloads
from mf_aggregators.factorizations import banded
from mf_aggregators.participation import MinSeparation


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The flag of a cache that plans of all tests fill."""
    return f"--cache_dir={tmp_path_factory.mktemp('cache')}"


@pytest.fixture
def checkpoint(tmp_path: pathlib.Path) -> pathlib.Path:
    """A matrix of four bands, for twelve rounds with three participations of a client."""
    factorization = banded(workloads.prefix_sum(12), 4)
    checkpoints.save(factorization, tmp_path / "banded", participation=MinSeparation(4, 3))
    return tmp_path / "banded"
