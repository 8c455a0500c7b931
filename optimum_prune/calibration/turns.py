"""Columns of conversations -> chats: lists of turns with `role` and `content`."""

from collections.abc import Callable, Mapping
from typing import Any

NAMES = ("messages", "conversations", "conversation")
"""Usual names of columns of chats, the first that is there is read."""
KEYS = (("role", "content"), ("from", "value"))
"""Keys of a turn: who speaks, and what."""
ASSISTANT = "assistant"
ROLES = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT}
"""Names of speakers -> roles of chat templates."""
PREFERRED = ("completion", "chosen")
"""Columns of turns that may be the rest of a conversation, whose start is in the column "prompt"."""
PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("prompt", "chosen"),
    ("question", "answer"),
    ("question", "response"),
    ("question", "chosen"),
    ("query", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("instruction", "completion"),
    ("input", "output"),
)
"""Usual names of columns of questions and of their answers."""
FURTHER = ("input", "context")
"""Usual names of columns that belong to the question."""

Chat = list[dict[str, str]]
"""Turns with `role` and `content`."""
Features = Mapping[str, Any]
"""Column -> its type, as `datasets` describes it."""
Reader = Callable[[dict[str, Any]], Any]
"""Makes a chat of a row."""


def inner(feature: Any) -> Any:
    """Return what a column of lists holds: a mapping of keys to types, or a type; None where it holds no lists."""
    return getattr(feature, "feature", None)


def holds_turns(feature: Any) -> bool:
    """Whether a column holds lists of turns."""
    keys = inner(feature)
    return isinstance(keys, dict) and any(set(pair) <= keys.keys() for pair in KEYS)


def find_chats(features: Features, column: str | None = None) -> tuple[list[str], Reader] | None:
    """Find the columns of a dataset that hold conversations; None where there are none.

    Args:
        features: of the dataset.
        column: holds the conversations; by default one of `NAMES`, or "prompt" with one of `PREFERRED`, or the only
            column that holds turns.
    """
    # A column of one of the names may hold parts of several types; then nothing is known before it is read.
    chats = [
        name
        for name, feature in features.items()
        if holds_turns(feature) or (name in NAMES and type(inner(feature)).__name__ == "Json")
    ]
    if column is not None:
        return ([column], lambda row: turns(row[column])) if column in chats else None
    if (name := next((name for name in NAMES if name in chats), None)) is not None:
        return [name], lambda row: turns(row[name])
    if (answer := next((name for name in PREFERRED if name in chats), None)) is not None:
        columns = ["prompt", answer] if "prompt" in features else [answer]
        return columns, lambda row: _joined(turns(row.get("prompt")), turns(row[answer]))
    if len(chats) == 1:
        return chats, lambda row: turns(row[chats[0]])
    return None


def turns(value: Any) -> Any:
    """Return turns with `role` and `content`, words where their content is a list of parts; a text is the user's turn.

    Raises:
        ValueError: a turn has other keys, or a part that is no text.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return [_turn(turn) if isinstance(turn, dict) else turn for turn in value or []]


def pair_of(prompt: str, response: str) -> Chat:
    """Return a chat of a question and its answer."""
    return [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": response}]


def well_formed(chat: Any) -> bool:
    """Whether all turns have a role and words."""
    return all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        for turn in chat or []
    )


def _joined(prompt: Any, rest: Any) -> Any:
    """Put a conversation behind its start, where it does not begin with it anyway."""
    begins = bool(rest) and isinstance(rest[0], dict) and rest[0].get("role") != ASSISTANT
    return rest if begins else [*prompt, *rest]


def _turn(turn: dict[str, Any]) -> dict[str, Any]:
    who, said = next((pair for pair in KEYS if set(pair) <= turn.keys()), (None, None))
    if who is None or said is None:
        raise ValueError(
            f"a turn of a chat has the keys {', '.join(map(repr, turn))}, and 'role' and 'content' (or 'from' and "
            "'value') are read"
        )
    role, content = turn[who], turn[said]
    return {
        "role": ROLES.get(role, role) if isinstance(role, str) else role,
        "content": "".join(map(_words, content)) if isinstance(content, list) else content,
    }


def _words(part: Any) -> str:
    """Return the words of a part of a turn, `{"type": "text", "text": ...}`."""
    if not isinstance(part, dict):
        part = {"type": "text" if isinstance(part, str) else type(part).__name__, "text": part}
    if part.get("type") != "text":
        raise ValueError(
            f"a chat holds a part of type {part.get('type')!r}, and words are of type 'text'; leave it out"
        )
    return part.get("text") or ""
