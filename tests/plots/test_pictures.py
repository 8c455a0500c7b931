"""The pictures as files and as elements of a page."""

import logging
import re
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib")

from optimum_prune.plots import style
from optimum_prune.plots.pictures import save_pictures, svg_pictures
from tests.reports import DENSE, PRUNED, recovery, report

EVALUATIONS = {"dense": DENSE, "pruned": PRUNED}


def full():
    """Return a report that has something to show in every picture."""
    found = report(recovery=[recovery()])
    return replace(found, groups=[replace(g, scores={"kept": [1.0, 2, 3, 4, 5]}) for g in found.groups])


def test_files(tmp_path):
    names = ["kept", "measured", "recovery", "scores"]
    files = save_pictures(tmp_path, full(), EVALUATIONS)
    assert files == [tmp_path / f"{name}.png" for name in names] and sorted(tmp_path.iterdir()) == files
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)


def test_only_what_there_is_to_show(tmp_path):
    assert save_pictures(tmp_path, report(), {}) == [tmp_path / "kept.png"]


def test_without_matplotlib_there_are_none(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(style, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, logger="optimum_prune.plots.pictures"):
        assert save_pictures(tmp_path, full(), EVALUATIONS) == [] and not list(tmp_path.iterdir())
    assert "pip install 'optimum-prune[plots]'" in caplog.text


def test_the_same_report_gives_the_same_bytes(tmp_path):
    first = [path.read_bytes() for path in save_pictures(tmp_path, full(), EVALUATIONS)]
    assert first == [path.read_bytes() for path in save_pictures(tmp_path, full(), EVALUATIONS)]
    assert svg_pictures(full(), EVALUATIONS) == svg_pictures(full(), EVALUATIONS)


def test_elements_can_stand_on_one_page():
    elements = "".join(svg_pictures(full(), EVALUATIONS).values())
    ids = re.findall(r'\bid="([^"]*)"', elements)
    assert len(ids) == len(set(ids)) > 50
    used = re.findall(r"url\(#([^)]*)\)", elements) + re.findall(r'href="#([^"]*)"', elements)
    assert used and set(used) <= set(ids)


def test_text_is_text_in_the_colour_of_the_page():
    element = svg_pictures(report(), {})["kept"]
    assert element.startswith("<svg") and "mlp_channel: 48 of 72 kept (66.7%)</text>" in element
    assert "fill: currentColor" in element and style.INK not in element
