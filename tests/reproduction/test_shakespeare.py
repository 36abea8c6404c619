"""Shakespeare's roles for a small model: characters, splits and gradients, of a play by hand."""

import math

import numpy as np
import pytest

from reproduction import shakespeare
from stackoverflow_nwp import shakespeare as plays

_PLAY = """SCENE I.

FOOL.
Ay, me!

KING.
Who? -- I: 2 Fools
and no [aside] king.

FOOL.
Quoth he.
"""


def _said(befores: np.ndarray, nexts: np.ndarray) -> list[tuple[str, str]]:
    symbols = np.array(list(shakespeare.SYMBOLS))
    return [
        ("".join(before), str(after))
        for before, after in zip(symbols[befores], symbols[nexts], strict=True)
    ]


def test_characters_follow_from_the_three_before_them_in_a_speech() -> None:
    fool, king = (
        [text for speaker, text in plays.speeches_of_play(_PLAY) if speaker == name]
        for name in ("FOOL", "KING")
    )
    # No character of a speech follows from another speech.
    assert _said(*shakespeare.examples(fool)) == [
        *(("   ", "a"), ("  a", "y"), (" ay", ","), ("ay,", " ")),
        *(("y, ", "m"), (", m", "e"), (" me", "!")),
        *(("   ", "q"), ("  q", "u"), (" qu", "o"), ("quo", "t"), ("uot", "h"), ("oth", " ")),
        *(("th ", "h"), ("h h", "e"), (" he", ".")),
    ]
    assert "".join(after for _, after in _said(*shakespeare.examples(king))) == (
        "who? i fools and no king."
    )
    assert _said(*shakespeare.examples(["--", ""])) == []


def test_a_role_trains_with_characters_from_all_that_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shakespeare, "_MOST_EXAMPLES", 5)
    befores, nexts, weights = shakespeare.chosen_examples(["abcdefghij"])
    assert "".join(shakespeare.SYMBOLS[each] for each in nexts) == "acegi"
    assert _said(befores, nexts)[2] == ("bcd", "e")
    np.testing.assert_allclose(weights, 0.2)
    befores, nexts, weights = shakespeare.chosen_examples(["ab"])
    assert (befores.shape, nexts.shape) == ((5, 3), (5,))
    np.testing.assert_array_equal(weights, [0.5, 0.5, 0, 0, 0])
    assert not np.any(shakespeare.chosen_examples(["-"])[2])


def _speeches() -> plays.Speeches:
    return plays.Speeches(
        "by hand",
        {
            "train": {"b_KING": ["Aha, aha.", "No."], "a_FOOL": ["Why?"]},
            "heldout": {"b_KING": ["bbb"]},
            "test": {"a_FOOL": ["cc d", "a"]},
        },
    )


def test_updates_are_gradients_of_what_a_role_says() -> None:
    """A loss that is written in words: eight times the weights of what is before, for each."""
    clients = shakespeare.RoleClients(_speeches())
    assert clients.shape == (3 * 33 + 1, 33)
    weights = (0.1 * np.random.default_rng(0).normal(size=clients.shape)).astype(np.float32)
    symbols = shakespeare.SYMBOLS

    def loss(at: np.ndarray, speeches: list[str]) -> float:
        losses = []
        for speech in speeches:
            text = "   " + speech.lower()
            for i in range(3, len(text)):
                rows = [99, *(33 * k + symbols.index(text[i - 3 + k]) for k in range(3))]
                scores = [8.0 * sum(at[row, c] for row in rows) for c in range(33)]
                total = math.log(sum(math.exp(score) for score in scores))
                losses.append(total - scores[symbols.index(text[i])])
        return sum(losses) / len(losses)

    # By name.
    roles = [["Why?"], ["Aha, aha.", "No."]]
    found = clients.updates(weights, np.array([1, 0]))
    assert found.shape == (2, 100, 33)
    assert found.dtype == np.float32
    at = weights.astype(np.float64)
    of_a, of_n = symbols.index("a"), symbols.index("n")
    for role, own in ((1, found[0]), (0, found[1])):
        for place in ((99, of_a), (0, of_n), (33 + of_a, 5), (66 + of_a, 8), (66, of_a), (40, 2)):
            step = np.zeros_like(at)
            step[place] = 1e-5
            slope = (loss(at + step, roles[role]) - loss(at - step, roles[role])) / 2e-5
            assert own[place] == pytest.approx(slope, abs=2e-5), (role, place)
    assert clients.updates(weights, np.array([], np.int64)).shape == (0, 100, 33)


def test_what_trains_is_in_no_accuracy() -> None:
    clients = shakespeare.RoleClients(_speeches())
    weights = np.zeros(clients.shape, np.float32)
    weights[-1, shakespeare.SYMBOLS.index("b")] = 1.0
    assert (clients.heldout_accuracy(weights), clients.test_accuracy(weights)) == (1.0, 0.0)
    # "c" after "c", and "c" or "d" or "a" after spaces.
    weights = np.zeros(clients.shape, np.float32)
    weights[-1, shakespeare.SYMBOLS.index("c")] = 1.0
    assert clients.test_accuracy(weights) == pytest.approx(2 / 5)
    weights[66 + shakespeare.SYMBOLS.index("c"), 0] = 2.0
    # After each "c" it says a space now, which is right once.
    assert clients.test_accuracy(weights) == pytest.approx(2 / 5)
    # The most frequent character of the training data is "a".
    assert clients.share_of_most_frequent == pytest.approx(1 / 5)
