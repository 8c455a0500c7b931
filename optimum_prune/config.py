"""What to prune, how, and on which data: checked, versioned, the same in Python, recipes and the shell."""

import hashlib
import json
import math
import os
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

from optimum_prune import checks, registry
from optimum_prune.errors import InvalidConfig
from optimum_prune.fetching import fetch_record
from optimum_prune.options import Config, option, part

ALLOCATIONS = {
    "structured": ("auto", "uniform", "global", "gamma"),
    "layers": ("auto", "global"),
    "unstructured": ("auto", "row", "matrix", "global"),
    "n:m": ("auto",),
}
"""Kind of pattern -> how the removal may be spread."""
SELECTIONS = ("none", "kl")
INDUCIBLE = ("magnitude", "wanda", "sparsegpt", "si")
"""Scorers that go with an induction."""
COMPENSATIONS = ("auto", "least_squares", "sequential", "bias", "none")
UNITS = ("kv_group", "mlp_channel")
LAYER_UNITS = ("layer", "attention", "mlp")
RECOMMENDED = {"structured": "taylor", "layers": "block_influence", "unstructured": "sparsegpt", "n:m": "sparsegpt"}
"""Pattern -> the scorer that stands in where none is given."""
_WEIGHTS = {
    "compensation": "scorers of single weights that make up for what goes do so themselves (sparsegpt, admm)",
    "steps": "single weights are chosen one linear after the other",
    "units": "single weights go, not units; choose linears by include and exclude",
    "gamma": "every linear loses the fraction that is asked of it",
    "round_to": "shapes stay as they are",
    "keep_first": "blocks stay; leave linears alone by exclude",
    "keep_last": "blocks stay; leave linears alone by exclude",
}
MEANINGLESS = {
    "structured": {
        "keep_first": "every block keeps some of its units",
        "keep_last": "every block keeps some of its units",
        "induction": "it learns which single weights go",
    },
    "layers": {
        "round_to": "only whole blocks or sub-layers go",
        "gamma": "attention and MLPs lose the same fraction of their layers",
        "compensation": "no reader is left whose weights could make up for a layer",
        "steps": "the layers that go are chosen at once",
        "induction": "it learns which single weights go",
    },
    "unstructured": _WEIGHTS,
    "n:m": _WEIGHTS,
}
"""Kind of pattern -> fields that must be left alone, and why."""
IN_MEMORY = "in-memory: "  # how a written config begins the description of data that it does not hold


def describe_source(source: Any) -> str:
    """Name a source of data, without its data when it lives in memory."""
    if isinstance(source, str):
        return source
    if isinstance(source, list):
        kind = "texts" if isinstance(source[0], str) else "token lists"
        digest = hashlib.sha256(json.dumps(source, default=int).encode()).hexdigest()
        return f"{IN_MEMORY}{len(source)} {kind}, sha256 {digest[:16]}"
    columns = ", ".join(source.column_names or ["unknown"])  # a streamed dataset may not know its columns yet
    return f"{IN_MEMORY}{type(source).__name__}, columns: {columns}"


def describe_origin(data: dict[str, Any]) -> str:
    """Name the source of loaded data, with its split and the rows that a stream was drawn from."""
    split = f", split {data['split']}" if data.get("split") else ""
    first = f" (drawn from its first {rows:,} rows)" if (rows := data.get("first_rows")) else ""
    return f"{data['source']}{split}{first}"


def check_columns(text: str | None, target: str | None) -> None:
    """Refuse one column for questions and their answers."""
    if target is not None and target == text:
        raise InvalidConfig(
            f"text_column and target_column are both {text!r}; a question and its answer are in two columns."
        )


def without_paths(value: Any) -> Any:
    """Return what is published of plain JSON types: of absolute paths, which say nothing to others, the last name."""
    if isinstance(value, str):
        return Path(value).name if os.path.isabs(value) else value
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if isinstance(value, dict):
        return {without_paths(key): without_paths(item) for key, item in value.items()}
    return value


