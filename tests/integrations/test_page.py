"""The report as a page: whole, harmless, and readable on a phone, in a real browser."""

import io
from dataclasses import replace
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib")

from PIL import Image

from optimum_prune.integrations.page import page
from tests.browser import browser, needs_browser
from tests.reports import DENSE, PRUNED, group, masked, recovery, report

EVALUATIONS = {"dense": DENSE, "pruned": PRUNED}
SECTIONS = ["What was asked, what was achieved", "Measured", "Trained after pruning", "Scores", "How to do it again"]
WIDE = "document.documentElement.scrollWidth - window.innerWidth"


def full(layers: int = 3):
    """Return a report with something in every section."""
    found = report(layers, recovery=[recovery(control=recovery())], warnings=["Something to know."])
    return replace(found, groups=[replace(g, scores={"kept": [1.0, 2, 3, 4, 5]}) for g in found.groups])


class Reader(HTMLParser):
    """Collects the elements of a page, their attributes, and the text of cells."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self.text += " "

    def handle_data(self, data):
        self.text += data
        if self.elements and self.elements[-1] in ("td", "th") and self.rows:
            self.rows[-1][-1] += data.strip()


# What it says


@pytest.mark.parametrize("minute", [0, 12])
def test_models_that_were_timed_apart(minute):
    times = {"dense": 0, "pruned": minute}
    measured = {k: replace(v, timed_at=f"2026-01-01T10:{times[k]:02}:00+00:00") for k, v in EVALUATIONS.items()}
    assert ("measured 12 minutes apart, not in turn." in page(full(), measured, title="it")) == bool(minute)


def test_tables():
    rows = Reader(page(full(), EVALUATIONS, title="it")).rows
    assert ["kv_group", "10.0%", "8.3%", "11 of 12"] in rows
    assert ["model.layers.0", "3 of 4", "16 of 24"] in rows
    assert ["perplexity", "12.50", "25.00", "2.00x"] in rows
    assert ["with the adapter", "3.5000", ""] in rows and ["dense, trained alike", "3.5000", ""] in rows


def test_an_adapter_that_was_not_kept_has_no_loss():
    before = recovery().before
    given = recovery(kept=False, after=before, merged=None, best_step=0)
    rows = Reader(page(report(recovery=[given]), EVALUATIONS, title="it")).rows
    assert ["pruned", "4.0000", ""] in rows and not [row for row in rows if row[0] in ("with the adapter", "merged")]


def test_what_a_reader_wants_to_know_first():
    measured = EVALUATIONS | {"recovered": EVALUATIONS["pruned"], "control": replace(DENSE, perplexity=10.0)}
    text = " ".join(Reader(page(full(), measured, title="me/it")).text.split())
    assert "me/it org/dense, pruned with optimum_prune: pattern structured, scorer ntk, allocation gamma" in text
    assert "parameters 9,000 (-10.0%)" in text and "perplexity 25.00 (2.00x)" in text
    assert "decoding, per token 9.0 ms (0.90x) Something to know." in text


def test_numbers_from_before_a_training_are_not_those_of_the_model():
    text = " ".join(Reader(page(full(), EVALUATIONS, title="me/it")).text.split())
    assert "perplexity 25.00 (2.00x)" not in text and "these numbers are from before" in text


def test_sections_without_content_are_left_out():
    text = Reader(page(report(), {}, title="it")).text
    assert "Nothing was measured on this model" in text
    assert "Trained after pruning" not in text and "Scores" not in text and "Something" not in text


def test_zeros_are_no_savings():
    text = " ".join(Reader(page(masked(), {}, title="it")).text.split())
    assert "targeted weights set to zero 52.1%" in text and "neither smaller nor faster" in text


def test_no_path_of_a_machine():
    data = DENSE.data | {"source": "/home/somebody/texts"}
    trained = recovery().data | {"sources": [{"source": "/home/somebody/chats", "share": 1.0}]}
    found = report(base_model="/home/somebody/model", calibration=data, recovery=[recovery(data=trained)])
    found.config["calibration"] = {"source": "/home/somebody/texts"}
    evaluations = {"pruned": replace(PRUNED, data=data)}
    text = page(found, evaluations, title="it")
    assert "somebody" not in text and "texts" in text and "chats" in text


# What it cannot do


def hostile(text: str):
    """Return a report in which a stranger wrote `text` wherever there are words."""
    data = DENSE.data | {"source": text}
    spread = {"kept": [1.0, 2, 3, 4, 5]}
    return report(
        groups=[replace(group(text, 0, text, 4, 3, 100, text), scores=spread)],
        asked_per_stack={text: {text: 0.2}},
        config=report().config | {"pattern": text, "scorer": text, "scorer_options": {text: text}},
        model_type=text,
        allocation=text,
        compensation=text,
        gamma={text: 1.0, "other": 2.0},
        base_model=text,
        base_revision=text,
        calibration=data,
        versions={text: text, "optimum_prune": text},
        warnings=[text],
        recovery=[recovery(data={"sources": [{"source": text, "share": 1}], "samples": 1, "trained_tokens": 1})],
    ), {text: DENSE, "pruned": replace(PRUNED, data=data, device=text)}


@pytest.fixture(scope="module")
def harmless():
    return Reader(page(*hostile("calm"), title="calm"))


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "</style><link rel=stylesheet href=//evil.example/x.css>",
        "</text></svg><iframe src=//evil.example></iframe>",
        "{{ 7 * 191 }} {% include 'x' %}",
        "<!-- <![CDATA[ & $x$ \\frac",
    ],
)
def test_what_strangers_wrote_is_text(text, harmless):
    read = Reader(page(*hostile(text), title=text))
    assert set(read.elements) == set(harmless.elements)
    assert set(read.elements).isdisjoint({"script", "img", "iframe", "link", "object", "form", "a"})
    assert {name for name, _ in read.attributes} == {name for name, _ in harmless.attributes}
    assert text in read.text and "1337" not in read.text


def test_nothing_is_asked_of_anybody():
    text = page(full(), EVALUATIONS, title="it")
    read = Reader(text)
    assert "default-src 'none'" in text and "@import" not in text
    assert not [name for name, _ in read.attributes if name.startswith("on") or name in ("src", "action", "data")]
    assert all(value.startswith("#") for name, value in read.attributes if name.endswith("href"))
    assert text.count("url(") == text.count("url(#")


# In a browser


@pytest.fixture(scope="module")
def opened():
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "report.html"
    found = full(30)
    stack = "model.language_model.layers.of.a.long.name"  # tables and titles wider than a phone
    groups = [replace(g, stack=stack) for g in found.groups]
    found = replace(found, groups=groups, asked_per_stack={stack: found.asked_per_stack["model.layers"]})
    file.write_text(page(found, EVALUATIONS, title="somebody/" + "long" * 20), encoding="utf-8")
    return file


def mean_brightness(screenshot: bytes) -> float:
    picture = Image.open(io.BytesIO(screenshot)).convert("L").resize((1, 1))
    return float(picture.getpixel((0, 0)))  # pyright: ignore[reportArgumentType]


@needs_browser
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_shown(width, opened, written):
    opened.open(written, width=width)
    assert opened.evaluate(WIDE) == 0  # nothing to scroll sideways but tables, by themselves
    assert opened.evaluate("[...document.querySelectorAll('h2')].map(h => h.innerText)") == SECTIONS
    drawn = opened.evaluate("[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().toJSON())")
    assert len(drawn) == 4 and all(box["height"] > 100 and box["right"] <= width for box in drawn)
    assert opened.evaluate("[...document.querySelectorAll('svg text')].every(t => t.getBBox().width > 0)")


@needs_browser
def test_nothing_is_cut_off(opened, written):
    """Every number of a table that is wider than a phone can be scrolled to."""
    opened.open(written, width=390)
    look = "s => [s.scrollWidth > s.clientWidth, getComputedStyle(s).overflowX]"
    boxes = opened.evaluate(f"[...document.querySelectorAll('.scroll')].map({look})")
    assert any(wide for wide, _ in boxes) and {overflow for _, overflow in boxes} == {"auto"}


@needs_browser
def test_light_and_dark(opened, written):
    opened.open(written, width=390)
    light = mean_brightness(opened.screenshot())
    opened.open(written, width=390, dark=True)
    dark = mean_brightness(opened.screenshot())
    assert light > 200 and dark < 60
    text = "getComputedStyle(document.querySelector('svg text')).fill"
    assert opened.evaluate(text) == "rgb(230, 233, 236)"


@needs_browser
def test_the_browser_has_nothing_to_complain_of(opened, written):
    before = len(opened.requests)
    opened.open(written, width=390)
    assert opened.requests[before:] == [written.resolve().as_uri()] and opened.complaints == []
