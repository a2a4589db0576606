"""Rows and node samples, merged: files by the real wandb SDK and by our own sampler's format."""

import asyncio
import dataclasses
import json
import math
import re
import threading
import time
from array import array

import numpy as np
import pytest
import wandb

from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.slurm.run import Run
from kit.watch.metrics import NEWEST, Metrics
from kit.watch.samples import Reading
from kit.watch.series import Series
from kit.watch.status import RunStatus
from tests.conftest import until


def log(folder, rows, run_id="abc", exit_code=0, step=""):
    """One segment of a run, as a job writes it. Its folder is named by the second, so none may have this name yet."""
    (folder / "wandb").mkdir(parents=True, exist_ok=True)
    until(lambda: not any((folder / "wandb").rglob(f"*run-{time.strftime('%Y%m%d_%H%M%S')}-*")))
    settings = wandb.Settings(silent=True, x_disable_stats=True)
    run = wandb.init(project="p", id=run_id, mode="offline", dir=str(folder / "wandb"), settings=settings)
    if step:
        run.define_metric(step)
        run.define_metric("*", step_metric=step, step_sync=True)
    for row in rows:
        run.log(row)
    run.finish(exit_code=exit_code)
    wandb.teardown()  # finish() may return before the log is on disk


def sample(folder, host, t, gpus=1, **changes):
    (folder / "nodes").mkdir(parents=True, exist_ok=True)
    gpu = {"util": 90, "mem_gib": 60.5, "mem_total_gib": 80.0, "power_w": 500.0, "temp_c": 60} | changes
    line = {
        "t": t, "host": host, "cpu": 12.5, "ram_gib": 100.0, "net_gb_s": {"in": 1.0, "out": 2.0}, "disk_gb_s": None,
        "gpus": [{"index": i, "uuid": f"GPU-{host}-{i}", **gpu} for i in range(gpus)],
    }  # fmt: skip
    with (folder / "nodes" / f"{host}.jsonl").open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def read(folder):
    metrics = Metrics(folder)
    while metrics.poll():
        pass
    return metrics


def points(metrics, key):
    steps, values = metrics.series[key][:2]
    return list(zip(steps, values, strict=True))


def test_the_step_of_a_row_is_the_trainers_global_step(tmp_path):
    first, last = {"train/loss": 2.0, "train/global_step": 10}, {"train/loss": math.nan, "train/global_step": 20}
    log(tmp_path, [first, {"custom": 5}, last], exit_code=2)
    metrics = read(tmp_path)
    (first, second) = points(metrics, "train/loss")
    assert first == (10, 2.0)
    assert second[0] == 20
    assert math.isnan(second[1])
    assert points(metrics, "custom") == [(10, 5)]
    assert metrics.exit_code == 2
    assert metrics.damaged == 0
    assert abs(metrics.newest - time.time()) < 60


def test_the_step_of_a_row_without_a_global_step_is_wandbs(tmp_path):
    log(tmp_path, [{"loss": 3.0}, {"loss": 2.0, "text": "no number", "list": [1, 2]}])
    metrics = read(tmp_path)
    assert points(metrics, "loss") == [(0, 3.0), (1, 2.0)]
    assert not {"text", "list"} & metrics.series.keys()


def test_a_resumed_run_has_no_gap_and_no_duplicate(tmp_path):
    def steps(first, last, loss):
        return [{"train/loss": loss, "train/global_step": i} for i in range(first, last)]

    log(tmp_path, [*steps(1, 8, 2.0), {"eval/loss": 2.5, "train/global_step": 4}], exit_code=1)
    assert read(tmp_path).exit_code == 1
    live = Metrics(tmp_path)
    while live.poll():
        pass
    log(tmp_path, steps(5, 11, 1.0))  # from the checkpoint of step 4: steps 5 to 7 are done again
    while live.poll():
        pass
    for metrics in (live, read(tmp_path)):
        assert points(metrics, "train/loss") == [(i, 2.0) for i in range(1, 5)] + [(i, 1.0) for i in range(5, 11)]
        assert points(metrics, "eval/loss") == [(4, 2.5)]
        assert metrics.exit_code == 0


def test_the_step_metric_that_the_run_defines_is_used(tmp_path):
    log(tmp_path, [{"trainer/global_step": 5 * i, "loss": float(i)} for i in range(1, 4)], step="trainer/global_step")
    metrics = read(tmp_path)
    assert metrics.step_name == "trainer/global_step"
    assert points(metrics, "loss") == [(5, 1.0), (10, 2.0), (15, 3.0)]


