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


def is_ours(card: str | bytes) -> bool:
    """Tell whether a card is as this package wrote it; blanks at the end of lines and empty lines do not count."""
    text = card.decode("utf-8", "replace") if isinstance(card, bytes) else card
    mark = _MARKS.search(text)
    return mark is not None and mark[1] == _digest(_MARKS.sub("", text))


def spare_name(card: bytes, read: Callable[[str], bytes | None]) -> str | None:
    """Return a name under which a `README.md` is to be kept that would be replaced.

    Args:
        card: content of that file.
        read: returns the content of a file that will be there, `README.md` among them; None where none has that name.

    Returns:
        None where nothing would be lost: this package wrote it, or the content is there already.
    """
    if is_ours(card) or card == read("README.md"):
        return None
    for number in count(1):
        name = f"README.before-pruning{f'-{number}' if number > 1 else ''}.md"
        found = read(name)
        if found is None or found == card:
            return name if found is None else None
    raise AssertionError  # count() has no end


def _digest(text: str) -> str:
    """Return a digest of the words. Git and editors change the ends of lines by themselves, so those do not count."""
    lines = filter(None, map(str.rstrip, text.splitlines()))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]
