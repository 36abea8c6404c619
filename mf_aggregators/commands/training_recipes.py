"""The data sets that a plan's printed commands can train on, and their recipes.

A recipe is what ``run-stackoverflow`` uses where its flags do not say otherwise: those are
tuned for the data that it has by itself, the docstrings of the installed packages, and are
the papers' for StackOverflow. What is here is only what the printed commands have to repeat.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping

from mf_aggregators.commands.command_line import check_choice

DOCSTRINGS = "docstrings"
STACKOVERFLOW = "stackoverflow"


@dataclasses.dataclass(frozen=True)
class TrainingRecipe:
    """How ``run-stackoverflow`` trains on a data set.

    Attributes:
      dataset: As ``run-stackoverflow --dataset`` spells it.
      description: The data set and its recipe, in words.
      population: Its training clients; None where nobody but its owner knows.
      clip_norm: The L2 norm that its recipe clips updates to.
      follows_rate_rule: Whether its server learning rate follows the noise by the rule of
        BandMF App. I. Otherwise the recipe has one rate, which is the default of the run.
    """

    dataset: str
    description: str
    population: int | None
    clip_norm: float
    follows_rate_rule: bool


# The docstrings are those of the locked environment.
_RECIPES: Mapping[str, TrainingRecipe] = {
    DOCSTRINGS: TrainingRecipe(
        dataset=DOCSTRINGS,
        description="the docstrings of the installed packages, by the recipe tuned on them",
        population=2511,
        clip_norm=1.2,
        follows_rate_rule=False,
    ),
    STACKOVERFLOW: TrainingRecipe(
        dataset=STACKOVERFLOW,
        description="StackOverflow, by the recipe of the papers and the server learning rate of "
        "BandMF App. I's rule",
        population=342_477,
        clip_norm=1.0,
        follows_rate_rule=True,
    ),
}


def find(dataset: str | None, population: int) -> TrainingRecipe | None:
    """Returns the recipe of a data set, which its population tells where it is not named.

    Args:
      dataset: ``docstrings``, ``stackoverflow``, the path of a file, or None.
      population: The clients of the plan.

    Returns:
      The recipe; None if no data set is named and none is known by its population.

    Raises:
      CommandError: If there is no such data set, or StackOverflow has fewer clients.
    """
    if dataset is None:
        known = (each for each in _RECIPES.values() if each.population == population)
        return next(known, None)
    if dataset in _RECIPES:
        recipe = _RECIPES[dataset]
        most = recipe.population if dataset == STACKOVERFLOW else None
        check_choice(
            most is None or population <= most,
            f"--population={population} is more than the {most} training clients of "
            f"--dataset={dataset}.",
        )
        return recipe
    check_choice(
        bool(dataset) and (os.sep in dataset or bool(pathlib.PurePath(dataset).suffix)),
        f"--dataset={dataset} must be {', '.join(_RECIPES)} or the path of a .sqlite file that "
        "run-stackoverflow can train on (make-text-dataset makes one).",
    )
    return TrainingRecipe(
        dataset=dataset,
        description=f"{dataset}, by the recipe that was tuned on docstrings: a place to begin "
        "tuning learning rates and clip norm",
        population=None,
        clip_norm=_RECIPES[DOCSTRINGS].clip_norm,
        follows_rate_rule=False,
    )