@dataclass(frozen=True, repr=False)
class CalibrationConfig(Config):
    """Which texts the statistics are taken from, and how much of them."""

    source: Any = option(
        "self",
        checks.source,
        "dataset id ('path' or 'path:name'), local file or folder, or 'self': text that the model itself "
        "generates; in Python also a list of strings, a list of token-id lists or a datasets.Dataset. A folder is read "
        "as datasets.load_dataset reads it: names of files and sub-folders name its splits",
    )
    num_samples: int = option(32, checks.integer(1), "number of token sequences")
    seq_len: int | None = option(
        None,
        checks.integer(1),
        "tokens per sequence; by default what the scorer recommends, else min(2048, the model's limit), "
        "for encoder-decoders 512",
    )
    batch_size: int = option(
        4, checks.integer(1), "sequences per forward pass; changes memory and time, not the result"
    )
    seed: int = option(0, checks.integer(0), "seed of the draw of sequences")
    split: str = option("train", checks.text, "split of a dataset id or of a folder")
    text_column: str | None = option(
        None, checks.text, "column that holds the text; by default 'text', else the only column of strings"
    )
    target_column: str | None = option(
        None, checks.text, "column that holds the answer to the text, for encoder-decoders (T5)"
    )
    image_column: str | None = option(
        None, checks.text, "column that holds the image, or a list of them, for image-text models; by default 'image'"
    )

    selection: str = option(
        "none",
        checks.one_of("selection", lambda: SELECTIONS),
        "'kl': prune with several drawn batches on trial, and use the one after which the model stays nearest to the "
        "dense one; 'none': use the first one drawn",
    )
    candidates: int = option(8, checks.integer(2), "batches drawn for selection 'kl'")

    def __post_init__(self) -> None:
        """Check every field, then that questions are not their own answers."""
        super().__post_init__()
        check_columns(self.text_column, self.target_column)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types; data held in memory is described, never copied."""
        return super().to_dict() | {"source": describe_source(self.source)}


@dataclass(frozen=True, repr=False)
class InductionConfig(Config):
    """How masks are learned on top of a scorer (sparsity induction, SI): one scale for each input of a linear.

    The paper publishes neither the learning rate nor the constants of its spectral term: all defaults are ours.
    """

    epochs: int = option(2, checks.integer(1), "passes over the calibration sequences, for each block")
    batch_size: int = option(4, checks.integer(1), "sequences a step of training; changes the result")
    learning_rate: float = option(
        0.1, checks.number(0), "of Adam, on the logarithms of the scales, and on what biases make up for"
    )
    temperature_start: float = option(
        0.1, checks.number(0), "how soft the mask is that gradients see, in logarithms of scores, at the first step"
    )
    temperature_end: float = option(0.02, checks.number(0), "the same at the last step")
    bound: float = option(4.0, checks.number(1), "scales stay between 1/bound and bound; their geometric mean is 1")
    held_out: float = option(
        0.125,
        checks.number(0, below=1),
        "fraction of the calibration sequences that no mask is trained on, by which the better mask is chosen",
    )
    spectral: float = option(
        0.0,
        checks.number(0, or_equal=True),
        "weight of the term exp(-spectral_alpha * sum of the norms of the scaled weights), in units of the loss of the "
        "scorer's own masks; 0 leaves it out",
    )
    spectral_alpha: float = option(1e-3, checks.number(0), "see spectral")
    spectral_power: float = option(2.0, checks.number(0), "of the norms in the spectral term (Schatten norms)")
    allow_bias: bool = option(
        False,
        checks.boolean,
        "where a linear has no bias, create one if that helps; the result may need this package to load. Biases that "
        "there are take part anyway",
    )


@dataclass(frozen=True, repr=False)
class PruningConfig(Config):
    """What is removed, by which score, and how it is spread over the layers.

    Given to `from_pretrained` as its `quantization_config`, it prunes while loading.
    """

    quant_method: ClassVar = "optimum_prune"  # the word by which transformers finds the plugin

    pattern: str = option(
        "structured",
        checks.pattern,
        "what is removed: 'structured' (units inside of blocks), 'layers' (whole blocks, or sub-layers), "
        "'unstructured' (single weights, which become zero) or n:m, e.g. '2:4' (n zeros in every m weights)",
    )
    scorer: str = option(
        None,
        checks.one_of("scorer", lambda: registry.available("scorers")),
        "how units or layers are ranked, by name; by default what the pattern recommends: 'taylor' for 'structured', "
        "'block_influence' for 'layers', 'sparsegpt' for zeros",
    )
    sparsity: float | dict[str, float] | None = option(
        None,
        checks.sparsity,
        "fraction of the targeted weights (or blocks, or sub-layers) to remove, in [0, 1); in Python and recipes also "
        "a mapping of module patterns to fractions (pattern 'unstructured'; the rest is left alone)",
    )
    allocation: str = option(
        "auto",
        checks.one_of("allocation", lambda: dict.fromkeys(chain(*ALLOCATIONS.values()))),
        "how the removal is spread over the layers: 'uniform' (the same fraction in each), 'global' (one "
        "ranking per kind of unit), 'gamma' (global, MLP and attention coupled by gamma) or 'auto' (what the "
        "scorer recommends). Of pattern 'unstructured': 'row', 'matrix' (the same fraction in each) or 'global'",
    )
    gamma: float | Literal["auto"] = option(
        "auto", checks.gamma, "how much larger a fraction MLPs lose than attention: a number > 0, or 'auto'"
    )
    units: list[str] | None = option(
        None,
        checks.list_of("kinds of unit", checks.text),
        "kinds of unit to remove: 'kv_group' (a key/value head with its query heads), 'mlp_channel'; by default both. "
        "Of pattern 'layers': 'layer' (a block; the default), or the sub-layers 'attention' and 'mlp'",
    )
    stacks: list[str] | None = option(
        None,
        checks.list_of("names of stacks", checks.text),
        "stacks of blocks to prune, by name: 'encoder' and 'decoder' of T5, 'language' and 'vision' of LLaVA; by "
        "default all but a vision tower",
    )
    include: list[str] | None = option(
        None,
        checks.list_of("glob patterns", checks.text),
        "glob patterns of the modules to prune, e.g. 'model.layers.1?.mlp'",
    )
    exclude: list[str] | None = option(
        None, checks.list_of("glob patterns", checks.text), "glob patterns of the modules to leave"
    )
    round_to: int = option(8, checks.integer(1), "MLP channels kept are rounded up to a multiple of this")
    keep_first: int = option(1, checks.integer(0), "blocks at the start of a stack that stay whole (pattern 'layers')")
    keep_last: int = option(1, checks.integer(0), "blocks at the end of a stack that stay whole (pattern 'layers')")
    scorer_options: dict[str, Any] | None = option(
        None,
        checks.options,
        "options of the scorer, by name; which there are is in the scorer's documentation",
    )
    compensation: str = option(
        "auto",
        checks.one_of("compensation", lambda: COMPENSATIONS),
        "how what stays makes up for units that go: 'least_squares' (new weights for the linears that read them), "
        "'sequential' (the same, layer after layer), 'bias' (shifts biases, where there are any), 'none', or 'auto' "
        "(least squares where the scorer needs calibration data anyway, else none)",
    )
    steps: int = option(
        1, checks.integer(1), "units go in so many steps, and are scored anew after each (pattern 'structured')"
    )
    calibration: CalibrationConfig = option(
        CalibrationConfig, part(CalibrationConfig), "data for scorers that need any"
    )
    induction: InductionConfig | None = option(
        None,
        part(InductionConfig),
        "learn the masks of scorers magnitude, wanda or sparsegpt, block by block; scorer 'si' is wanda with it",
    )
    seed: int = option(0, checks.integer(0), "seed of whatever is random in a scorer")

    def __post_init__(self) -> None:
        """Check every field, then those that constrain each other."""
        super().__post_init__()
        self._check_pattern()
        self._check_units()
        if self.scorer is None:  # pyright: ignore[reportUnnecessaryComparison]
            object.__setattr__(self, "scorer", RECOMMENDED[self.kind])
        self._check_induction()
        if self.allocation not in ALLOCATIONS[self.kind]:
            raise InvalidConfig(
                f"allocation={self.allocation!r} has no meaning with pattern {self.pattern!r}; possible: "
                f"{', '.join(map(repr, ALLOCATIONS[self.kind]))}."
            )
        if self.gamma != "auto" and self.allocation not in ("auto", "gamma"):
            raise InvalidConfig(
                f"gamma={self.gamma} has no meaning with allocation={self.allocation!r}; use allocation='gamma'."
            )

    @property
    def kind(self) -> str:
        """Kind of pattern: `"n:m"` for every n and m."""
        return "n:m" if ":" in self.pattern else self.pattern

    @property
    def fraction(self) -> float:
        """The sparsity as one number, for patterns that have no mapping."""
        assert isinstance(self.sparsity, float), "only 'unstructured' takes a mapping, and n:m none"
        return self.sparsity

    @property
    def n_of_m(self) -> tuple[int, int] | None:
        """N and m, where that is the pattern."""
        if self.kind != "n:m":
            return None
        n, m = self.pattern.split(":")
        return int(n), int(m)

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], **hub_kwargs: Any) -> "PruningConfig":
        """Read the recipe of a pruned checkpoint, of its last pruning where there were several; no weight is read.

        Data that was held in memory is only described in it: set `calibration` anew before you prune by it.

        Args:
            name_or_path: a local directory, or a Hub id.
            hub_kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder` or `force_download`.

        Raises:
            CheckpointError: it cannot be had, or was not pruned by this package.
            InvalidConfig: this version does not know what the recipe says.
        """
        return cls.from_dict(fetch_record(name_or_path, **hub_kwargs)["recipe"])

    def _check_pattern(self) -> None:
        if ":" in self.pattern and self.sparsity is not None:
            n, m = self.n_of_m or (0, 1)
            if isinstance(self.sparsity, dict) or not math.isclose(self.sparsity, n / m):
                raise InvalidConfig(
                    f"sparsity={self.sparsity} conflicts with pattern {self.pattern!r}, which removes "
                    f"exactly {n} of every {m} weights ({n / m:g}); leave sparsity out."
                )
        if isinstance(self.sparsity, dict) and self.kind != "unstructured":
            raise InvalidConfig(f"Pattern {self.pattern!r} has one sparsity for all: a number, not a mapping.")
        if self.sparsity is None and self.kind != "n:m":
            raise InvalidConfig("sparsity is required: the fraction of the targeted weights to remove, in [0, 1).")

    def _check_units(self) -> None:
        """Refuse fields that mean nothing for the pattern, and units of another one."""
        for declared in fields(self):
            value, reason = getattr(self, declared.name), MEANINGLESS[self.kind].get(declared.name)
            if reason and value != declared.default:
                raise InvalidConfig(
                    f"{declared.name}={value!r} has no meaning with pattern {self.pattern!r}: {reason}."
                )
        allowed = LAYER_UNITS if self.kind == "layers" else UNITS
        for unit in self.units or ():
            if unit in (*UNITS, *LAYER_UNITS) and unit not in allowed:
                raise InvalidConfig(
                    f"units={self.units} do not go with pattern {self.pattern!r}, whose units are "
                    f"{', '.join(map(repr, allowed))}."
                )
            checks.one_of("unit", lambda: allowed)("units", unit)
        if self.units and "layer" in self.units and len(self.units) > 1:
            raise InvalidConfig(
                f"units={self.units} would remove blocks and parts of them at once. Drop 'layer' first, then skip "
                "sub-layers of what is left in a second run."
            )

    def _check_induction(self) -> None:
        """Let scorer 'si' bring its induction along; refuse one where nothing could be learned."""
        if self.scorer == "si" and self.induction is None and self.kind in ("unstructured", "n:m"):
            object.__setattr__(self, "induction", InductionConfig())
        if self.induction is None:
            return
        if self.scorer not in INDUCIBLE:
            raise InvalidConfig(
                f"induction has no meaning with scorer {self.scorer!r}: it scales scores that are products of weights "
                f"and inputs. Possible: {', '.join(map(repr, INDUCIBLE))}."
            )
        if self.induction.allow_bias and self.scorer == "sparsegpt":
            raise InvalidConfig(
                "induction.allow_bias has no meaning with scorer 'sparsegpt', whose weights make up for the mean of "
                "the inputs themselves: no bias is shifted or created. Leave it out, or choose 'wanda' or 'magnitude'."
            )
        if self.allocation == "global":
            raise InvalidConfig(
                "induction has no meaning with allocation='global': masks are learned one block after the other, and "
                "one ranking needs all scores at once. Use 'row' or 'matrix'."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "PruningConfig":
        return self  # it does not change, and transformers copies it on its way in, with the calibration data

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types; data held in memory is described, never copied."""
        induction = self.induction and self.induction.to_dict()
        return super().to_dict() | {"calibration": self.calibration.to_dict(), "induction": induction}
