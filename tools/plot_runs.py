r"""Draws the held-out accuracy of runs, and the noise that their mechanisms add.

  python tools/plot_runs.py --output=docs/training.png banded=runs/banded identity=runs/identity

Each argument is a label and the directory of a run of run-stackoverflow.
"""

import csv
import json
import pathlib
import sys

import matplotlib.figure

from mf_aggregators.printed_guarantees import rounded_up


def main(arguments: list[str]) -> int:
    """Reads the runs and writes the figure; returns the exit status."""
    outputs = [argument for argument in arguments if argument.startswith("--output=")]
    runs = [argument.split("=", 1) for argument in arguments if not argument.startswith("--")]
    if len(outputs) != 1 or not runs or any(len(run) != 2 for run in runs):
        print("usage: plot_runs.py --output=FILE.png LABEL=RUN_DIRECTORY ...", file=sys.stderr)
        return 2
    figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, name in runs:
        directory = pathlib.Path(name)
        with (directory / "metrics.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["heldout_accuracy"]]
        privacy = json.loads((directory / "privacy.json").read_text())
        epsilon = (privacy["realised"] or privacy["planned"])["epsilon"]
        privacy = "not private" if epsilon is None else f"epsilon {rounded_up(epsilon, '.1f')}"
        axes.plot(
            [int(row["round"]) for row in rows],
            [100.0 * float(row["heldout_accuracy"]) for row in rows],
            label=f"{label} ({privacy})",
        )
    axes.set(xlabel="round", ylabel="held-out accuracy, %", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(outputs[0].split("=", 1)[1], dpi=120)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
