import pytest

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.forecast.explore import (
    CONTROLS,
    by_nodes,
    forecast_html,
    memory_map,
    steps_html,
    strategies,
    tokens_spent,
    value,
)
from kit.forecast.memory import memory
from kit.heat import Heat
from kit.notebook.widgets import explore


@pytest.fixture
def llama():
    return Recipe.load("llama8b"), Cluster.load("h100-8x8")


def test_a_cell_beyond_the_limit_is_red_and_the_edge_lies_between(llama):
    svg = Heat("t", "x", "y", (1, 2), (1, 2), ((1.0, 3.0), (1.5, 4.0)), 2.0).svg()
    assert svg.count("#dc2626") == 2
    assert svg.count("stroke-dasharray") == 1
    edge = svg.split('<path d="')[1].split('"')[0]
    assert edge.count("v") == 2  # one upright piece in each row
    assert edge.count("h") == 0


def test_the_map_agrees_with_the_forecast_of_each_cell(llama):
    found = memory_map(*llama)
    changed = llama[0].override(**{"data.seq_len": 4096, "schedule.micro_batch": 8})
    assert found.values[found.ys.index(8)][found.xs.index(4096)] == memory(changed, llama[1]).device_gib[1]


def test_more_nodes_keep_the_batch_where_accumulation_gives_way(llama):
    recipe = llama[0].override(**{"schedule.grad_accum": 4})
    labels = list(by_nodes(recipe, llama[1]).rows)
    assert labels[:3] == ["1 node", "2 nodes", "4 nodes"]
    assert labels[3] == f"8 nodes, batch {2 * recipe.batch}"


def test_every_strategy_has_a_row(llama):
    names = [row["strategy"] for row in strategies(*llama)]
    assert len(set(names)) == len(names) == 8


def test_every_control_is_a_key_of_the_recipe_and_draws(llama):
    for key, choices in CONTROLS.items():
        assert value(llama[0], key) is not None
        assert "<svg" in forecast_html(*llama, **{key: choices[-1]})


def test_a_picture_names_what_makes_it_impossible(llama, capsys):
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    def draw(**values):
        raise ValueError("seq_len < 8")

    InteractiveShell.instance()
    with capture_output() as seen:
        explore(draw, {"seq_len": 4}, {"seq_len": (4, 8)})
    (out,) = seen.outputs
    assert "seq_len &lt; 8" in out.data["text/html"]
    assert out.data["text/plain"] == "seq_len = 4"


def test_tokens_are_all_accounted_for_in_the_picture(recipe):
    from kit.data.dataset import prepare

    dataset = prepare(recipe)
    bars = tokens_spent(dataset.manifest)
    assert sum(bars.rows["read"].values()) == dataset.manifest["ledger"]["read_tokens"]
    rows = dataset.manifest["splits"]["train"]["rows"]
    text = steps_html(dataset, recipe, recipe.data.seq_len, recipe.data.seq_len, 1.0, recipe.world_size)
    assert f"{rows:,} rows" in text
    assert f"{-(-rows // recipe.world_size)} optimizer steps" in text
