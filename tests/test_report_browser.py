"""The report's page in a browser: nothing is loaded, items can be looked through, and it fits every screen."""

import re
import shutil

import pytest
from report_runs import EVIL, NCA, OPD, games, write_evaluation, write_run

from nca_jax.figures import last_views
from nca_jax.page.findings import find
from nca_jax.page.render import render
from nca_jax.page.sources import read_sources

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright, which drives the browser, is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the path")

# Without a sandbox it runs as root too, and without background services it asks nothing of a network.
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The file:// address of a report of three runs."""
    parent = tmp_path_factory.mktemp("runs")
    paths = [write_run(parent / "opd", OPD, 0.0), write_run(parent / "nca", NCA, 0.5)]
    paths.append(write_evaluation(parent / "games", games(), "runs/lake", 20, **{"domain.name": "frozenlake"}))
    sources = read_sources([str(path) for path in paths])
    page = render(sources, [find(source) for source in sources], last_views([source.run for source in sources]), [])
    (parent / "index.html").write_text(page)
    return (parent / "index.html").as_uri()


@pytest.fixture(scope="module")
def shots(tmp_path_factory):
    """Where pictures of the page are kept, for people to look at."""
    return tmp_path_factory.mktemp("shots")


@pytest.fixture(scope="module")
def opened(address):
    """The page on a desk in light colours, and what it asked for and complained of."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page()
        requests, complaints = [], []
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.goto(address)
        yield page, requests, complaints
        browser.close()


@pytest.fixture
def page(opened):
    """The page as it opens: OPD, the training context, the items that it changed."""
    page, _, _ = opened
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1280, "height": 844})
    page.select_option("#run", "0")
    page.select_option("#view", "with_context")
    page.select_option("#kind", "changed")
    page.fill("#search", "")
    return page


def position(page) -> str:
    return page.inner_text("#position")


def test_nothing_is_loaded_and_nothing_goes_wrong(opened, address):
    page, requests, complaints = opened
    for run in ("0", "1", "2"):
        page.select_option("#run", run)
    assert requests and {url for url in requests if not url.startswith("data:")} == {address}
    assert complaints == []


def test_items_one_after_the_other(page):
    assert position(page) == "1 of 8" and page.inner_text("#item h3") == "question-1 · anatomy"
    assert page.is_disabled("#previous")
    page.click("#next")
    assert position(page) == "2 of 8" and page.inner_text("#item h3") == "question-2 · anatomy"
    page.focus("body")
    page.keyboard.press("ArrowRight")
    assert position(page) == "3 of 8"
    page.keyboard.press("ArrowLeft")
    page.click("#previous")
    assert position(page) == "1 of 8"
    for _ in range(10):
        page.focus("body")
        page.keyboard.press("ArrowRight")
    assert position(page) == "8 of 8" and page.is_disabled("#next")


def test_arrows_in_a_field_stay_in_the_field(page):
    page.focus("#search")
    page.keyboard.press("ArrowRight")
    assert position(page) == "1 of 8"


def test_an_item_is_shown_in_both_views(page):
    page.click("#next")
    without, given = page.locator(".sides > section").all()
    assert without.locator("h4").inner_text() == "no context: right"
    assert given.locator("h4").inner_text() == "with context: wrong"
    assert without.locator("pre").inner_text() == "The answer is B."
    assert given.locator("pre").inner_text() == "The answer is C."
    assert given.locator("dl").inner_text().split("\n") == [
        "answer read",
        "C",
        "expected answer",
        "B",
        "length",
        "12 tokens",
    ]
    # Both beside each other on a desk.
    assert without.bounding_box()["y"] == given.bounding_box()["y"]


def test_what_a_model_wrote_is_shown_as_text(page):
    assert page.locator(".sides > section").nth(1).locator("pre").inner_text() == f"The answer is B. {EVIL}"
    assert page.locator("#item pre").first.inner_text() == "Question 1: which letter is it?\n<b>A</b> B C D"
    assert page.locator("#item img, #item b").count() == 0


def test_items_of_a_kind(page):
    page.select_option("#kind", "helped")
    assert position(page) == "no item" and "No item is so" in page.inner_text("#item")
    page.select_option("#run", "1")
    # The kind stays as it was chosen: NCA's 3 helped ones, its harmed one, and all.
    assert position(page) == "1 of 3" and page.inner_text("#item h3") == "question-21 · surgery"
    page.select_option("#kind", "harmed")
    assert position(page) == "1 of 1" and page.inner_text("#item h3") == "question-1 · anatomy"
    page.select_option("#kind", "all")
    assert position(page) == "1 of 24"


def test_items_that_hold_a_word(page):
    page.select_option("#kind", "all")
    page.fill("#search", "QUESTION 2")
    # Question 2 and 20 to 24.
    assert position(page) == "1 of 6"
    page.fill("#search", "onerror")
    assert position(page) == "1 of 1"
    page.fill("#search", "surgery")
    assert position(page) == "1 of 12"


def test_another_context(page):
    page.select_option("#view", "paraphrased")
    assert position(page) == "1 of 6"
    assert page.locator(".sides h4").nth(1).inner_text() == "paraphrased: wrong"
    # Another task's context is followed or not: it has answers of its own.
    page.select_option("#view", "other_task")
    assert page.locator("#kind option").all_inner_texts() == ["followed", "not followed", "all"]
    assert position(page) == "1 of 12"
    assert page.locator(".sides h4").nth(1).inner_text() == "other task (context following): followed"


def test_a_game_shows_its_turns(page):
    page.select_option("#run", "2")
    assert position(page) == "1 of 2"
    won, lost = page.locator(".sides > section").all()
    assert won.locator(".turns > li").count() == 2
    assert won.locator(".turns pre").all_inner_texts() == ["I go [right]", "-P-", "I go [right]", "--P"]
    assert lost.locator(".action").inner_text() == "no action (not possible)"


def luminance(colour: str) -> float:
    """Of "rgb(r, g, b)", from 0 to 1, by the definitions of sRGB and WCAG."""
    values = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390, 360])
def test_light_and_dark_on_a_desk_and_on_a_phone(page, scheme, width, shots):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 844})
    page.screenshot(path=str(shots / f"{scheme}_{width}.png"), full_page=True)
    overflow = "[document.scrollingElement.scrollWidth, document.scrollingElement.clientWidth]"
    needed, there = page.evaluate(overflow)
    assert needed <= there == width
    paper = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert paper < 0.02 if scheme == "dark" else paper == 1.0
    # What is written has the contrast of WCAG 2.2 AA, and so has what is written in figures.
    for selector in ("body", ".note", "thead th", ".right", ".wrong", "nav a", ".interval"):
        ink = luminance(page.evaluate(f"getComputedStyle(document.querySelector('{selector}')).color"))
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5, selector
    ink = luminance(page.evaluate("getComputedStyle(document.querySelector('svg text')).fill"))
    assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5
    # A wide table scrolls in a box of its own.
    boxes = page.evaluate("[...document.querySelectorAll('.scroll')].map(b => b.scrollWidth > b.clientWidth)")
    assert any(boxes) == (width < 1280)


def test_the_keyboard_reaches_all_and_shows_where_it_is(page):
    page.focus("#kind")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "next"  # "previous" is disabled at the first item
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert position(page) == "2 of 8"
