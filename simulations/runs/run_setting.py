"""What a run is given before TensorFlow is loaded: design, seed, folders, devices, sampler."""

import dataclasses
import pathlib

from mf_aggregators.participation import Sampler
from simulations.devices.device_populations import DeviceBehaviour
from simulations.runs.run_designs import RunDesign
from simulations.runs.run_directory import RunDirectory


@dataclasses.dataclass(frozen=True)
class RunSetting:
    """What a run is given.

    Attributes:
      design: What the run does.
      seed: Seed for drawing cohorts, where timers decide who may take part.
      directory: Where states, ledger and metrics go.
      noise_directory: Where noise rows go, if they go to disk.
      behaviour: What the clients' devices do.
      sampler: What draws the clients of each round in place of timers.
    """

    design: RunDesign
    seed: int
    directory: RunDirectory
    noise_directory: pathlib.Path
    behaviour: DeviceBehaviour = dataclasses.field(default_factory=DeviceBehaviour)
    sampler: Sampler | None = None
