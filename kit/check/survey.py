"""Survey: what this cluster is. Slurm's word, what this machine sees, and by a small job what every node sees."""

import collections
import contextlib
import os
import re
import secrets
import shlex
import shutil
import socket
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from kit import files
from kit.bars import Bars
from kit.check.controller import detect
from kit.check.facts import Finding
from kit.check.machine import look, topology
from kit.config import schema
from kit.config.cluster import Cluster, Nodes
from kit.errors import InputError, KitError
from kit.slurm import environment as jobscript

PATIENCE = 600.0  # seconds that the job may wait and run before it is cancelled
SKEW = 1.0  # seconds between two clocks from which files' times mislead
LEAST = ("nodes.count", "nodes.gpus", "nodes.gpu_memory_gib", "nodes.cpus", "nodes.ram_gib")


@contextlib.contextmanager
def _clock() -> Iterator[str]:
    """This machine's time for everyone who connects to address,address:port."""

    def tell() -> None:
        with contextlib.suppress(OSError):  # closed: all is known
            while True:
                with server.accept()[0] as link:
                    link.sendall(repr(time.time()).encode())

    with socket.create_server(("", 0), backlog=128) as server:
        threading.Thread(target=tell, daemon=True).start()
        own = [a.address for ads in psutil.net_if_addrs().values() for a in ads if a.family == socket.AF_INET]
        yield f"{','.join(sorted(own, key=lambda a: a.startswith('127.')))}:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def skew(clock: str) -> tuple[float, float]:
    """Seconds that this clock is ahead of the login node's, and how well that is known: half of the shortest trip.

    Raises OSError where the login node does not answer.
    """
    addresses, _, port = clock.partition(":")
    for address in addresses.split(","):
        with contextlib.suppress(OSError, ValueError):
            trips = []
            for _ in range(5):
                before = time.time()
                with socket.create_connection((address, int(port)), timeout=2) as link:
                    link.settimeout(2)
                    there, after = float(link.recv(64)), time.time()
                trips.append(((after - before) / 2, (before + after) / 2 - there))
            return min(trips)[1], min(trips)[0]
    raise OSError(f"the login node does not answer at {clock}")


def file_skew(folder: Path) -> float:
    """Seconds that the time which the file system notes is ahead of this clock."""
    with tempfile.NamedTemporaryFile(dir=folder) as stream:
        before = time.time()
        stream.write(b".")
        stream.flush()
        os.fsync(stream.fileno())
        return Path(stream.name).stat().st_mtime - before


def main() -> None:
    """A node's part of the job; in FOLDER the login node left the profile and where its clock is."""
    folder, name = Path(sys.argv[1]), os.environ["SLURMD_NODENAME"]
    if not (folder / "asked.json").exists():
        sys.exit(f"{name} does not see {folder}, which the login node made: set paths.runs to a folder that all share.")
    asked, problem = files.read_json(folder / "asked.json"), ""
    found = look(Cluster.load(folder / "cluster.toml"))
    try:
        ahead, half = skew(asked["clock"])
        value = f"{ahead:+.4f} s to the login node, give or take {half:.4f}"
        problem = "files' times mislead: have the clocks set by NTP" if abs(ahead) - half > SKEW else ""
    except OSError as error:
        value = str(error)
    value += f"; by the times of files {asked['on_disk'] - file_skew(folder):+.3f} s"
    found.append(Finding("clock", value, f"five connections to {asked['clock']}, mtime", problem))
    found.append(Finding("shared folder", f"{folder.parent}: seen both ways", f"read {folder.name}, wrote {name}.json"))
    files.write_json(folder / f"{name}.json", [asdict(f) for f in found])


