"""What goes beside the weights: tokenizer, processor, adapter, report, pictures, card."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimum_prune.errors import InvalidConfig
from optimum_prune.integrations.card import inherited_metadata, model_card
from optimum_prune.integrations.layouts import PICTURES, Written
from optimum_prune.integrations.loading import write_report
from optimum_prune.measurements import Evaluation
from optimum_prune.plots.pictures import save_pictures
from optimum_prune.recovery.adapter import FOLDER
from optimum_prune.report import PruningReport


@dataclass(frozen=True)
class Companions:
    """What is written with a model.

    Attributes:
        tokenizer: saved along, where there is one.
        processor: the same.
        adapter: folder of an adapter that was not merged; None where there is none.
        report: of the pruning; without one there is no card.
        evaluations: what was measured, by the words of `STAGES`.
        card_data: metadata of the card that is known better than what can be found.
    """

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
        if self.report is not None:
            write_report(folder, self.report, self.evaluations)
            self._write_card(self.report, folder, written)

    def _write_card(self, report: PruningReport, folder: Path, written: Written) -> None:
        pictures = save_pictures(folder / PICTURES, report, self.evaluations)
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
            card_data=inherited_metadata(report.base_model) | dict(self.card_data or {}),
        )
        card.save(folder / "README.md")
