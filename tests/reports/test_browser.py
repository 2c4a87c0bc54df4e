"""The page as a browser shows it."""

import json
from collections.abc import Iterator

import pytest

from tests.reports.browser import Browser, chromium, find_chromium
from tests.reports.conftest import Written
from tests.reports.test_page import CHARTS, INSIDE, assert_table_is_result, data_of

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed here")

OPEN = "document.querySelectorAll('details.section').forEach(section => { section.open = true; })"
FIGURES = """[...document.querySelectorAll("figure")].map(figure => {
  const shown = [...figure.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect()).filter(box => box.width);
  const text = [...figure.querySelectorAll("svg text")].find(text => text.getBoundingClientRect().width);
  return {name: figure.id, shown: shown.length, width: shown[0].width, height: shown[0].height,
          letter: text.getBoundingClientRect().height, ink: getComputedStyle(text).fill};
})"""
DRAWN = """[...document.querySelectorAll("figure:has(script)")].map(figure => ({
  name: figure.id,
  pictures: [...figure.querySelectorAll("svg")].filter(svg => svg.getBoundingClientRect().width).length,
  panels: [...figure.querySelectorAll("canvas")].map(canvas => canvas.getBoundingClientRect().width),
}))"""
ALL_DRAWN = """document.querySelectorAll("figure:has(script)").length > 5 &&
  [...document.querySelectorAll("figure .plot")].every(plot => plot.querySelector("canvas"))"""
VALUES = "document.querySelector('#loss .values').hidden ? '' : document.querySelector('#loss .values').innerText"

