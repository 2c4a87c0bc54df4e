import math

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from angpt.present import interactive
from angpt.present.interactive import panels_of
from angpt.present.layers import LEGEND_LAYERS, layer_panels
from angpt.present.style import EACH_RUN, INK, band, label_axis, reference, unlisted


def test_lines_bars_areas_and_rules_of_a_panel() -> None:
    figure = Figure()
    ax = figure.subplots()
    ax.plot([2, 1], [4.1234567, 3], "o--", color="#159a40", label="anGPT")
    ax.plot([1, 2, math.nan, 1, 2], [5, 6, math.nan, 7, math.nan], color=INK, label=unlisted("GPT+", EACH_RUN))
    ax.plot([1], [9], "s", color="#159a40", label=unlisted("anGPT", "more than"))
    ax.plot([1, 2], [0, 0], color="#159a40")  # without a name
    ax.errorbar([1.5], [3.0], yerr=0.5, color="#159a40", capsize=3, fmt="none")
    band(ax, [1, 2], [1, 1], [2, 2], "#a838e0")
    reference(ax)
    reference(ax, vertical=True)
    ax.set(xlabel="tokens", ylabel="loss", xlim=(0, 3), ylim=(0, 10), yscale="linear")
    ax.set_title("Title", loc="left")
    (panel,) = panels_of(figure)
    assert (panel["title"], panel["labels"], panel["ticks"]) == ("Title", ["tokens", "loss"], None)
    assert (panel["limits"], panel["log"]) == ([[0, 3], [0, 10]], [False, False])
    solid = {"dash": False, "dots": False}
    assert panel["series"] == [
        {"name": "anGPT", "note": "", "color": "#159a40", "dash": True, "dots": False, "x": [1, 2], "y": [3, 4.1235]},
        {"name": "GPT+", "note": EACH_RUN, "color": None, **solid, "x": [1, 2], "y": [5, 6]},
        {"name": "GPT+", "note": EACH_RUN, "color": None, **solid, "x": [1, 2], "y": [7, None]},
        {"name": "anGPT", "note": "more than", "color": "#159a40", "dash": False, "dots": True, "x": [1], "y": [9]},
    ]
    assert panel["bars"] == [{"color": "#159a40", "x": 1.5, "y": [2.5, 3.5]}]
    assert [(area["color"], set(area["x"]), set(area["y"])) for area in panel["areas"]] == [("#a838e0", {1, 2}, {1, 2})]
    assert panel["rules"] == [("y", 1.0), ("x", 1.0)]


def test_many_lines_and_points_become_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interactive, "MOST_LINES", 3)
    monkeypatch.setattr(interactive, "MOST_POINTS", 5)
    figure = Figure()
    ax = figure.subplots()
    ax.plot(range(101), range(101), label="mean")
    for _ in range(3):
        ax.plot(range(101), range(101), label=unlisted("run", EACH_RUN))
    (panel,) = panels_of(figure)
    assert [(line["name"], line["x"]) for line in panel["series"]] == [("mean", [0, 25, 50, 75, 100])]


def test_axes_whose_ticks_are_names() -> None:
    figure = Figure()
    left, right, bars = figure.subplots(1, 3)
    left.plot([1, 2], [1, 2], label="a")
    label_axis(left.xaxis, lambda value: f"<{value:g}>", (1.0, 2.0))
    right.plot([1, 2], [1, 2], label="a")
    right.set_yticks([1, 2], ["one", "two"])
    bars.barh([0], [1])
    panels = panels_of(figure)
    assert [panel["ticks"] for panel in panels] == [[(1.0, "<1>"), (2.0, "<2>")]]


@pytest.mark.parametrize(("layers", "axes"), [(LEGEND_LAYERS, 1), (LEGEND_LAYERS + 1, 2)])
def test_few_layers_have_a_legend_and_many_a_colour_bar(layers: int, axes: int) -> None:
    figure = layer_panels([("run", np.arange(3.0), np.ones((3, layers)))], narrow=False, columns=1, last="out")
    assert len(figure.axes) == axes
    assert len(figure.legends) == 2 - axes
    names = [line["name"] for line in panels_of(figure)[0]["series"]]
    assert names == [*(f"layer {i}" for i in range(1, layers)), "out"]


def test_a_panel_beside_others_keeps_its_labels() -> None:
    """In the wide figure only the panel at the left shows them."""
    series = [(name, np.arange(3.0), np.ones((3, 2))) for name in ("one", "two")]
    figure = layer_panels(series, narrow=False, columns=2, ylabel="mean of α")
    assert [ax.yaxis.label.get_visible() for ax in figure.axes] == [True, False]
    assert [panel["labels"] for panel in panels_of(figure)] == [["tokens", "mean of α"]] * 2
