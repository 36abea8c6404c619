"""The directory of a run: configuration, metrics, ledger, privacy statement, states, noise."""

import csv
import hashlib
import json
import math
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from simulations import atomic_files

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.csv"
LEDGER_FILE = "participation.npz"
PRIVACY_FILE = "privacy.json"
STATEMENT_FILE = "PRIVACY.md"
STATES_DIRECTORY = "checkpoints"
NOISE_DIRECTORY = "noise"
FACTORIZATION_DIRECTORY = "factorization"
TENSORBOARD_DIRECTORY = "tensorboard"
SAMPLING_SEED_FILE = "sampling_seed.json"


class RunDirectoryError(ValueError):
    """A directory that a run cannot use; the message says why and what to do."""


class RunDirectory:
    """Paths and files of one run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Creates the view of a directory; nothing is read or written yet."""
        self.path = pathlib.Path(path)

    @property
    def states(self) -> pathlib.Path:
        """Where resumable states go."""
        return self.path / STATES_DIRECTORY

    @property
    def sampling_seed(self) -> pathlib.Path:
        """The seed of a run's data sampler, among the states and as secret as they are."""
        return self.states / SAMPLING_SEED_FILE

    @property
    def noise(self) -> pathlib.Path:
        """Where noise rows go unless another place is chosen: a cache, as secret as the states."""
        return self.path / NOISE_DIRECTORY

    @property
    def factorization(self) -> pathlib.Path:
        """The checkpoint of the run's factorization."""
        return self.path / FACTORIZATION_DIRECTORY

    @property
    def ledger(self) -> pathlib.Path:
        """The ledger's file."""
        return self.path / LEDGER_FILE

    @property
    def tensorboard(self) -> pathlib.Path:
        """Where TensorBoard's event files go."""
        return self.path / TENSORBOARD_DIRECTORY

    def factorization_sha256(self) -> str:
        """Returns a fingerprint of the run's checkpoint, whose description has its arrays'."""
        description = self.factorization / "factorization.json"
        return hashlib.sha256(description.read_bytes()).hexdigest()

    def delete_noise_rows(self) -> None:
        """Deletes the noise rows in the run's own directory, which a finished run needs no more."""
        for rows in self.noise.glob("rows-*"):
            shutil.rmtree(rows, ignore_errors=True)

    def has_metrics(self) -> bool:
        """Returns whether the metrics of any round were written."""
        path = self.path / METRICS_FILE
        return path.exists() and len(path.read_text(encoding="utf-8").splitlines()) > 1

    def read_config(self) -> dict[str, Any] | None:
        """Returns the configuration of the run that the directory holds, or None if it is new.

        Raises:
          RunDirectoryError: If the directory holds something else, or its
            configuration cannot be read.
        """
        config_path = self.path / CONFIG_FILE
        if not config_path.exists():
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                raise RunDirectoryError(
                    f"{self.path} exists and is not the directory of a run: choose another "
                    "--output_dir."
                )
            return None
        try:
            config = json.loads(config_path.read_text(encoding="utf-8"))
            if not isinstance(config, dict):
                raise ValueError("it is no JSON object")
        except (OSError, ValueError) as error:
            raise RunDirectoryError(
                f"{config_path} cannot be read: {error}. Choose another --output_dir."
            ) from error
        return config

    def create(self, config: Mapping[str, Any], only_for_owner: bool = False) -> None:
        """Creates the directory of a new run.

        Args:
          config: Its configuration, JSON-able.
          only_for_owner: Whether nobody else may look into it. Who took part in which
            round must stay secret where a guarantee counts on sampling.

        Raises:
          RunDirectoryError: If the directory cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if only_for_owner:
                self.path.chmod(0o700)
            self.write_json(CONFIG_FILE, config)
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path} cannot be written: {error.strerror}. Choose another --output_dir."
            ) from error

    def write_json(self, name: str, contents: Mapping[str, Any]) -> None:
        """Writes a JSON file, whole or not at all."""
        text = json.dumps(contents, indent=2, allow_nan=False) + "\n"
        atomic_files.write_text(self.path / name, text)

    def write_text(self, name: str, text: str) -> None:
        """Writes a text file, whole or not at all."""
        atomic_files.write_text(self.path / name, text)


def check_same_flags(
    old: Mapping[str, Any], new: Mapping[str, Any], directory: pathlib.Path
) -> None:
    """Refuses to go on with a run under other flags.

    Args:
      old: The flags that the run was started with.
      new: The flags that it is to go on with.
      directory: The run's directory, for the message.

    Raises:
      RunDirectoryError: If any flag differs: noise, data or participation rules
        would change in the middle of one guarantee.
    """
    differing = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    if differing:
        raise RunDirectoryError(
            f"{directory} holds a run with other flags "
            f"({', '.join(f'--{name}={old.get(name)}' for name in differing)}): repeat them to "
            "resume it, or choose another --output_dir."
        )


class MetricsLog:
    """``metrics.csv``: one row a round, for all rounds so far, also after a resume."""

    def __init__(self, directory: RunDirectory, columns: Sequence[str], num_rounds: int) -> None:
        """Opens the log, keeping the rows of the first ``num_rounds`` rounds.

        Args:
          directory: The run's directory.
          columns: The columns after ``round``.
          num_rounds: How many rounds were finished before.
        """
        self._path = directory.path / METRICS_FILE
        self._columns = ["round", *columns]
        rows: list[dict[str, str]] = []
        if self._path.exists():
            with self._path.open(newline="") as file:
                rows = [
                    row
                    for row in csv.DictReader(file)
                    if (row.get("round") or "").isdecimal() and int(row["round"]) <= num_rounds
                ]
        with self._path.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore", restval="")
            writer.writeheader()
            writer.writerows(rows)

    def append(self, round_number: int, values: Mapping[str, float | int]) -> None:
        """Appends the row of a round.

        Args:
          round_number: The round, from 1.
          values: Values by column; what is missing or not finite stays empty.
        """
        row: dict[str, Any] = {"round": round_number}
        for name, value in values.items():
            row[name] = value if math.isfinite(value) else ""
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(row)
