"""Still figures: plotly's JSON is valid, the static picture is well formed, and both show the same numbers."""

import base64
import itertools
import json
import math
import re
from xml.etree import ElementTree

import numpy as np
import plotly.graph_objects
import pytest

from kit import figures
from kit.figures import palette, png
from kit.figures.palette import COLOUR_OF
from kit.figures.svg import INK, LETTER
from kit.show import HTML_COLOURS

PHASES = {"load": {"weights": 20.0, "optimizer": 0.0}, "step": {"weights": 20.0, "gradients": 4.0}}
BARS = figures.bars("Memory <by> phase", "GiB", PHASES, ("capacity", 80.0))
LINES = figures.lines("Loss", "step", "nats a token", {"a": ([1, 2, 3], [3.0, math.nan, 2.0])})
RANGES = figures.ranges("Load", "GB/s", {"torch.load": (1.0, 1.2, 1.3)}, ("plain reads", 14.0))
HEAT = figures.heat("Memory", "tokens", "rows", [1024, 2048], [1, 2], [[10, 40], [20, 81]], 80, (2048, 1))
SANKEY = figures.sankey("Tokens", "tokens", [("read", "kept", 900), ("read", "dropped", 100), ("read", "nothing", 0)])
HISTOGRAM = figures.histogram("Lengths", "tokens", "documents", [64, 128, 192, 256], [3, 0, 12, 1])
FIGURES = [BARS, LINES, RANGES, HEAT, SANKEY, HISTOGRAM]
EVERY = pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: type(figure).__name__)


@EVERY
def test_the_json_is_what_plotly_accepts_and_small(figure):
    assert isinstance(figure.plotly(), plotly.graph_objects.Figure)  # raises for an unknown property
    assert len(json.dumps(figure.plotly_dict(), allow_nan=False)) < 10_000


@EVERY
def test_the_static_picture_is_xml_with_the_title(figure):
    root = ElementTree.fromstring(figure.svg())
    assert root.attrib["aria-label"] == figure.title
    assert float(root.attrib["height"]) > 60


@EVERY
def test_a_notebook_gets_both_drawings_and_text(figure):
    bundle, metadata = figure._repr_mimebundle_()
    assert set(bundle) == {"application/vnd.plotly.v1+json", "image/png", "text/plain"}
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert len(bundle["image/png"]) < 40_000
    assert metadata == {"image/png": {"width": 720}}
    assert figure.title in bundle["text/plain"]


@EVERY
def test_no_figure_paints_its_background(figure):
    assert "#fff" not in figure.svg()
    assert figure.plotly_dict()["layout"]["paper_bgcolor"] == "rgba(0,0,0,0)"


def test_the_parts_of_a_bar_keep_their_colour_and_end_with_the_sum():
    traces = {trace["name"]: trace for trace in BARS.plotly_dict()["data"]}
    assert list(traces) == ["weights", "gradients"]  # the optimizer has no value anywhere
    assert traces["weights"]["marker"]["color"] == COLOUR_OF["weights"]
    assert traces["gradients"]["x"] == [0.0, 4.0]
    texts = [element.text for element in ElementTree.fromstring(BARS.svg()).iter("{http://www.w3.org/2000/svg}text")]
    assert "24" in texts and "capacity 80" in texts


@pytest.mark.parametrize("end", [70.0, 76.0, 79.9, 80.0, 80.3])
def test_the_number_of_a_bar_does_not_cross_the_line_of_the_limit(end):
    parts = figures.bars("Memory", "GiB", {"load": {"weights": end}}, ("capacity", 80.0))
    ranges = figures.ranges("Load", "GB/s", {"torch.load": (1.0, 66.6, end)}, ("plain reads", 80.0))
    for figure, text in ((parts, f"{end:.3g}"), (ranges, "66.6")):
        elements = list(ElementTree.fromstring(figure.svg()).iter())
        (left,) = [float(e.attrib["x"]) for e in elements if e.text == text and e.attrib["text-anchor"] == "start"]
        dashed = [e.attrib["d"] for e in elements if "stroke-dasharray" in e.attrib]
        limit = float(dashed[-1].partition(" ")[0][1:])  # behind the sign in the legend
        assert not left - 2 < limit < left + LETTER * len(text)


def test_a_value_that_is_not_finite_leaves_a_gap_in_both_drawings():
    sent = np.frombuffer(base64.b64decode(LINES.plotly_dict()["data"][0]["y"]["bdata"]), np.float32)
    assert str(sent.tolist()) == "[3.0, nan, 2.0]"
    (path,) = [e.attrib["d"] for e in ElementTree.fromstring(LINES.svg()).iter() if e.attrib.get("fill") == "none"]
    assert path.count("M") == 2 and "l" not in path


