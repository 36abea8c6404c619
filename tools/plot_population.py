r"""Draws how unlike in size the training clients of a text data set are.

  python tools/plot_population.py --output=docs/shakespeare.png FILE.sqlite

On the left, how many sentences each client has, the largest first; on the right, what share of all
sentences the largest clients have.
"""

import pathlib
import sqlite3
import sys

import matplotlib.figure
import numpy as np


def main(arguments: list[str]) -> int:
    """Reads the data set and writes the figure; returns the exit status."""
    outputs = [argument for argument in arguments if argument.startswith("--output=")]
    files = [argument for argument in arguments if not argument.startswith("--")]
    if len(outputs) != 1 or len(files) != 1:
        print("usage: plot_population.py --output=FILE.png FILE.sqlite", file=sys.stderr)
        return 2
    connection = sqlite3.connect(f"{pathlib.Path(files[0]).resolve().as_uri()}?mode=ro", uri=True)
    rows = connection.execute(
        "SELECT num_examples FROM client_metadata WHERE split_name = 'train'"
        " ORDER BY num_examples DESC"
    ).fetchall()
    connection.close()
    sizes = np.array([number for (number,) in rows])
    ranks = np.arange(1, len(sizes) + 1)
    figure = matplotlib.figure.Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.loglog(ranks, sizes)
    left.set(xlabel="client, the largest first", ylabel="sentences")
    right.plot(100.0 * ranks / len(sizes), 100.0 * np.cumsum(sizes) / np.sum(sizes))
    right.set(xlabel="the largest clients, %", ylabel="of all sentences, %", ylim=(0, 101))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(outputs[0].split("=", 1)[1], dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
