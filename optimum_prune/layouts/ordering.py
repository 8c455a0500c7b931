"""The order in which weights are written: it decides which shard holds what."""

from collections.abc import Mapping

from torch import Tensor


def in_order(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sort weights as transformers does when it saves what it has loaded: by name, numbers as numbers.

    A model that was built otherwise it saves in the order of its modules. Loaded and saved again, it would be
    divided into other shards.
    """
    return dict(sorted(state.items(), key=lambda item: [_key(part) for part in item[0].split(".")]))


def _key(part: str) -> tuple[bool, int, str]:
    return (False, int(part), "") if part.isdigit() else (True, 0, part)
