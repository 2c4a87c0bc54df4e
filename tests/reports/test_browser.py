"""The page as a browser shows it."""

import json
from collections.abc import Iterator

import pytest

from tests.reports.browser import Browser, chromium, find_chromium
from tests.reports.conftest import Written
from tests.reports.test_page import CHARTS, INSIDE, assert_table_is_result

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed here")

FIGURES = """[...document.querySelectorAll("figure")].map(figure => {
  const shown = [...figure.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect()).filter(box => box.width);
  const text = [...figure.querySelectorAll("svg text")].find(text => text.getBoundingClientRect().width);
  return {name: figure.id, shown: shown.length, width: shown[0].width, height: shown[0].height,
          letter: text.getBoundingClientRect().height, ink: getComputedStyle(text).fill};
})"""

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
def test_the_page_is_drawn_alone_and_fits(browser: Browser, complete: Written, width: int, dark: bool) -> None:
    tab = browser.tab().open(complete.page, width, dark)
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
    assert tab.complaints == []


def test_the_page_could_not_fetch_anything_if_it_tried(browser: Browser, complete: Written) -> None:
    tab = browser.tab().open(complete.page, 1280)
    tab.evaluate("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/x.png'}))")
    tab.evaluate("1")
    assert any("Content Security Policy" in json.loads(complaint)["entry"]["text"] for complaint in tab.complaints)
