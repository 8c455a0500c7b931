"""Metadata of model cards: what a user may give, and what other cards say that is as true of the pruned model."""

import logging
import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, hf_hub_url, try_to_load_from_cache
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from optimum_prune.errors import CheckpointError, InvalidConfig
from optimum_prune.fetching import fetch_json
from optimum_prune.integrations.signature import is_ours, sign_
from optimum_prune.report import is_hub_id

logger = logging.getLogger(__name__)

INHERITED = ("license", "license_name", "license_link", "language", "datasets", "pipeline_tag")
"""Metadata of the card of a model's source that is as true of the pruned model."""
TIMEOUT = 5.0
"""Seconds that the Hub is given to answer."""
_LICENSES = """
    afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
    bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
    cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0
    eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 grok2-community h-research
    intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mit
    mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openmdw-1.0 openmdw-1.1 openrail openrail++ osl-3.0 other pddl postgresql
    unknown unlicense wtfpl zlib
"""
LICENSES = tuple(_LICENSES.split())
"""Identifiers that the Hub knows: https://huggingface.co/docs/hub/repositories-licenses; no library has the list."""
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def given_metadata(base_model: str | None, license: str | None) -> dict[str, Any]:
    """Check what a user says of a model for its card; return what is given.

    Raises:
        InvalidConfig: `base_model` can be no Hub id, or the Hub has no such license.
    """
    if base_model is not None and not (isinstance(base_model, str) and _HUB_ID.fullmatch(base_model)):
        raise InvalidConfig(
            f"base_model must be the id of a model on the Hub, as in 'user/name', got {base_model!r}. A path says "
            "nothing to the readers of a card."
        )
    if license is not None and license not in LICENSES:
        nearest = get_close_matches(str(license).lower(), LICENSES, n=1)
        suggestion = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise InvalidConfig(
            f"Unknown license {license!r}.{suggestion} The Hub's identifiers are listed at "
            "https://huggingface.co/docs/hub/repositories-licenses; 'other' is for a license without one."
        )
    return {key: value for key, value in (("base_model", base_model), ("license", license)) if value is not None}


def with_metadata(card: str, given: dict[str, str]) -> str:
    """Return a card with other metadata; where this package wrote it, it still is as this package wrote it."""
    changed = ModelCard(card)
    for key, value in given.items():
        changed.data[key] = value
    if is_ours(card):
        sign_(changed)
    return str(changed)


def inherited_metadata(
    name_or_path: str | os.PathLike[str] | None, beside: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """Read licence, language, data sets and task from the card of a model.

    Args:
        name_or_path: a local directory, or a Hub id: its card is looked for in the cache, then on the Hub
            (unless `HF_HUB_OFFLINE` is set).
        beside: folder of the card that inherits; a link to a licence file that is there too stays a link to that file.

    Returns:
        What there is of `INHERITED`; nothing where the card cannot be read, as no save should fail for it.
    """
    if not name_or_path:
        return {}
    name, data = os.fspath(name_or_path), _metadata(name_or_path)
    found = {key: data[key] for key in INHERITED if data.get(key)}
    link = str(found.get("license_link", "://"))
    if "://" not in link and not (beside is not None and Path(beside, link).is_file()):
        del found["license_link"]
        if not os.path.exists(name):
            found["license_link"] = hf_hub_url(name, link)
    return found


def derived_from(name_or_path: str | os.PathLike[str] | None) -> str | list[str] | None:
    """Return the Hub ids of what a model without one was made of, as its card or its config names them.

    Args:
        name_or_path: a local directory, or the Hub id of a model that was pruned from one.
    """
    if not name_or_path:
        return None
    if named := _metadata(name_or_path).get("base_model"):
        return named
    try:
        named = fetch_json(name_or_path, "config.json").get("_name_or_path")
    except CheckpointError:
        return None
    # A path of the machine that wrote the config may look like an id; a card on the Hub shows that it is one.
    return named if isinstance(named, str) and is_hub_id(named) and _metadata(named) else None


def _metadata(name_or_path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read all metadata of a card; empty where there is none."""
    name = os.fspath(name_or_path)
    try:
        return ModelCard(_read_card(name), ignore_metadata_errors=True).data.to_dict()
    except Exception as error:
        # A network, a server and a stranger's YAML fail in many ways. None of them is worth a save.
        logger.info("No metadata is inherited from the card of %s: %s", name, error)
        return {}


def _read_card(name: str) -> str:
    if os.path.exists(name):
        return (Path(name) / "README.md").read_text(encoding="utf-8-sig")
    cached = try_to_load_from_cache(name, "README.md")
    if isinstance(cached, str):
        return Path(cached).read_text(encoding="utf-8-sig")
    # Not hf_hub_download: without a network it tries again for 20 seconds.
    response = get_session().get(hf_hub_url(name, "README.md"), headers=build_hf_headers(), timeout=TIMEOUT)
    hf_raise_for_status(response)
    return response.text