TABLE = """Object.fromEntries([...document.querySelectorAll("tr[data-budget]")].map(row => [
  row.dataset.architecture + " " + row.dataset.budget,
  Object.fromEntries([...row.querySelectorAll("td[class]")].flatMap(cell => {
    const name = cell.classList[0], data = cell.querySelector("data");
    return [[name, cell.innerText.trim()], ...(data ? [[name + "-value", data.value]] : [])];
  }))
]))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    with chromium(CHROMIUM, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_without_scripts_the_page_shows_pictures_that_fit(
    browser: Browser, complete: Written, width: int, dark: bool
) -> None:
    tab = browser.tab().open(complete.page, width, dark, script=False)
    tab.evaluate(OPEN)
    figures = tab.evaluate(FIGURES)
    assert [figure["name"] for figure in figures] == list(CHARTS + INSIDE)
    for figure in figures:
        assert figure["shown"] == 1
        assert min(figure["width"], 950) >= min(width, 950) - 40
        assert figure["height"] > 100
        assert figure["letter"] >= 10  # pixels: readable on a phone as well
        assert figure["ink"] == ("rgb(230, 232, 236)" if dark else "rgb(22, 24, 29)")
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    cells = {tuple(key.split()): cell for key, cell in tab.evaluate(TABLE).items()}
    assert_table_is_result(cells, complete.result)
    assert [url for url in tab.requests if not url.startswith("data:")] == [complete.page.absolute().as_uri()]


@pytest.mark.parametrize(("width", "dark"), [(1400, True), (400, False)])
def test_the_script_draws_every_line_chart_instead_of_its_picture(
    browser: Browser, complete: Written, width: int, dark: bool
) -> None:
    tab = browser.tab().open(complete.page, width, dark)
    tab.evaluate(OPEN)
    tab.until(ALL_DRAWN)
    figures = tab.evaluate(DRAWN)
    assert [f["name"] for f in figures] == [n for n in CHARTS + INSIDE if n not in ("costs", "robustness")]
    for figure in figures:
        assert figure["pictures"] == 0
        assert len(figure["panels"]) == len(data_of(complete.html, figure["name"]))
        assert min(figure["panels"]) > 200
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    cells = "[...document.querySelectorAll('.losses .seconds')].map(cell => cell.getBoundingClientRect().right)"
    assert max(tab.evaluate(cells)) <= width
    assert [url for url in tab.requests if not url.startswith("data:")] == [complete.page.absolute().as_uri()]
    assert tab.complaints == []
    tab.send("Emulation.setEmulatedMedia", media="print")
    assert all(f["pictures"] == 1 and set(f["panels"]) == {0} for f in tab.evaluate(DRAWN))


def test_tables_fit_a_printed_page(browser: Browser, complete: Written) -> None:
    tab = browser.tab().open(complete.page, 680)  # A4 between its margins
    tab.evaluate(OPEN)
    tab.send("Emulation.setEmulatedMedia", media="print")
    outside = (
        "[...document.querySelectorAll('table')].filter(t => t.offsetWidth && t.getBoundingClientRect().right > 680)"
    )
    assert tab.evaluate(f"{outside}.map(table => table.className + table.innerText.slice(0, 40))") == []


def test_a_chart_answers_to_the_pointer(browser: Browser, complete: Written) -> None:
    """The values beside it, a line that is taken out, and a part that is enlarged."""
    tab = browser.tab().open(complete.page, 1400)
    tab.until("document.querySelectorAll('#loss canvas').length == 2")
    box = tab.evaluate("document.querySelector('#loss .u-over').getBoundingClientRect().toJSON()")
    x, y, width, height = (box[name] for name in ("x", "y", "width", "height"))
    panel = data_of(complete.html, "loss")[0]
    left, right = panel["limits"][0]
    named = {line["name"]: line for line in panel["series"] if not line["note"]}
    at = named["GPT+"]["x"][10]
    tab.mouse("Moved", x + width * (at - left) / (right - left), y + height / 2)
    tab.until(f"({VALUES}) != ''")
    lines = [" ".join(row.split()) for row in tab.evaluate(VALUES).splitlines()]
    assert lines == ["tokens 44k", *(f"{name} {line['y'][10]:.4g}" for name, line in named.items())]
    tab.evaluate("[...document.querySelectorAll('#loss button')].find(b => b.innerText == 'nGPT').click()")
    tab.until(f"!({VALUES}).includes('\\nnGPT')")
    for kind, part in (("Pressed", 0.5), ("Moved", 0.7), ("Moved", 0.9), ("Released", 0.9)):
        tab.mouse(kind, x + width * part, y + height / 2)
    tab.mouse("Moved", x + 1, y + height / 2)
    enlarged = f"/^tokens 4[04]k/.test({VALUES})"  # the left end of the second half of 84k
    tab.until(enlarged)
    for axis in ("log x", "log y", "log y"):  # another axis keeps the part
        tab.evaluate(f"[...document.querySelectorAll('#loss button')].find(b => b.innerText == '{axis}').click()")
        tab.mouse("Moved", x + width / 2, y + height / 2)
        tab.mouse("Moved", x + 1, y + height / 2)
        tab.until(enlarged)
    assert tab.complaints == []


def test_every_control_can_be_reached_and_used_by_keys(browser: Browser, complete: Written) -> None:
    tab = browser.tab().open(complete.page, 1400)
    tab.until("document.querySelectorAll('#loss canvas').length == 2")
    active = "document.activeElement"
    seen: list[str] = []
    while not tab.evaluate(f"{active}.className == 'plot'"):
        tab.press("Tab")
        seen.append(tab.evaluate(f"{active}.innerText"))
        if seen[-1] == "log y":
            tab.press(" ")
            assert tab.evaluate(f"{active}.getAttribute('aria-pressed')") == "true"
        assert len(seen) < 60
    assert seen[-8:-1] == ["GPT+", "nGPT", "anGPT", "each run", "log x", "log y", "reset zoom"]
    tab.press("ArrowRight")
    first = tab.evaluate(VALUES)
    tab.press("ArrowRight")
    second = tab.evaluate(VALUES)
    assert first
    assert second not in ("", first)
    for key in "++":
        tab.press(key)
    for _ in range(40):
        tab.press("ArrowRight")
    assert float(tab.evaluate(VALUES).split()[1].removesuffix("k")) < 30  # the right end of a quarter of 84k
    tab.press("0")
    tab.press("ArrowLeft")
    assert tab.evaluate(VALUES).startswith("tokens 80k")
    assert tab.complaints == []


def test_a_link_opens_the_section_that_it_leads_to(browser: Browser, complete: Written) -> None:
    tab = browser.tab().open(complete.page, 1400)
    tab.evaluate("document.querySelector('nav a[href=\"#speed\"]').click()")
    tab.until("document.querySelector('#speed').closest('details').open")
    tab.until("document.querySelectorAll('#budgets canvas').length == 3")
    tab.until("document.querySelector('nav').getBoundingClientRect().top >= 0 && scrollY > 500")


def test_the_page_could_not_fetch_anything_if_it_tried(browser: Browser, complete: Written) -> None:
    tab = browser.tab().open(complete.page, 1280)
    tab.evaluate("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/x.png'}))")
    tab.evaluate("1")
    assert any("Content Security Policy" in json.loads(complaint)["entry"]["text"] for complaint in tab.complaints)
