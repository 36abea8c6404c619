"""The digits: forms of one sequence, and splits and clients that do not mix them."""

import sys
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import datasets

from simulations.examples.digit_classification import data
from simulations.examples.labelled_images import Images, concatenated
from tests.refusals import refuses

_FORMS = data.load()


def _is_part_in_order(part: Iterable[int], sequence: Iterable[int]) -> bool:
    rest = iter(sequence)
    return all(any(item == other for other in rest) for item in part)


def test_forms_are_the_file_in_order() -> None:
    assert len(_FORMS) == 14
    pixels = np.concatenate([form.pixels for form in _FORMS])
    labels = np.concatenate([form.labels for form in _FORMS])
    expected = datasets.load_digits()
    np.testing.assert_array_equal(16 * pixels, expected.data)
    np.testing.assert_array_equal(labels, expected.target)
    assert pixels.dtype == np.float32
    assert labels.dtype == np.int32
    assert pixels.max() == 1.0


def test_each_form_shows_the_same_sequence_with_some_digits_missing() -> None:
    """A form that began or ended elsewhere would have digits that do not fit the sequence."""
    whole = _FORMS[0].labels
    assert len(whole) == 130
    for number, form in enumerate(_FORMS, start=1):
        # The last image of the third form is a 3, where the sequence has an 8.
        labels = form.labels[:-1] if number == 3 else form.labels
        assert _is_part_in_order(labels, whole), number
        assert len(form) >= 122


@settings(max_examples=20, deadline=None)
@given(examples_per_client=st.integers(1, 200))
def test_clients_are_pieces_of_one_form_of_nearly_equal_size(examples_per_client: int) -> None:
    clients = data.clients(_FORMS, examples_per_client)
    assert list(clients) == sorted(clients)
    by_form: dict[str, list[Images]] = {}
    for name, images in clients.items():
        assert 1 <= len(images) <= examples_per_client
        by_form.setdefault(name.split("_")[0], []).append(images)
    assert len(by_form) == 11
    for form, pieces in zip(_FORMS[:11], by_form.values(), strict=True):
        sizes = [len(piece) for piece in pieces]
        assert max(sizes) - min(sizes) <= 1
        assert len(sizes) == -(-len(form) // examples_per_client)
        np.testing.assert_array_equal(np.concatenate([p.pixels for p in pieces]), form.pixels)
        np.testing.assert_array_equal(np.concatenate([p.labels for p in pieces]), form.labels)


def test_the_two_settings_have_143_and_1415_clients() -> None:
    assert len(data.clients(_FORMS, 10)) == 143
    assert len(data.clients(_FORMS, 1)) == 1415


def test_splits_share_no_form_and_leave_none_out() -> None:
    train = concatenated(tuple(data.clients(_FORMS, 7).values()))
    parts = [train, data.heldout(_FORMS), data.test(_FORMS)]
    assert [len(part) for part in parts] == [1415, 130, 252]
    np.testing.assert_array_equal(
        np.concatenate([part.pixels for part in parts]),
        np.concatenate([form.pixels for form in _FORMS]),
    )


def test_fingerprints_tell_pixels_and_labels_apart() -> None:
    form = _FORMS[0]
    assert form.fingerprint() == data.load()[0].fingerprint()
    pixels, labels = form.pixels.copy(), form.labels.copy()
    pixels[3, 4] += 0.5
    labels[5] += 1
    others = [Images(pixels, form.labels), Images(form.pixels, labels), _FORMS[1]]
    assert len({images.fingerprint() for images in [form, *others]}) == 4


def test_no_clients_without_images() -> None:
    with refuses("examples_per_client"):
        data.clients(_FORMS, 0)


def test_missing_and_other_digits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        datasets, "load_digits", lambda **_: (np.zeros((5, 64)), np.zeros(5, np.int64))
    )
    with refuses("(5, 64)"):
        data.load()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with refuses("scikit-learn", "docs/installing.md"):
        data.load()