def test_the_steps_of_a_resumed_run_without_a_step_metric_continue(tmp_path):
    log(tmp_path, [{"loss": 3.0}, {"loss": 2.0}])
    log(tmp_path, [{"loss": 1.0}, {"loss": 0.5}])  # offline, wandb counts from 0 again
    assert points(read(tmp_path), "loss") == [(0, 3.0), (1, 2.0), (2, 1.0), (3, 0.5)]


def test_a_log_or_its_folder_selects_its_run(tmp_path):
    log(tmp_path, [{"loss": 1.0}], run_id="older")
    wait_for_another_second()
    log(tmp_path, [{"loss": 9.0}], run_id="newer")
    (path,) = tmp_path.rglob("run-older.wandb")
    for place in (path, path.parent):
        metrics = read(place)
        assert points(metrics, "loss") == [(0, 1.0)]
        assert metrics.source == "run-older.wandb"


def test_a_renamed_run_keeps_its_step(tmp_path):
    settings = wandb.Settings(silent=True, x_disable_stats=True)
    run = wandb.init(project="p", mode="offline", dir=str(tmp_path), settings=settings)
    run.log({"train/global_step": 5, "loss": 1.0})
    run.log({"note": 1.0})
    run.name = "another"
    run.log({"note": 2.0})
    run.finish()
    wandb.teardown()
    assert points(read(tmp_path), "note") == [(5, 1.0), (5, 2.0)]


def test_the_log_of_one_segment_selects_all_segments_of_its_run(tmp_path):
    log(tmp_path, [{"loss": 3.0, "train/global_step": 1}])
    log(tmp_path, [{"loss": 2.0, "train/global_step": 2}])
    first = sorted(tmp_path.rglob("run-abc.wandb"))[0]
    metrics = read(first)
    assert points(metrics, "loss") == [(1, 3.0), (2, 2.0)]
    assert metrics.source == "run-abc.wandb"


def test_the_config_of_a_run_is_known(tmp_path):
    log(tmp_path, [{"loss": 3.0}])
    assert "_wandb" in read(tmp_path).config


def test_an_unknown_metric_gets_a_suggestion_and_the_known_names(tmp_path):
    log(tmp_path, [{"train/loss": 3.0, "train/global_step": 1}])
    found = read(tmp_path).suggestion("train/los")
    assert re.match(r"No metric 'train/los'\. Did you mean 'train/loss'\? Logged so far: .*_step", found)


def test_a_folder_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        Metrics(tmp_path / "nowhere")


def wait_for_another_second():
    """wandb names a run's folder by the second of its start."""
    now = int(time.time())
    until(lambda: int(time.time()) > now)


def test_the_newest_of_several_runs_in_a_folder_is_read(tmp_path):
    log(tmp_path, [{"loss": 1.0}], run_id="older")
    wait_for_another_second()
    log(tmp_path, [{"loss": 9.0}], run_id="newer")
    metrics = read(tmp_path)
    assert metrics.run_id == "newer"
    assert points(metrics, "loss") == [(0, 9.0)]
    assert metrics.source.endswith("run-newer.wandb")


def test_every_gpu_of_every_node_has_its_series(tmp_path):
    for t in (100.0, 101.0):
        for host in ("node1", "node2"):
            sample(tmp_path, host, t, gpus=4)
    metrics = read(tmp_path)
    places = {key[:2] for key in metrics.series}
    assert places == {(h, i) for h in ("node1", "node2") for i in (0, 1, 2, 3, "cpu")}
    assert points(metrics, ("node2", 3, "util")) == [(100.0, 90), (101.0, 90)]
    assert points(metrics, ("node1", "cpu", "net_gb_s_out")) == [(100.0, 2.0), (101.0, 2.0)]
    assert ("node1", "cpu", "disk_gb_s_read") not in metrics.series
    assert metrics.nodes == {"node1": 101.0, "node2": 101.0}


def test_a_reading_that_is_null_has_no_point(tmp_path):
    sample(tmp_path, "node1", 100.0, util=None)
    metrics = read(tmp_path)
    assert ("node1", 0, "util") not in metrics.series
    assert points(metrics, ("node1", 0, "mem_gib")) == [(100.0, 60.5)]


