"""Which cards this package wrote, and nobody has changed since: those alone are replaced.

A card carries a comment with a digest of itself. Any other `README.md`, and a card that somebody edited, is kept under
another name beside the new one.
"""

import hashlib
import re
from collections.abc import Callable
from itertools import count

from huggingface_hub import ModelCard

_MARK = "<!-- Written by optimum_prune ({digest}). An edited card is kept when the model is saved again. -->"
_MARKS = re.compile(re.escape(_MARK).replace(r"\{digest\}", "([0-9a-f]{32})"))


def sign_(card: ModelCard) -> None:
    """Add the comment with the digest, in place of an older one."""
    card.text = _MARKS.sub("", card.text).rstrip()
    card.text = f"{card.text}\n\n{_MARK.format(digest=_digest(str(card)))}\n"


def is_ours(text: str) -> bool:
    """Tell whether a card is as this package wrote it; blanks at the end of lines and empty lines do not count."""
    mark = _MARKS.search(text)
    return mark is not None and mark[1] == _digest(_MARKS.sub("", text))


def spare_name(content: bytes, read: Callable[[str], bytes | None]) -> str | None:
    """Return a name under which somebody's `README.md` is kept; None where it is already kept under one.

    Args:
        content: of that file.
        read: returns the content of a file, None where none has that name.
    """
    for number in count(1):
        name = f"README.before-pruning{f'-{number}' if number > 1 else ''}.md"
        found = read(name)
        if found is None:
            return name
        if found == content:
            return None
    raise AssertionError  # count() has no end


def _digest(text: str) -> str:
    """Return a digest of the words. Git and editors change the ends of lines by themselves, so those do not count."""
    lines = filter(None, map(str.rstrip, text.splitlines()))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]