def test_thinning_keeps_every_extreme_and_the_ends():
    x, y = list(range(10_000)), [0.0] * 10_000
    y[3333], y[7777] = 5.0, -5.0
    (drawn,) = figures.lines("t", "x", "y", {"a": (x, y)}).chart.drawn()
    assert len(drawn.x) < 700 and (drawn.x[0], drawn.x[-1]) == (0, 9999)
    assert max(drawn.y) == 5.0 and min(drawn.y) == -5.0


def test_the_edge_of_a_heat_map_runs_between_what_fits_and_what_does_not():
    assert sorted(HEAT._edges()) == [(0.5, 0.5, 0.5, 1.5), (0.5, 0.5, 1.5, 0.5)]
    shapes = HEAT.plotly_dict()["layout"]["shapes"]
    assert [shape["type"] for shape in shapes].count("rect") == 1  # the marked cell


def test_flows_of_zero_are_left_out_and_columns_follow_the_flow():
    assert SANKEY.plotly_dict()["data"][0]["node"]["label"] == ["read 1,000", "kept 900", "dropped 100"]
    assert SANKEY._columns() == {"read": 0, "kept": 1, "dropped": 1}


def test_figures_load_without_plotly():
    import subprocess
    import sys

    code = "import sys, kit.figures; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_numbers_of_a_heat_map_are_readable_in_both_themes():
    assert HEAT.plotly_dict()["data"][0]["textfont"]["color"] == INK


@EVERY
def test_the_text_of_a_figure_is_drawn_in_its_png(figure):
    without = re.sub(r"<text.*?</text>", "", figure.svg())
    assert png.draw(figure.svg()) != png.draw(without)


def test_empty_bins_of_a_histogram_keep_their_place():
    (trace,) = HISTOGRAM.plotly_dict()["data"]
    assert (trace["x"], trace["width"]) == ([32, 96, 160, 224], [64] * 4)
    assert trace["y"] == [3, 0, 12, 1]


# Machado, Oliveira and Fernandes (2009), severity 1.0, for linear RGB
VISION = {
    "normal": np.eye(3),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                              [-0.011820, 0.042940, 0.968881]]),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                            [-0.003882, -0.048116, 1.051998]]),
}  # fmt: skip
TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
                   [0.0193339, 0.1191920, 0.9503041]])  # fmt: skip
WHITE = np.array([0.95047, 1.0, 1.08883])  # D65


def linear(colour):
    """Linear RGB of "#rrggbb", by sRGB's transfer function."""
    levels = np.array([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIELAB of linear RGB."""
    ratio = TO_XYZ @ np.clip(rgb, 0, 1) / WHITE
    root = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


@pytest.mark.parametrize("vision", VISION)
def test_any_two_colours_of_the_palette_differ_for_people_with(vision):
    def distance(pair):
        first, second = (lab(VISION[vision] @ linear(colour)) for colour in pair)
        return float(np.linalg.norm(first - second))

    every = {*palette.COLOURS, palette.BAD, *COLOUR_OF.values()}
    closest = min(itertools.combinations(sorted(every), 2), key=distance)
    assert distance(closest) >= 15, closest


@pytest.mark.parametrize("background", ["#ffffff", "#111111"])
def test_colours_of_lines_and_text_are_visible_in_both_themes(background):
    def contrast(colour):
        light, dark = sorted((TO_XYZ[1] @ linear(one) for one in (colour, background)), reverse=True)
        return (light + 0.05) / (dark + 0.05)

    every = {*palette.COLOURS, palette.BAD, *COLOUR_OF.values()}
    assert min(map(contrast, every)) > 1.9
    assert min(map(contrast, [INK, *HTML_COLOURS.values()])) > 3  # text


def test_red_means_bad_and_nothing_else():
    assert palette.BAD not in {*palette.COLOURS, *COLOUR_OF.values()}


def test_the_parts_of_a_forecast_have_each_a_colour():
    from kit.config.cluster import Cluster
    from kit.config.recipe import Recipe
    from kit.forecast.timing import predict

    for method, strategy in itertools.product(("full", "lora", "qlora"), ("ddp", "fsdp2", "zero3")):
        recipe = Recipe.load("llama8b", **{"tuning.method": method, "parallel.strategy": strategy})
        for phase, terms in predict(recipe, Cluster.load("h100-8x8")).memory.phases_gib.items():
            colours = [COLOUR_OF[term] for term in terms]
            assert len(set(colours)) == len(colours), phase


def test_a_png_that_another_process_draws_is_the_same_and_does_not_keep_the_interpreter(monkeypatch):
    svg = FIGURES[0].svg()
    assert png.static_picture(svg, 720, in_child=True) == png.static_picture(svg, 720)
    monkeypatch.setattr(png.sys, "executable", "/nowhere/python")
    assert png.static_picture(svg, 720, in_child=True) == ({png.SVG: svg}, {})