def test_an_incomplete_line_is_read_later_and_a_damaged_one_is_counted(tmp_path):
    sample(tmp_path, "node1", 100.0)
    path = tmp_path / "nodes" / "node1.jsonl"
    line = path.read_text()
    path.write_text(line + "damaged\n" + line[:30])
    metrics = read(tmp_path)
    assert metrics.damaged == 1
    with path.open("a") as stream:
        stream.write(line[30:])
    assert metrics.poll()
    assert len(points(metrics, ("node1", 0, "util"))) == 2
    assert not metrics.poll()


def readings(folder):
    """The keys of all readings in the logs there now."""
    return {key for key in read(folder).series if isinstance(key, Reading)}


def test_system_metrics_of_wandb_are_used_where_no_node_is_sampled(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setenv("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "0.2")
    settings = wandb.Settings(silent=True, x_stats_sampling_interval=0.3)
    run = wandb.init(project="p", mode="offline", dir=str(tmp_path / "wandb"), settings=settings)
    wanted = {"util", "mem_gib", "net_gb_s_in", "net_gb_s_out"}
    until(lambda: wanted <= {reading.name for reading in readings(tmp_path)})
    run.finish()
    wandb.teardown()
    metrics = read(tmp_path)
    (host,) = {key[0] for key in metrics.series if isinstance(key, tuple)}
    cpu = {key[2] for key in metrics.series if key[:2] == (host, "cpu")}
    assert wanted <= cpu
    sample(tmp_path, "node1", time.time())
    while metrics.poll():
        pass
    assert {key[0] for key in metrics.series if isinstance(key, tuple)} == {"node1"}


def test_logs_of_many_nodes_are_one_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "0.2")
    for rank in (0, 1):
        until(lambda: not any(tmp_path.rglob(f"*run-{time.strftime('%Y%m%d_%H%M%S')}-*")))  # named by the second
        settings = wandb.Settings(
            silent=True, x_stats_sampling_interval=0.3, x_label=f"node-{rank}", x_primary=rank == 0,
        )  # fmt: skip
        run = wandb.init(project="p", id="abc", mode="offline", dir=str(tmp_path / f"{rank}"), settings=settings)
        if rank == 0:
            run.log({"loss": 1.0})
        until(lambda: readings(tmp_path / f"{rank}"))  # noqa: B023 - called at once
        run.finish(exit_code=3 * (1 - rank))
        wandb.teardown()
        wait_for_another_second()
    (tmp_path / "0" / "wandb").rename(tmp_path / "wandb")
    for folder in (tmp_path / "1" / "wandb").glob("offline-run-*"):
        folder.rename(tmp_path / "wandb" / folder.name)
    metrics = read(tmp_path)
    assert {key[0] for key in metrics.series if isinstance(key, tuple)} == {"node-0", "node-1"}
    assert points(metrics, "loss") == [(0, 1.0)]
    assert metrics.exit_code == 3  # of the node that logs rows


def test_a_file_that_is_not_a_log_is_reported_and_the_rest_is_read(tmp_path):
    (tmp_path / "run-x.wandb").write_bytes(b"something else")
    sample(tmp_path, "node1", 100.0)
    metrics = read(tmp_path)
    assert "run-x.wandb" in metrics.problem
    assert ("node1", 0, "util") in metrics.series


def expected_nodes(folder):
    status = RunStatus(folder)
    status.update()
    return status.expected_nodes


def test_a_run_knows_how_many_nodes_to_expect(tmp_path, local):
    local = dataclasses.replace(local, paths=dataclasses.replace(local.paths, runs=str(tmp_path / "runs")))
    run = Run.create(Recipe.load("demo", **{"parallel.nodes": 2}), local, tmp_path, "digest")
    assert expected_nodes(run.path) == 2


def test_an_empty_folder_has_nothing_new(tmp_path):
    metrics = Metrics(tmp_path)
    assert not metrics.poll()
    assert metrics.series == {}


def test_mig_instances_are_distinguished_by_their_uuids(tmp_path):
    (tmp_path / "nodes").mkdir()
    gpu = {"util": None, "mem_gib": 5.0}
    gpus = [{"index": 0, "uuid": f"MIG-{name}", **gpu} for name in "ab"]
    line = {"t": 1.0, "host": "n1", "cpu": 1.0, "ram_gib": 2.0, "net_gb_s": None, "disk_gb_s": None, "gpus": gpus}
    (tmp_path / "nodes" / "n1.jsonl").write_text(json.dumps(line) + "\n")
    assert {("n1", "MIG-a", "mem_gib"), ("n1", "MIG-b", "mem_gib")} <= read(tmp_path).series.keys()


def test_a_line_that_is_not_a_sample_counts_as_damaged(tmp_path):
    sample(tmp_path, "node1", 100.0)
    with (tmp_path / "nodes" / "node1.jsonl").open("a") as stream:
        stream.write('{"t": "noon"}\n[1, 2]\n7\nnull\n')
    sample(tmp_path, "node1", 101.0)
    metrics = read(tmp_path)
    assert metrics.damaged == 4
    assert points(metrics, ("node1", 0, "util")) == [(100.0, 90), (101.0, 90)]


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """A log of some 5 MB by the real SDK, longer than what is read ahead."""
    folder = tmp_path_factory.mktemp("long")
    rest = {f"train/metric_{n}": 0.123456789 for n in range(12)}
    log(folder, [{"train/loss": 3.0 / i, "train/global_step": i, "noise": i} | rest for i in range(1, 4501)])
    (path,) = folder.rglob("*.wandb")
    assert path.stat().st_size > 2 * NEWEST
    return folder


def test_the_end_of_a_long_log_is_read_first(long_run):
    metrics = Metrics(long_run)
    assert metrics.poll()
    assert metrics.last("train/global_step") == 4500
    assert metrics.exit_code == 0
    assert metrics.left > NEWEST
    x, y = metrics.line("train/loss", 1000)
    assert (x[0], x[-1]) == (1, 4500)
    assert np.allclose(y, 3.0 / x)
    assert (np.diff(x) > 0).all()
    while metrics.poll():
        pass
    assert metrics.left == 0
    assert points(metrics, "train/loss") == [(i, 3.0 / i) for i in range(1, 4501)]
    assert points(metrics, "noise") == [(i, i) for i in range(1, 4501)]


def test_the_event_loop_gets_turns_while_a_thread_reads(long_run):
    metrics, beats = Metrics(long_run), []

    def follow():
        while metrics.poll():
            pass

    async def beat():
        thread = threading.Thread(target=follow)
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0.001)
            beats.append(metrics.left)

    asyncio.run(beat())
    assert len(set(beats)) > 2  # it had turns between the parts; tests.benchmarks.metrics measures how late they were


