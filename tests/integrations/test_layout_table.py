"""The table of layouts is what a run gives. Here of one architecture: all of them take minutes."""

from pathlib import Path

from tests.integrations.layout_table import ARCHITECTURES, HEADING, LAYOUTS, markdown, table

WRITTEN = Path(__file__).parents[2] / "model_cards" / "LAYOUTS.md"
QUICK = ("Llama",)
AGAIN = "run `python tests/integrations/layout_table.py > model_cards/LAYOUTS.md`"


def test_rows_are_what_a_run_gives():
    written = WRITTEN.read_text().splitlines()
    assert [line for line in markdown(table(QUICK)) if line not in written] == [], AGAIN


def test_no_row_is_missing():
    rows = [line.split(" | ")[:2] for line in WRITTEN.read_text().splitlines() if line.startswith("| ")][2:]
    assert rows == [[f"| {name}", layout] for name in ARCHITECTURES for layout in LAYOUTS], AGAIN


def test_heading_is_that_of_the_script():
    """But for the versions, which are those of the run."""
    assert [line for line in HEADING.splitlines() if line.startswith(("#", "- ", "  "))] == [
        line for line in WRITTEN.read_text().splitlines() if line.startswith(("#", "- ", "  "))
    ]