def render_script(cluster: Cluster, folder: Path, nodes: int, gres: str) -> str:
    """A job of one small task a node, with all of its GPUs, since those that a job is not given may be hidden."""
    asked = jobscript.options(
        cluster,
        job_name="survey",
        nodes=nodes,
        ntasks_per_node=1,
        cpus_per_task=1,
        mem="1G",
        time="00:05:00",
        gres=gres,
    )
    command = f"{jobscript.python(cluster)} -m kit.check.survey {shlex.quote(str(folder))}"
    return jobscript.render(cluster, asked, f"srun --ntasks-per-node=1 --kill-on-bad-exit=0 {command}")


def ask_nodes(
    cluster: Cluster, nodes: int, gres: str, say: Callable[[str], None], patience: float = PATIENCE
) -> dict[str, list[Finding]]:
    """What each node finds, and under Slurm's name how the job went. Ctrl-C cancels the job."""
    from kit.slurm import launch as slurm

    folder = Path(cluster.paths.runs).absolute() / f".survey-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True)
        files.write(folder / "cluster.toml", cluster.toml())
        with _clock() as clock:
            files.write_json(folder / "asked.json", {"clock": clock, "on_disk": file_skew(folder)})
            run = slurm.launch_script(render_script(cluster, folder, nodes, gres), cluster, "survey")
            try:
                say(f"job {run.job_id} looks at {nodes} nodes: a minute, once it has started")
                end = run.wait(patience)
                word, late = f"{end.state} {end.cause}".strip(), 60 if end.state == "COMPLETED" else 10
            except BaseException as error:  # Ctrl-C, or too long
                word, late = f"cancelled after {patience:.0f} s: {run.why_pending()}", 0
                run.cancel()
                if not isinstance(error, KitError):
                    raise
        last = time.monotonic() + late  # a file system of a network shows files some time after they were written
        while len(list(folder.glob("*.json"))) < nodes + 1 and time.monotonic() < last:
            time.sleep(1)
        paths = [p for p in sorted(folder.glob("*.json")) if p.stem != "asked"]
        answers = {p.stem: [Finding(**f) for f in files.read_json(p)] for p in paths}
    except (KitError, OSError) as error:
        return {"Slurm": [Finding("job", "not submitted", "sbatch", str(error))]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    lost = f"{nodes - len(answers)} of {nodes} nodes gave no answer: {run.tail(lines=3)}"
    job = Finding("job", word, f"job {run.job_id}, {run.path.name}", lost if len(answers) < nodes else "")
    return {"Slurm": [job]} | answers


# All of it together


@dataclass(frozen=True)
class Survey:
    """Findings by place: Slurm, this machine, the nodes. `nodes` names the places that stand for compute nodes."""

    places: dict[str, list[Finding]]
    nodes: tuple[str, ...]

    def rows(self) -> list[dict[str, Any]]:
        """Each finding with its place, problems first."""
        rows = [{"place": place} | asdict(f) for place, found in self.places.items() for f in found]
        return sorted(rows, key=lambda row: not row["problem"])

    def lines(self) -> list[str]:
        """Problems first, with what to do; then what was found, once for places that agree."""
        same = collections.defaultdict[tuple[str, str, str], list[str]](list)
        for row in self.rows():
            same[row["name"], row["value"], row["how"]].append(row["place"])
        bad = [
            f"PROBLEM  {r['place']}, {r['name']}: {r['value']}\n         {r['problem']}"
            for r in self.rows()
            if r["problem"]
        ]
        return bad + [f"{name:14} {value}  [{', '.join(at)}: {how}]" for (name, value, how), at in same.items()]

    def facts(self) -> dict[str, Any]:
        """Values for keys of a profile: the least of the nodes, and Slurm's word over it."""
        merged: dict[str, Any] = {}
        for place in (*self.nodes, "Slurm"):
            for key, value in ((k, v) for f in self.places[place] for k, v in f.facts.items() if "." in k):
                least = place != "Slurm" and isinstance(value, int | float)
                merged[key] = min(merged.get(key, value), value) if least else value
        return merged

    def rates(self) -> Bars:
        """What one process wrote and read in each trial."""
        tried = [(row["place"], f) for row in self.rows() if "mount" in (f := row["facts"])]
        rows = {f"{p} {f['mount']}, {way}": {way: f[f"{way}_gb_s"]} for p, f in tried for way in ("write", "read")}
        return Bars("One process, one file", "GB/s", rows)

    def topology(self) -> dict[str, dict[str, str]]:
        """Of the first place that has GPUs; empty where none has."""
        return topology(next((row["facts"]["topology"] for row in self.rows() if "topology" in row["facts"]), ""))


def survey(cluster: Cluster, nodes: int | None = None, say: Callable[[str], None] = print) -> Survey:
    """All of it. A job looks at the nodes where Slurm answers and this machine has no GPUs, or where `nodes` is given.

    nodes: how many it looks at, the profile's count by default; 0: none.
    """
    here = socket.gethostname()
    places = {"Slurm": detect(cluster), here: look(cluster)}
    known = {key: value for found in (places[here], places["Slurm"]) for f in found for key, value in f.facts.items()}
    count = min(known.get("usable", 0), cluster.nodes.count if nodes is None else nodes)
    if count and (nodes or not places[here][1].facts["nodes.gpus"]):
        answers = ask_nodes(cluster, count, known.get("slurm.gres", ""), say)
        places["Slurm"] += answers.pop("Slurm")
        places |= answers
    stand_for = tuple(p for p in places if p not in ("Slurm", here)) if "usable" in known else (here,)
    login = places[here][0].facts
    return Survey(places | {p: [_judged(f, cluster, login) for f in places[p]] for p in stand_for}, stand_for)


def _judged(found: Finding, cluster: Cluster, login: Mapping[str, str]) -> Finding:
    """With the problem, where a node has less than its profile says, or other software than the login node."""
    problem, said = found.problem, schema.as_dict(cluster)
    for key in (k for k in LEAST if k in found.facts):
        table, name = key.split(".")
        if found.facts[key] < 0.97 * said[table][name]:
            problem = problem or f"the profile says {key} = {said[table][name]}: set it to {found.facts[key]}"
    if found.name == "software" and cluster.slurm.container.kind == "none" and not cluster.slurm.python:
        unlike = [f"{k} {v} on the login node" for k, v in login.items() if k != "driver" and found.facts[k] != v]
        problem = f"{', '.join(unlike)}: give all nodes one environment by slurm.setup" if unlike else problem
    return replace(found, problem=problem)


def fill(text: str, facts: Mapping[str, Any]) -> str:
    """A profile with what it lacks; what a person wrote stays, comments too. Raises InputError where it is wrong."""
    text = text.rstrip("\n") + "\n"
    said, tables = tomllib.loads(text), collections.defaultdict[str, dict[str, Any]](dict)
    for key, value in facts.items():
        table, name = key.split(".")
        if name not in said.get(table, {}):
            tables[key if isinstance(value, dict) else table] |= value if isinstance(value, dict) else {name: value}
    for table, values in tables.items():
        header = re.search(rf"^\[{re.escape(table)}\].*\n", text, re.MULTILINE)
        place, start = (header.end(), "") if header else (len(text), f"\n[{table}]\n")
        text = text[:place] + start + tomli_w.dumps(values) + text[place:]
    try:
        schema.build(Cluster, tomllib.loads(text), "the filled profile")
    except tomllib.TOMLDecodeError as error:  # such as nodes = { count = 2 }
        raise InputError(f"This profile cannot be added to ({error}): begin each table with its [name].") from None
    return text


def start_profile(out: Path, base: Path | None) -> tuple[str, Cluster]:
    """The profile that `out` begins as: `base`, or one that has a name and claims nothing.

    Raises InputError where `out` exists and is not `base`.
    """
    if out.exists() and not (base and base.samefile(out)):
        raise InputError(f"{out} exists, and is not the profile that is checked: name a new file.")
    cluster = Cluster.load(base) if base else Cluster(out.stem, Nodes(cpus=1, ram_gib=0.5))
    return base.read_text() if base else f'name = "{out.stem}"\n', cluster


if __name__ == "__main__":
    main()