def test_a_series_is_thinned_to_its_extremes_at_any_length():
    rng = np.random.default_rng(0)
    for size in (50, 3_000, 200_000):
        values = rng.normal(size=size)
        values[size // 3], values[size // 2] = 50.0, -50.0
        values[[size // 5, size // 4]] = math.nan, math.inf
        series = Series.empty()
        for part in np.array_split(np.arange(size), 7):
            series.extend(array("d", part), array("d", values[part]))
        x, y = series.thin(1200)
        assert len(x) <= 1260
        assert {50.0, -50.0} <= set(y)
        assert {size // 5, size // 4} <= set(x[~np.isfinite(y)])
        assert (x[0], x[-1]) == (0, size - 1)
        assert (np.diff(x) >= 0).all()


def test_a_cut_series_equals_one_that_never_had_the_rest():
    values = np.sin(np.arange(100_000.0))
    values[90_000] = math.nan
    long, short = Series.empty(), Series.empty()
    long.extend(array("d", range(100_000)), array("d", values))
    long.cut(80_123)
    short.extend(array("d", range(80_123)), array("d", values[:80_123]))
    for series in (long, short):
        series.extend(array("d", range(80_123, 81_000)), array("d", [2.0] * 877))
    assert long == short
    assert np.array_equal(long.thin(100), short.thin(100))


def test_the_problem_of_a_log_is_known_at_every_moment_while_it_is_read_again(tmp_path):
    (tmp_path / "run-x.wandb").write_bytes(b"something else")
    metrics, problems, reads, stop = Metrics(tmp_path), set(), [], threading.Event()
    metrics.poll()

    def read_again():
        while not stop.is_set():
            reads.append(metrics.poll())

    reader = threading.Thread(target=read_again)
    reader.start()  # it goes on until this thread has looked, however seldom that gets the processor
    while len(reads) < 20 or not problems:
        problems.add(metrics.problem)
    stop.set()
    reader.join()
    (problem,) = problems
    assert "is not a W&B log" in problem
