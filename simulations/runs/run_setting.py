"""What a run is given before TensorFlow is loaded: its plan, seed, folders, devices and sampler."""

import dataclasses
import pathlib

from simulations.devices.device_populations import DeviceBehaviour
from simulations.runs.run_directory import RunDirectory
from simulations.runs.run_plans import Plan
from simulations.sampling.data_samplers import DataSampler


@dataclasses.dataclass(frozen=True)
class RunSetting:
    """What a run is given.

    Attributes:
      plan: What the run does.
      seed: Seed for drawing cohorts, where timers decide who may take part.
      directory: Where states, ledger and metrics go.
      noise_directory: Where noise rows go, if they go to disk.
      behaviour: What the clients' devices do.
      sampler: What draws the clients of each round in place of timers.
    """

    plan: Plan
    seed: int
    directory: RunDirectory
    noise_directory: pathlib.Path
    behaviour: DeviceBehaviour = dataclasses.field(default_factory=DeviceBehaviour)
    sampler: DataSampler | None = None
