"""The file of a sampler's seed."""

import pathlib

import pytest

from mf_aggregators import random_streams


def test_a_seed_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    for seed in (0, 5, 2**128 - 1, random_streams.secret_seed()):
        random_streams.save_seed(seed, tmp_path / "seed.json")
        assert random_streams.load_seed(tmp_path / "seed.json") == seed


def test_seeds_of_earlier_runs_are_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "seed.json").write_text('{"seed": "0x2a"}\n')
    assert random_streams.load_seed(tmp_path / "seed.json") == 42


def test_fresh_seeds_differ_and_are_long() -> None:
    seeds = {random_streams.secret_seed() for _ in range(64)}
    assert len(seeds) == 64
    assert max(seeds) >> 120
    assert max(seeds) < 2**128


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"seed": 42}', '{"seed": "x"}', '{"seed": "-1"}']
)
def test_what_holds_no_seed_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    file = tmp_path / "seed.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"seed\.json has"):
        random_streams.load_seed(file)
    with pytest.raises(ValueError, match="cannot be read"):
        random_streams.load_seed(tmp_path / "nowhere.json")
