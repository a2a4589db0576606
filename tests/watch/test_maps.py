"""Heat maps of the devices, and the curves and pictures that are made of them."""

import time

import numpy as np
import pytest

from kit.watch import hardware, panels
from kit.watch.columns import parse_lines
from kit.watch.maps import COLUMNS, HeatMap, Maps
from kit.watch.metrics import Store
from kit.watch.status import RunStatus
from kit.watch.view import MINUTES, View
from tests.watch.test_board import line, log, steps

HOUR = 3600


def filled(times, values, parts=1):
    heat_map = HeatMap()
    for some_times, some_values in zip(np.array_split(times, parts), np.array_split(values, parts), strict=True):
        heat_map.add(("node", 0), some_times, some_values)
    return heat_map


@pytest.mark.parametrize("seconds", [1, 100, COLUMNS, COLUMNS + 1, HOUR, 24 * HOUR])
def test_columns_hold_the_means_of_their_samples_and_stay_few(seconds):
    times, values = 1.8e9 + np.arange(seconds), np.random.default_rng(0).uniform(0, 100, seconds)
    middles, means = filled(times, values, parts=7).means()
    assert means.shape == (1, len(middles))
    assert len(middles) <= COLUMNS
    width = middles[1] - middles[0] if len(middles) > 1 else 1.0
    for middle, mean in list(zip(middles, means[0], strict=True))[:: max(1, len(middles) // 20)]:
        inside = (times >= middle - width / 2) & (times < middle + width / 2)
        assert mean == pytest.approx(values[inside].mean())


def test_the_order_in_which_samples_come_changes_nothing():
    times, values = 1.8e9 + np.arange(5000.0), np.random.default_rng(0).uniform(0, 100, 5000)
    forward, backward = filled(times, values, 50), HeatMap()
    for part in reversed(np.array_split(np.arange(5000), 50)):
        backward.add(("node", 0), times[part], values[part])
    for a, b in zip(forward.means(), backward.means(), strict=True):
        assert a == pytest.approx(b)


def test_a_pause_is_a_gap_and_not_zero():
    heat_map = filled(np.array([1e9, 1e9 + 10]), np.array([50.0, 70.0]))
    _, means = heat_map.means()
    assert means[0, [0, -1]].tolist() == [50, 70]
    assert np.isnan(means[0, 1:-1]).all()


def test_neighbouring_columns_are_joined_where_fewer_are_asked_for():
    middles, means = filled(1.8e9 + np.arange(100.0), np.arange(100.0)).means(10)
    assert len(middles) == 10
    assert means[0] == pytest.approx(np.arange(4.5, 100, 10))


def samples(gpus, seconds, start=1e9):
    """Of two nodes; GPU 5 of the second one is slow."""
    for second in range(seconds):
        for host, util in (("a", 98.0), ("b", 41.0)):
            yield line(host, start + second, gpus, util=util, power_w=520 * util / 98)


def test_maps_follow_a_store_and_begin_anew_when_its_samples_are_replaced():
    store, maps = Store(), Maps()
    store.add_wandb_sample("old", {"_timestamp": 1e9, "gpu.0.gpu": 50.0})
    maps.update(store)
    assert list(maps.maps["util"].devices) == [("old", 0)]
    store.add_samples(parse_lines(line("a", 1e9, 1).encode()))
    maps.update(store)
    maps.update(store)
    assert set(maps.maps["util"].devices) == {("a", 0), ("a", "cpu")}
    assert maps.maps["util"].means()[1][maps.maps["util"].devices["a", 0]].tolist() == [98.0]


def run_of(folder, gpus=8, seconds=HOUR):
    """A run of which two nodes of so many GPUs were sampled for so long, read to its end."""
    log(folder, steps(1, 6))
    (folder / "nodes").mkdir()
    start = time.time() - seconds
    every = list(samples(gpus, seconds, start))
    for place, host in enumerate("ab"):
        (folder / "nodes" / f"{host}.jsonl").write_text("\n".join(every[place::2]) + "\n")
    run = RunStatus(folder)
    while run.update():
        pass
    return run


def test_zooming_shows_every_sample_of_16_gpus_in_five_minutes_of_an_hour(tmp_path):
    run = run_of(tmp_path)
    view = View(zoom={MINUTES: [44.0, 49.0]})
    charts = {chart.title: chart for chart in panels.charts([run], view)}
    for title in ("GPU utilisation", "GPU memory", "GPU power", "GPU temperature"):
        curves = [drawn for drawn in charts[title].drawn() if not drawn.line.limit]
        assert len(curves) == 16
        assert {int(((drawn.x >= 44) & (drawn.x <= 49)).sum()) for drawn in curves} <= {300, 301}
    (heat_map,) = hardware.heat_maps([run], view)
    assert heat_map.width == pytest.approx(1 / 60)
    assert len(heat_map.levels) >= 300 * 16


def test_the_gpu_that_is_far_from_the_median_is_marked_and_comes_first(tmp_path):
    run = run_of(tmp_path, seconds=300)
    (heat_map,) = hardware.heat_maps([run], View())
    assert heat_map.labels == [f"{host} GPU {index}" for host in "ab" for index in range(8)]
    assert [heat_map.labels[row] for row in heat_map.marked] == ["b GPU 5"]
    assert heat_map.labels[heat_map.slowest_first[0]] == "b GPU 5"
    levels = np.frombuffer(heat_map.levels, np.uint8).reshape(-1, 16)
    assert set(levels[:-1, 13]) == {1 + round(254 * 0.41)}
    assert set(levels[:-1, 0]) == {1 + round(254 * 0.98)}


def test_selected_gpus_have_curves_with_names_and_all_others_none(tmp_path):
    run = run_of(tmp_path, seconds=60)
    charts = {chart.title: chart for chart in panels.charts([run], View(selected=["b GPU 5", "a GPU 0"]))}
    names = [line.name for line in charts["GPU utilisation"].lines]
    assert names == ["a GPU 0", "b GPU 5"]


@pytest.mark.parametrize("name", ["util", "mem_gib", "power_w", "temp_c"])
def test_each_reading_has_a_map(tmp_path, name):
    run = run_of(tmp_path, seconds=30)
    (heat_map,) = hardware.heat_maps([run], View(map=name))
    assert (heat_map.name, len(heat_map.labels)) == (name, 16)
    if name == "mem_gib":
        assert (heat_map.low, heat_map.high) == (0, 80)


def test_a_run_without_gpus_has_a_map_of_its_nodes(tmp_path):
    run = run_of(tmp_path, gpus=0, seconds=30)
    (heat_map,) = hardware.heat_maps([run], View())
    assert (heat_map.title, heat_map.labels) == ("Utilisation of every node", ["a", "b"])


def test_the_x_axis_counts_steps_time_or_tokens(tmp_path):
    rows = [row | {"train/num_tokens": 1000 * row["train/global_step"]} for row in steps(1, 21)]
    log(tmp_path, rows)
    run = RunStatus(tmp_path)
    while run.update():
        pass
    assert panels.axes([run]) == ["step", "time", "tokens"]
    ends = {}
    for axis in panels.axes([run]):
        chart = panels.charts([run], View(axis=axis))[0]
        ends[chart.x_title] = chart.lines[0].x[[0, -1]].tolist()
    assert ends["optimizer step"] == [1, 20]
    assert ends["tokens so far"] == [1000, 20_000]
    assert 0 <= ends[MINUTES][0] <= ends[MINUTES][1] < 10
    zoomed = panels.charts([run], View(axis="tokens", zoom={"tokens so far": [5000, 9000]}))[0].lines[0].x
    assert set(np.arange(5000, 9001, 1000)) <= set(zoomed)
