"""Lines of Python that convert columns that are not read into columns that are: part of refusals."""

import os
from typing import Any

from optimum_prune.calibration.files import BUILDERS, folder_and_name, suffix
from optimum_prune.calibration.turns import PAIRS, Features, inner
from optimum_prune.config import CalibrationConfig

SPOKEN = {"dialog", "dialogue", "dialogs", "dialogues", "turns", "utterances", "chat", "chats"} | {
    "messages",
    "conversation",
    "conversations",
}
"""Names of columns whose texts are turns, the user's first."""
CONTENT = ("content", "value", "text", "message", "utterance")
"""Usual names of what is said in a turn."""
WHO = "('user', 'assistant')[i % 2]"
STRINGS = ("string", "large_string")
QUESTIONS = (("human", "assistant"), ("user", "assistant"), ("human", "bot"), *PAIRS)


def conversions(config: CalibrationConfig, features: Features) -> list[str]:
    """Return a sentence for each column of lists or records that is not read, with a line that converts it."""
    found = []
    for column, feature in features.items():
        if (step := _step(column, feature)) is not None:
            what, line = step
            found.append(f"Column {column!r} holds {what}; to read it, convert it: {converted(config, line)}")
    strings = [name for name, feature in features.items() if getattr(feature, "dtype", None) in STRINGS]
    if not found and len(strings) == 2:
        names = dict(zip(strings, ("question", "answer"), strict=True))
        line = converted(config, f"rename_columns({names!r})")
        found.append(f"To read {strings[0]!r} as questions and {strings[1]!r} as their answers: {line}")
    return found


def questions_of(config: CalibrationConfig, column: str, keys: tuple[str, str]) -> str:
    """Return a line that makes questions and answers of chats: of the first turn and the next."""
    said = keys[1]
    row = f"{{'question': row[{column!r}][0][{said!r}], 'answer': row[{column!r}][1][{said!r}]}}"
    return converted(config, f"map(lambda row: {row})")


def converted(config: CalibrationConfig, step: str) -> str:
    """Return a line of Python that loads the source of a config, applies a step, and writes what is not in memory."""
    source = config.source
    if not isinstance(source, str):
        return f"dataset = dataset.{step}"
    path = os.path.expanduser(source)
    if (folder := folder_and_name(source)) is not None:
        saved = {"state.json", "dataset_dict.json"} & set(os.listdir(folder[0]))
        loaded = _saved(folder[0], config.split) if saved else _loaded(*folder, config.split)
    elif os.path.exists(path):
        loaded = f"load_dataset({BUILDERS[suffix(path)]!r}, data_files={path!r}, split='train')"
    else:
        name, _, configuration = source.partition(":")
        loaded = _loaded(name, configuration or None, config.split)
    return f"datasets.{loaded}.{step}.to_json('converted.jsonl')"


def _loaded(path: str, name: str | None, split: str) -> str:
    configuration = "" if name is None else f", {name!r}"
    return f"load_dataset({path!r}{configuration}, split={split!r})"


def _saved(path: str, split: str) -> str:
    choice = f"[{split!r}]" if os.path.exists(os.path.join(path, "dataset_dict.json")) else ""
    return f"load_from_disk({path!r}){choice}"


def _step(column: str, feature: Any) -> tuple[str, str] | None:
    """Return what a column holds, and the step that converts it; None where there is none."""
    if isinstance(feature, dict):
        return "records", "flatten()"
    keys = inner(feature)
    row = f"row[{column!r}]"
    if isinstance(keys, dict):
        strings = [key for key, value in keys.items() if getattr(value, "dtype", None) in STRINGS]
        what = f"lists of records with the keys {', '.join(map(repr, keys))}"
        if (pair := next((pair for pair in QUESTIONS if set(pair) <= {*strings}), None)) is not None:
            who = f"(('user', {pair[0]!r}), ('assistant', {pair[1]!r}))"
            messages = f"[{{'role': who, 'content': turn[key]}} for turn in {row} for who, key in {who}]"
        elif strings:
            said = next((key for key in CONTENT if key in strings), strings[-1])
            messages = f"[{{'role': {WHO}, 'content': turn[{said!r}]}} for i, turn in enumerate({row})]"
        else:
            return None
        return what, f"map(lambda row: {{'messages': {messages}}})"
    if getattr(keys, "dtype", None) not in STRINGS:
        return None
    if column in SPOKEN:
        messages = f"[{{'role': {WHO}, 'content': text}} for i, text in enumerate({row})]"
        return "lists of texts", f"map(lambda row: {{'messages': {messages}}})"
    return "lists of texts", f"map(lambda row: {{'text': ' '.join({row})}})"
