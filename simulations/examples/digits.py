"""run-digits: one federated training run of digit classification, private or not.

A small model learns handwritten digits from groups of images that are like writers, under a
banded matrix-factorization mechanism with participation timers, in a minute or two. With
--examples_per_client=1 every image is a client, as in a data centre that protects single
examples; a data sampler may then draw the batches. Run again with the same --output_dir, it
resumes.

Examples:
  run-digits --output_dir=runs/digits
  run-digits --output_dir=runs/digits_not_private --mechanism=none
  run-digits --output_dir=runs/centralised --examples_per_client=1 --sampling=poisson --num_bands=8
"""

import functools
import itertools
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from absl import flags

from mf_aggregators.commands.command_line import FlagGroup
from mf_aggregators.kernel import numbers
from simulations.examples.images import COMMON_DEFAULTS
from simulations.runs import run_command
from simulations.training.federated_task import (
    ClientImages,
    ImageData,
    Images,
    TaskCommand,
    concatenated,
    default_texts,
    outcome_lines,
)

# Each of the 14 forms is the images from one of these places in the file to the next.
_BOUNDS = (0, 130, 256, 386, 516, 646, 776, 906, 1029, 1157, 1287, 1415, 1545, 1667, 1797)
# Whole forms are held out, not single images: a model is evaluated on handwriting that it has not
# seen.
_TRAIN_FORMS, _HELDOUT_FORMS, _TEST_FORMS = slice(0, 11), slice(11, 12), slice(12, 14)

NUM_PIXELS = 64
NUM_CLASSES = 10
# Defaults of run-digits for the flags of a training run.
_COMMON: Mapping[str, object] = {
    **COMMON_DEFAULTS,
    "client_learning_rate": 0.5,
    "server_momentum": 0.0,
    "server_cooldown": 0.4,
    "evaluate_every": 10,
    "delta": 1e-4,
}
_GROUPS: Mapping[str, object] = {
    **_COMMON,
    "num_rounds": 140,
    "clients_per_round": 10,
    "batch_size": 10,
    "client_epochs": 3,
    "server_learning_rate": 2.0,
    "clip_norm": 0.3,
}
_SINGLE_EXAMPLES: Mapping[str, object] = {
    **_COMMON,
    "num_rounds": 100,
    "clients_per_round": 50,
    "batch_size": 1,
    "client_epochs": 1,
    "server_learning_rate": 5.0,
    "clip_norm": 1.0,
}


def load() -> tuple[Images, ...]:
    """Returns the images of handwritten digits, grouped by the form that they were written on.

    The 1,797 images are the test set of the UCI data set *Optical Recognition of Handwritten
    Digits* (Alpaydin and Kaynak, 1998). Thirteen people wrote them on preprinted forms. Who wrote
    which image is not recorded, but the order of the file still shows the forms: the same sequence
    of 130 digits comes 14 times, sometimes with a few missing. A client here has consecutive images
    of one form, so one person wrote all of them. There are 14 forms and 13 writers: clients are
    similar to writers, and no more is known.

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


def clients(forms: tuple[Images, ...], examples_per_client: int) -> ClientImages:
    """Divides the images among clients, each of which has consecutive images of one form.

    Args:
      forms: The result of :func:`load`.
      examples_per_client: The most images of a client. Clients of one form have equal numbers of
        images, up to one image. With 1, every image is a client.

    Returns:
      Clients made of the first 11 forms, in the order of the file; the 12th form as held-out
      images; and the last two forms as test images.

    Raises:
      ValueError: If ``examples_per_client`` is not positive.
    """
    numbers.positive_integer(examples_per_client, "examples_per_client")
    places = {}
    for number, form in enumerate(forms[_TRAIN_FORMS], start=1):
        num_pieces = -(-len(form) // examples_per_client)
        pieces = np.array_split(_BOUNDS[number - 1] + np.arange(len(form)), num_pieces)
        for place, piece in enumerate(pieces, start=1):
            places[f"form{number:02}_{place:03}"] = piece
    train, heldout, test = (
        concatenated(forms[own]) for own in (_TRAIN_FORMS, _HELDOUT_FORMS, _TEST_FORMS)
    )
    return ClientImages(train, places, heldout, test)


def keras_model() -> Any:
    """Returns a multinomial logistic regression with 650 parameters, all initially zero."""
    import tensorflow as tf

    inputs = tf.keras.Input((NUM_PIXELS,))
    logits = tf.keras.layers.Dense(NUM_CLASSES, kernel_initializer="zeros")(inputs)
    return tf.keras.Model(inputs, logits)


def _define_flags(values: flags.FlagValues) -> None:
    FlagGroup(values, "Data").integer(
        "examples_per_client",
        "The most images of a client, which are consecutive images of one form. With 1, every "
        "image is a client, as in the papers' centralised setting.",
        10,
    )


def _defaults(values: flags.FlagValues) -> Mapping[str, object]:
    return _SINGLE_EXAMPLES if values["examples_per_client"].value == 1 else _GROUPS


def _check_flags(options: Mapping[str, object]) -> None:
    numbers.positive_integer(options["examples_per_client"], "--examples_per_client")


def _open_data(options: Mapping[str, object]) -> ImageData:
    read = functools.partial(clients, load(), options["examples_per_client"])
    return ImageData("scikit-learn's digits", read, keras_model, options)


COMMAND = TaskCommand(
    name="run-digits",
    description=__doc__ or "",
    define_flags=_define_flags,
    defaults=_defaults,
    default_texts=default_texts(_GROUPS, _SINGLE_EXAMPLES, "--examples_per_client=1"),
    check_flags=_check_flags,
    open_data=_open_data,
    outcome_lines=outcome_lines,
)


def run() -> NoReturn:
    """Entry point of the console command."""
    run_command.run(COMMAND)


if __name__ == "__main__":
    run()
