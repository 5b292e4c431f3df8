"""The colours and numbers of pictures."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from dataload.analysis import pictures

# Linear RGB as colour-blind readers see it: Machado, Oliveira and Fernandes (2009), severity 1.
SEEN = {
    "all cones": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
STAGES = (
    pictures.YELLOW,
    pictures.BLUE,
    pictures.SKY,
    pictures.ORANGE,
    pictures.PURPLE,
    pictures.GREEN,
    pictures.VERMILLION,
)
TOGETHER = {"stages": (*STAGES, pictures.SOFT, pictures.BAND), "sequences": (*pictures.TINTS, pictures.BAND)}


def linear(colour):
    rgb = np.array(to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(colour, seen):
    """A colour in CIELAB, where distances are about those that readers see."""
    x, y, z = np.cbrt(XYZ @ np.clip(np.array(seen) @ linear(colour), 0, 1) / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("name", TOGETHER)
def test_colours_that_are_shown_together_differ_for_everybody(name, seen):
    for one, other in combinations(TOGETHER[name], 2):
        assert np.linalg.norm(lab(one, SEEN[seen]) - lab(other, SEEN[seen])) > 14, (one, other)


def test_text_is_legible_on_every_tint():
    for tint in (*pictures.TINTS, pictures.PAGE, pictures.BAND):
        low, high = sorted(float(XYZ[1] @ linear(colour)) for colour in (tint, pictures.INK))
        assert (high + 0.05) / (low + 0.05) > 4.5, tint  # WCAG AA


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.5, "0.5"),
        (2.25, "2.25"),
        (950, "950"),
        (9_999, "9,999"),
        (9_999.6, "10k"),
        (12_345, "12.3k"),
        (999_600, "1M"),
        (10**10, "10G"),
        (-2e6, "-2M"),
    ],
)
def test_short_numbers(value, text):
    assert pictures.short(value) == text
