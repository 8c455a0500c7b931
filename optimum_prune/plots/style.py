"""What all pictures share: colours that the colour-blind tell apart, large type, and the way into a file."""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from optimum_prune.errors import InvalidConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 5.2
"""Inches. A phone shows all of it, with type that is still large enough to read."""
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Of the palette of Okabe and Ito. The first two are of a brightness that stands out from white and from black."""
KEPT, REMOVED, *_ = COLORS
DENSE = "#808080"
INK = "#010203"
"""Of text and axes. Nothing else has this colour, so that a page can put its own in its place."""
STYLE: dict[Any, Any] = {
    "font.size": 12,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.labelsize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
WIDE = 10
"""Ratio of the largest to the smallest value from which on an axis is logarithmic."""


def check_installed() -> None:
    """Refuse to plot without matplotlib.

    Raises:
        InvalidConfig: saying what to install.
    """
    if not is_installed():
        raise InvalidConfig("Plots need the package 'matplotlib': pip install 'optimum-prune[plots]'.")


def is_installed() -> bool:
    """Tell whether matplotlib is there."""
    return find_spec("matplotlib") is not None


@contextmanager
def styled() -> Iterator[None]:
    """Let what is drawn for a while look like the other pictures."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        yield


def new_figure() -> "Figure":
    """Return an empty figure; whoever draws sets its size."""
    from matplotlib.figure import Figure  # not pyplot, which keeps a state for the whole process

    return Figure(dpi=144, layout="constrained")


def png(figure: "Figure") -> bytes:
    """Return a picture as a PNG file."""
    target = io.BytesIO()
    figure.savefig(target, format="png")
    return target.getvalue()


def svg(figure: "Figure", name: str) -> str:
    """Return a picture as an element for a page, whose text is text and has the colour of the page's.

    Args:
        figure: the picture.
        name: begins every id, of which a page may hold each but once.
    """
    from matplotlib import rc_context

    target = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(target, format="svg", transparent=True, metadata=nothing)
    element = target.getvalue()
    element = element[element.index("<svg") :].replace(INK, "currentColor")
    # In tags alone: the text of a label may say the same.
    return re.sub(r"<[^>]*>", lambda tag: re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", tag[0]), element)


def plain(name: str) -> str:
    """Return a name as matplotlib has to be given it to draw it as it is."""
    # Two dollars would set in mathematics what is between them; what begins with "_" is left out of legends.
    return f"{' ' * name.startswith('_')}{name}".replace("$", r"\$")


def spread_out(axis: Any, set_scale: Any, values: Sequence[float]) -> None:
    """Make an axis logarithmic where its values lie far apart, with numbers that are no powers of ten.

    Args:
        axis: of an Axes, `xaxis` or `yaxis`.
        set_scale: `set_xscale` or `set_yscale` of the same.
        values: what is drawn.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    if not values or min(values) <= 0 or (ratio := max(values) / min(values)) <= WIDE:
        return
    set_scale("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if ratio < WIDE**2 else (1,)))
    axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axis.set_minor_formatter(NullFormatter())
