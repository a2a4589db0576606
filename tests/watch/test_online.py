"""Runs on a W&B server, read and synced by the real wandb against a server of ours on the loopback.

`Server` answers the operations that wandb 0.31 asks for, from memory. It does not prove what the real service does:
how it samples, signs in, exports to parquet, throttles and limits, and how its answers change.
"""

import base64
import gzip
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from kit.errors import InputError, KitError
from kit.watch.metrics import Metrics
from kit.watch.online import Online
from kit.watch.sync import sync

KEY = "local-" + "a" * 40
WRITER = """
import sys, time, wandb
run = wandb.init(entity="ent", project="p", id="live", mode=sys.argv[1], config={"lr": 1e-4})
for i in range(int(sys.argv[2])):
    run.log({"train/loss": 3 / (i + 1), "train/global_step": 10 * i, "nest": {"a": i}, "odd": float("nan")})
run.finish()
"""


class Server(ThreadingHTTPServer):
    """GraphQL and the file stream. `fault(operation)` may give a status, or sleep; it is asked before each answer."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.runs, self.asked, self.fault = {}, [], lambda operation: None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def run(self, name):
        fresh = {"history": [], "events": [], "state": "running", "config": {}, "summary": {}, "lines": 0}
        return self.runs.setdefault(name, fresh)

    def handle_error(self, request, address):
        if not isinstance(sys.exception(), ConnectionError):  # clients that are killed
            super().handle_error(request, address)

    def answer(self, query, variables):
        name = variables.get("name") or variables.get("run") or variables.get("runName")
        viewer = {"id": "u", "entity": "ent", "username": "u", "name": "u", "flags": "{}", "teams": {"edges": []}}
        if "upsertBucket" in query:
            run = self.run(name)
            run["config"] |= json.loads(variables.get("config") or "{}")
            return {"upsertBucket": {"bucket": self.run_json(name, variables), "inserted": True}}
        if "createRunFiles" in query:
            files = [{"name": f, "uploadUrl": f"{self.url}/upload"} for f in variables["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        if name and re.search(r"\b(model|project)\s*\(", query):
            run_json = self.run_json(name, variables) if name in self.runs else None
            return {
                key: {"id": "p", "internalId": "1", "run": run_json, "bucket": run_json} for key in ("project", "model")
            }
        return {"viewer": viewer, "serverInfo": {"cliVersionInfo": {"max_cli_version": "99.0.0"}, "features": []}}

    def run_json(self, name, variables):
        run = self.runs[name]
        rows, low, samples = run["history"], variables.get("minStep"), variables.get("samples")
        if low is not None:
            rows = [row for row in rows if low <= row["_step"] < variables["maxStep"]]
        elif samples and len(rows) > samples:
            rows = [rows[i * len(rows) // samples] for i in range(samples)]
        last = run["history"][-1]["_step"] if run["history"] else -1
        keys = {key: {"typeCounts": [{"type": "number", "count": 1}]} for row in run["history"][:1] for key in row}
        return {
            "id": base64.b64encode(f"Run:v1:{name}:p:ent".encode()).decode(), "name": name, "displayName": name,
            "projectId": "1", "tags": [], "state": run["state"], "config": json.dumps(run["config"]),
            "createdAt": "2026-01-01T00:00:00", "heartbeatAt": "2026-01-01T00:00:00", "readOnly": False,
            "summaryMetrics": json.dumps(run["summary"]), "historyLineCount": len(run["history"]),
            "systemMetrics": json.dumps(run["events"][-1] if run["events"] else {}), "historyTail": "[]",
            "user": {"name": "u", "username": "u"}, "historyKeys": {"lastStep": last, "keys": keys},
            "history": [json.dumps(row) for row in rows], "events": [json.dumps(row) for row in run["events"]],
            "parquetHistory": {"liveData": run["history"][:1], "parquetUrls": []}, "eventsTail": "[]",
            "project": {"id": "p", "name": "p", "entity": {"id": "e", "name": "ent"}, "organization": None},
        }  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """Keep the test's output clean."""

    def send(self, status, said, **headers):
        body = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self):
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.send(200, {})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path != "/graphql" and "file_stream" not in self.path:
            return self.send(200, {})
        said = json.loads(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
        if self.path != "/graphql":
            return self.stream(said)
        operation = re.search(r"(?:query|mutation)\s+(\w+)", said["query"])
        name = operation[1] if operation else ""
        self.server.asked.append((time.monotonic(), name))
        fault = self.server.fault(name)
        if isinstance(fault, int):
            return self.send(fault, {"error": "injected"}, **{"Retry-After": 1})
        return self.send(200, fault or {"data": self.server.answer(said["query"], said.get("variables") or {})})

    def stream(self, said):
        run = self.server.run(self.path.split("/")[4])
        for name, file in (said.get("files") or {}).items():
            rows = [json.loads(line, parse_constant=str) for line in file["content"]]  # "NaN", as the service has it
            if "history" in name:
                run["history"] += rows
            elif "events" in name:
                run["events"] += rows
            elif "summary" in name:
                run["summary"] = rows[-1]
        if said.get("complete"):
            run["state"] = "failed" if said.get("exitcode") else "finished"
        self.send(200, {"exitcode": None, "limits": {}})


@pytest.fixture
def follow():
    """Online runs that end with the test."""
    opened = []

    def begin(path="ent/p/live", **options):
        opened.append(Online(path, **options))
        return opened[-1]

    yield begin
    for run in opened:
        run.close()


def until(run, true, seconds=60.0):
    """Poll until it holds; how long that took."""
    start = time.monotonic()
    while not true():
        assert time.monotonic() - start < seconds, f"{run.problem!r} {run.state!r}"
        run.poll()
        time.sleep(0.05)
    return time.monotonic() - start


def write(tmp_path, mode="offline", rows=20, **popen):
    env = os.environ | {
        "WANDB_DIR": str(tmp_path),
        "WANDB_SILENT": "true",
        "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "1",
    }
    return subprocess.Popen([sys.executable, "-c", WRITER, mode, str(rows)], env=env, **popen)


def add(server, first, last):
    """What a run that goes on sends."""
    rows = [
        {"_step": i, "_timestamp": 1e9 + i, "train/global_step": 10 * i, "train/loss": 1.0} for i in range(first, last)
    ]
    run = server.run("live")
    run["history"] += rows
    run["summary"] = rows[-1]


def test_an_offline_run_is_synced_and_read_back_equal(server, follow, tmp_path):
    assert write(tmp_path).wait() == 0
    said = []
    sync(tmp_path, echo=said.append)
    assert any("Finished syncing" in line for line in said)
    run = follow()
    until(run, lambda: run.state == "finished")
    local = Metrics(tmp_path)
    while local.poll():
        pass
    assert run.series["train/loss"] == local.series["train/loss"]
    for key in ("nest.a", "odd", "_timestamp"):
        assert list(run.series[key].steps) == list(local.series[key].steps)
        assert repr(run.series[key].values) == repr(local.series[key].values)
    assert run.exit_code == 0
    assert run.config["lr"] == 1e-4
    assert run.sampled == run.problem == ""
    assert run.nodes == {}


def test_new_rows_of_a_running_run_are_added(server, follow):
    add(server, 0, 30)
    run = follow(minute=3.0)
    until(run, lambda: run.last("train/global_step") == 290)
    assert run.state == "running"
    add(server, 30, 40)
    until(run, lambda: run.last("train/global_step") == 390)
    assert list(run.series["train/loss"].steps) == [10.0 * i for i in range(40)]
    operations = [operation for _, operation in server.asked]
    assert operations.count("RunFullHistory") == 3  # rows and system metrics at the start, and the new rows


@pytest.mark.slow
def test_at_most_six_requests_are_made_in_any_minute(server, follow):
    add(server, 0, 30)
    run = follow(minute=3.0)  # a short one
    rows = itertools.count(30)

    def asked_often():
        add(server, row := next(rows), row + 1)
        return len(server.asked) > 14

    until(run, asked_often)
    times = [at for at, _ in server.asked]
    assert min(times[i + 6] - times[i] for i in range(len(times) - 6)) > 2.8


def test_a_sampled_history_is_labelled_as_sampled(server, follow):
    add(server, 0, 12_000)
    run = follow(minute=3.0)
    until(run, lambda: run.state == "running")
    assert run.sampled == "sampled 10,000 of 12,000 rows"
    assert len(run.series["train/loss"].values) == 10_000


def test_a_run_of_the_real_client_is_followed_while_it_logs(server, follow, tmp_path):
    writer = write(tmp_path, "online", 40)
    until(follow("ent/p/other"), lambda: "live" in server.runs)
    run = follow(minute=3.0)
    until(run, lambda: run.state == "finished")
    assert writer.wait() == 0
    assert list(run.series["train/loss"].values) == [3 / i for i in range(1, 41)]
    assert any(isinstance(key, tuple) and key[0] == "node" for key in run.series)


FAULTS = [
    (lambda operation: time.sleep(30), "no answer from W&B for 2 s"),
    (lambda operation: 500, "HTTP 500"),
    (lambda operation: 429, "HTTP 429"),
    (lambda operation: 401, "returned error 401"),
    (lambda operation: b"<html>welcome", "invalid character"),
    (lambda operation: {"data": {"project": None}}, "Could not find run"),
    (lambda operation: {"data": {"project": {"run": {"state": 7}}}}, "W&B: "),
]


@pytest.mark.slow
def test_each_failure_of_the_server_is_shown_and_recovers(server, follow):
    add(server, 0, 30)
    run = follow(minute=2.0)
    for i, (fault, said) in enumerate(FAULTS):
        until(run, lambda: run.last("train/global_step") == 10 * len(server.runs["live"]["history"]) - 10, 60)
        until(run, lambda: not run.problem)
        server.fault = fault
        until(run, lambda: said in run.problem)  # noqa: B023 - it is called at once
        server.fault = lambda operation: None
        add(server, 30 + i, 31 + i)


def test_an_unreachable_server_is_mentioned_before_wandb_gives_up(follow, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    run = follow()
    until(run, lambda: "no answer from W&B for 2 s" in run.problem)
    until(run, lambda: "connection refused" in run.problem)


def test_a_missing_key_and_a_missing_run_are_reported(server, follow, monkeypatch):
    run = follow("ent/p/nothing")
    until(run, lambda: "Could not find run" in run.problem)
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", "none")
    run = follow()
    until(run, lambda: "No API key configured" in run.problem)


def test_an_empty_run_has_no_rows_and_no_problem(server, follow):
    server.run("live")
    run = follow(minute=3.0)
    until(run, lambda: run.state == "running")
    assert run.series == {}
    assert not run.problem


def test_the_child_ends_with_its_parent(server):
    script = "import psutil, time; from kit.watch.online import Online; run = Online('a/b/c'); run.poll()\n"
    script += "print(*(child.pid for child in psutil.Process().children()), flush=True); time.sleep(60)"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    parent = subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)
    children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert children
    parent.kill()
    parent.communicate()
    psutil.wait_procs(children, 20)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


@pytest.mark.parametrize("path", ["run", "a/b", "a/b/c/d", "a//c"])
def test_a_path_that_is_not_entity_project_run_is_an_error(path):
    with pytest.raises(InputError, match="entity/project/run"):
        Online(path)


def test_a_sync_that_fails_or_finds_no_log_raises(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="has no W&B log to sync"):
        sync(tmp_path, echo=lambda line: None)
    assert write(tmp_path, rows=1).wait() == 0
    monkeypatch.setenv("NETRC", "none")
    with pytest.raises(KitError, match="wandb sync ended with exit code 1"):
        sync(tmp_path, echo=lambda line: None)
