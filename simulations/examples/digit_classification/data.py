"""Handwritten digits as federated data: scikit-learn's, which need no download.

The 1,797 images are the test set of the UCI data set *Optical Recognition of Handwritten
Digits* (Alpaydin and Kaynak, 1998). Thirteen people wrote them on preprinted forms. Who wrote
which image is not recorded, but the order of the file still shows the forms: the same sequence
of 130 digits comes 14 times, sometimes with a few missing. A client here has consecutive images
of one form, so they are of one hand. The forms are 14 and the writers 13: clients are like
writers, and no more is known.
"""

import itertools

import numpy as np

from mf_aggregators.kernel import numbers
from simulations.examples.labelled_images import Images, concatenated

# Where the forms begin in the file, and where the last one ends.
_BOUNDS = (0, 130, 256, 386, 516, 646, 776, 906, 1029, 1157, 1287, 1415, 1545, 1667, 1797)
# Forms, not images, are held back: a model is tried on hands that it has not seen.
_TRAIN_FORMS, _HELDOUT_FORMS, _TEST_FORMS = slice(0, 11), slice(11, 12), slice(12, 14)

NUM_PIXELS = 64
NUM_CLASSES = 10


def load() -> tuple[Images, ...]:
    """Returns the images of each form, in the order of the file.

    Returns:
      14 forms of 122 to 130 images: (m, 64) float32 pixels in [0, 1], the rows of an 8x8 image
      one after the other, and (m,) int32 labels.

    Raises:
      ValueError: If scikit-learn is missing, or has other images.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ValueError(
            f"the digits are part of scikit-learn, which cannot be imported ({error}): see "
            "docs/installing.md."
        ) from error
    pixels, labels = datasets.load_digits(return_X_y=True)
    if pixels.shape != (_BOUNDS[-1], NUM_PIXELS):
        raise ValueError(
            f"scikit-learn's digits are expected to be {_BOUNDS[-1]} images of {NUM_PIXELS} "
            f"pixels, and are {pixels.shape}: install the locked version (docs/installing.md)."
        )
    pixels, labels = (pixels / 16.0).astype(np.float32), labels.astype(np.int32)
    return tuple(
        Images(pixels[first:last], labels[first:last])
        for first, last in itertools.pairwise(_BOUNDS)
    )


def clients(forms: tuple[Images, ...], examples_per_client: int) -> dict[str, Images]:
    """Returns the training clients: the first 11 forms, each cut into pieces.

    Args:
      forms: What :func:`load` returned.
      examples_per_client: The most images of a client. The pieces of a form are of equal
        size, up to one image. With 1, every image is a client.

    Returns:
      Images by client, in the order of the file.

    Raises:
      ValueError: If ``examples_per_client`` is not positive.
    """
    numbers.positive_integer(examples_per_client, "examples_per_client")
    found = {}
    for number, form in enumerate(forms[_TRAIN_FORMS], start=1):
        num_pieces = -(-len(form) // examples_per_client)
        pieces = np.array_split(np.arange(len(form)), num_pieces)
        for place, piece in enumerate(pieces, start=1):
            found[f"form{number:02}_{place:03}"] = Images(form.pixels[piece], form.labels[piece])
    return found


def heldout(forms: tuple[Images, ...]) -> Images:
    """Returns the images of the 12th form, for evaluations while a model is trained."""
    return concatenated(forms[_HELDOUT_FORMS])


def test(forms: tuple[Images, ...]) -> Images:
    """Returns the images of the last two forms, for the evaluation of the final model."""
    return concatenated(forms[_TEST_FORMS])
