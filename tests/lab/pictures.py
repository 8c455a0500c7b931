"""Pictures of one or two coloured shapes, and what is to be said of them."""

from random import Random
from typing import NamedTuple

from PIL import Image, ImageDraw

SIZE = 32  # pixels on a side
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (240, 220, 40),
    "purple": (160, 50, 190),
    "white": (250, 250, 250),
}
SHAPES = ("circle", "square", "triangle")
SIDES = {"at the left": (8, 16), "at the right": (24, 16), "at the top": (16, 8), "at the bottom": (16, 24)}
RELATIONS = {"left of": ((8, 16), (24, 16)), "above": ((16, 8), (16, 24))}
WORDS = sorted({"a", *COLOURS, *SHAPES, *" ".join([*SIDES, *RELATIONS]).split()})


class Picture(NamedTuple):
    """A picture of `SIZE` x `SIZE` pixels, and its caption, such as "a red circle above a blue square"."""

    image: Image.Image
    caption: str


def for_training(count: int, seed: int = 0) -> list[Picture]:
    """Draw pictures to train on and to calibrate with. The first ones do not depend on how many there are."""
    return _draw(count, seed, greys=range(0, 64, 2))


def for_evaluation(count: int, seed: int = 0) -> list[Picture]:
    """Draw pictures to measure on. No background has the grey of one for training, so none is drawn twice."""
    return _draw(count, seed, greys=range(1, 64, 2))


def _draw(count: int, seed: int, greys: range) -> list[Picture]:
    rng = Random(seed)
    return [_picture(rng, rng.choice(greys)) for _ in range(count)]


def _picture(rng: Random, grey: int) -> Picture:
    image = Image.new("RGB", (SIZE, SIZE), (grey, grey, grey))
    canvas = ImageDraw.Draw(image)
    if rng.random() < 0.5:
        side = rng.choice(list(SIDES))
        return Picture(image, f"{_shape(rng, canvas, SIDES[side])} {side}")
    relation = rng.choice(list(RELATIONS))
    first, second = (_shape(rng, canvas, centre) for centre in RELATIONS[relation])
    return Picture(image, f"{first} {relation} {second}")


def _shape(rng: Random, canvas: ImageDraw.ImageDraw, centre: tuple[int, int]) -> str:
    """Draw a shape close to a point and return its name."""
    colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
    x, y = (c + rng.randint(-2, 2) for c in centre)
    r = rng.randint(6, 7)
    box, fill = (x - r, y - r, x + r, y + r), COLOURS[colour]
    if shape == "circle":
        canvas.ellipse(box, fill)
    elif shape == "square":
        canvas.rectangle(box, fill)
    else:
        canvas.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill)
    return f"a {colour} {shape}"
