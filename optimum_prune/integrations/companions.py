"""What goes beside the weights: tokenizer, processor, files of the source, adapter, report, pictures, card."""

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimum_prune.errors import InvalidConfig
from optimum_prune.integrations.beside import Origin, copy_beside
from optimum_prune.integrations.card import model_card
from optimum_prune.integrations.layouts import PICTURES, Written
from optimum_prune.integrations.loading import write_report
from optimum_prune.integrations.metadata import derived_from, inherited_metadata
from optimum_prune.integrations.signature import spare_name
from optimum_prune.measurements import Evaluation
from optimum_prune.plots.pictures import save_pictures
from optimum_prune.recovery.adapter import FOLDER
from optimum_prune.report import PruningReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Companions:
    """What is written with a model.

    Attributes:
        target: folder in which all of it will be in the end.
        origin: where the model came from; small files beside its weights go along.
        tokenizer: saved along, where there is one.
        processor: the same.
        adapter: folder of an adapter that was not merged; None where there is none.
        report: of the pruning; without one there is no card.
        evaluations: what was measured, by the words of `STAGES`.
        card_data: metadata of the card that is known better than what can be found.
    """

    target: Path
    origin: Origin
    tokenizer: Any
    processor: Any
    adapter: str | None
    report: PruningReport | None
    evaluations: Mapping[str, Evaluation]
    card_data: Mapping[str, Any] | None

    def write(self, folder: Path, written: Written) -> None:
        """Write all of it into the folder of a checkpoint.

        Raises:
            InvalidConfig: the adapter does not fit the layout.
        """
        for companion in filter(None, (self.tokenizer, self.processor)):
            companion.save_pretrained(folder)
        if self.adapter is not None:
            if written.layout == "padded":
                raise InvalidConfig(
                    "The adapter of the recovery fits the model without padding. Use layout='compact', or recover "
                    "with another merge than 'none'."
                )
            shutil.copytree(self.adapter, folder / FOLDER)
        left = copy_beside(self.origin, folder, self.target)
        if left:
            named = ", ".join(f"{name} ({reason})" for name, reason in left.items())
            logger.warning("Not copied from %s: %s.", self.origin.name_or_path, named)
        if self.report is not None:
            write_report(folder, self.report, self.evaluations)
            self._write_card(self.report, folder, written, left)
            self._keep_words(folder)

    def _write_card(self, report: PruningReport, folder: Path, written: Written, left: Mapping[str, str]) -> None:
        pictures = save_pictures(folder / PICTURES, report, self.evaluations)
        inherited: dict[str, Any] = {}
        for source in dict.fromkeys((report.base_model, self.origin.name_or_path)):  # the nearer source knows better
            inherited |= inherited_metadata(source, beside=folder)
        card = model_card(
            report,
            evaluations=self.evaluations,
            layout=written.layout,
            storage=written.storage,
            architecture=written.architecture,
            reads_images=self.processor is not None,
            file_bytes=written.weight_bytes,
            parameters=written.parameters,
            adapter=self.adapter is not None,
            pictures=[f"{PICTURES}/{picture.name}" for picture in pictures],
            left=left,
            derived_from=derived_from(self.origin.name_or_path) or derived_from(report.base_model),
            card_data=inherited | dict(self.card_data or {}),
        )
        card.save(folder / "README.md")

    def _keep_words(self, folder: Path) -> None:
        """Keep a `README.md` that the new card replaces, if this package did not write it, or somebody edited it."""
        card = self.target / "README.md"

        def read(name: str) -> bytes | None:
            found = [place / name for place in (folder, self.target) if (place / name).exists()]
            return found[0].read_bytes() if found else None

        if card.is_file() and (name := spare_name(card.read_bytes(), read)):
            shutil.copyfile(card, folder / name)
            logger.warning(
                "README.md in %s was not written by this package, or edited since: it is kept as %s.", self.target, name
            )
