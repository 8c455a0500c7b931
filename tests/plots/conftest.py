"""What the tests of the pictures share."""

import io

import pytest

from optimum_prune.plots.style import new_figure, styled


@pytest.fixture
def drawn():
    """Return a function that draws a picture, to the last pixel -> its panels."""
    pytest.importorskip("matplotlib")

    def call(draw, *arguments):
        with styled():
            figure = new_figure()
            draw(figure, *arguments)
            figure.savefig(io.BytesIO(), format="png")
        return figure.axes

    return call
