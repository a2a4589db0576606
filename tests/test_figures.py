"""Still figures: plotly's JSON is valid, the static picture is well formed, and both show the same numbers."""

import json
import math
from xml.etree import ElementTree

import plotly.graph_objects
import pytest

from kit import figures
from kit.figures.base import COLOUR_OF
from kit.figures.svg import INK

PHASES = {"load": {"weights": 20.0, "optimizer": 0.0}, "step": {"weights": 20.0, "gradients": 4.0}}
BARS = figures.bars("Memory <by> phase", "GiB", PHASES, ("capacity", 80.0))
LINES = figures.lines("Loss", "step", "nats a token", {"a": ([1, 2, 3], [3.0, math.nan, 2.0])})
RANGES = figures.ranges("Load", "GB/s", {"torch.load": (1.0, 1.2, 1.3)}, ("plain reads", 14.0))
HEAT = figures.heat("Memory", "tokens", "rows", [1024, 2048], [1, 2], [[10, 40], [20, 81]], 80, (2048, 1))
SANKEY = figures.sankey("Tokens", "tokens", [("read", "kept", 900), ("read", "dropped", 100), ("read", "nothing", 0)])
EVERY = pytest.mark.parametrize("figure", [BARS, LINES, RANGES, HEAT, SANKEY], ids=lambda figure: type(figure).__name__)


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
    bundle = figure._repr_mimebundle_()
    assert set(bundle) == {"application/vnd.plotly.v1+json", "image/svg+xml", "text/plain"}
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


def test_a_value_that_is_not_finite_leaves_a_gap_in_both_drawings():
    assert LINES.plotly_dict()["data"][0]["y"] == [3.0, None, 2.0]
    path = [e.attrib["d"] for e in ElementTree.fromstring(LINES.svg()).iter() if e.attrib.get("fill") == "none"][-1]
    assert path.count("M") == 2 and "L" not in path


def test_thinning_keeps_every_extreme_and_the_ends():
    x, y = list(range(10_000)), [0.0] * 10_000
    y[3333], y[7777] = 5.0, -5.0
    xs, ys = figures.lines("t", "x", "y", {"a": (x, y)}).curves["a"]
    assert len(xs) < 700 and (xs[0], xs[-1]) == (0, 9999)
    assert max(ys) == 5.0 and min(ys) == -5.0


def test_the_edge_of_a_heat_map_runs_between_what_fits_and_what_does_not():
    assert sorted(HEAT._edges()) == [(0.5, 0.5, 0.5, 1.5), (0.5, 0.5, 1.5, 0.5)]
    shapes = HEAT.plotly_dict()["layout"]["shapes"]
    assert [shape["type"] for shape in shapes].count("rect") == 1  # the marked cell


def test_flows_of_zero_are_left_out_and_columns_follow_the_flow():
    assert SANKEY.plotly_dict()["data"][0]["node"]["label"] == ["read", "kept", "dropped"]
    assert SANKEY._columns() == {"read": 0, "kept": 1, "dropped": 1}


def test_figures_load_without_plotly():
    import subprocess
    import sys

    code = "import sys, kit.figures; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_numbers_of_a_heat_map_are_readable_in_both_themes():
    assert HEAT.plotly_dict()["data"][0]["textfont"]["color"] == INK
