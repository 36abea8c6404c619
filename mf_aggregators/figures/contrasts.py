"""Which text can be read on a coloured background."""

from collections.abc import Sequence

import matplotlib.colors
import numpy as np


def text_colour(background: tuple[float, ...]) -> str:
    """Returns black or white, whichever stands out more: with a contrast of at least 4.5.

    Args:
      background: Red, green and blue from 0 to 1, and perhaps an opacity of 1.

    Returns:
      ``black`` or ``white``.
    """
    return max(
        ("black", "white"),
        key=lambda each: contrast(matplotlib.colors.to_rgb(each), background),
    )


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the contrast of two colours, from 1 to 21 (WCAG 2.1, "contrast ratio").

    Args:
      one: Red, green and blue from 0 to 1.
      other: Likewise.
    """
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: Sequence[float]) -> float:
    parts = np.asarray(colour[:3], float)
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))
