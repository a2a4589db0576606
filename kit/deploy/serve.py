"""Serve a model, or an adapter on its base, as a job, with the proof that what is served is what was trained."""

import json
import multiprocessing
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from kit import files
from kit.checkpoints.weights import read_headers
from kit.config import models
from kit.config.cluster import Cluster
from kit.deploy.adapter import CONFIG
from kit.deploy.evaluate import TASKS
from kit.deploy.names import MemoryNames
from kit.deploy.proof import Check, Outcome, expected_answers, prove
from kit.deploy.servers import LOOPBACK, SERVERS, Engine, Request, Server
from kit.errors import InputError, KitError
from kit.show import Part, Result, Table
from kit.slurm import environment as jobscript
from kit.slurm import launch as slurm
from kit.slurm.run import Run
from kit.slurm.submit import reach

REQUEST, KEY, ADDRESS, PROOF = "request.json", "key", "server.json", "proof.json"
WEIGHTS_PART = 0.9  # of a card's memory at most, so that something is left for the cache of keys and values


@dataclass(frozen=True)
class Served(Result):
    """A server that answers, and its proof. `key_file` is empty for a server without keys."""

    host: str
    port: int
    model: str
    key_file: str
    checks: tuple[Check, ...]

    def parts(self) -> Iterable[Part]:
        """The proof as a table, and how to reach the server."""
        yield Table(("check", "outcome", "found"), [(c.name, c.outcome, c.detail) for c in self.checks])
        yield f"model {self.model} at http://{LOOPBACK}:{self.port}/v1 on {self.host}"
        yield (
            f"API key: {self.key_file}" if self.key_file else "It takes no API key: every user of that node can ask it."
        )
        tunnel = f"-L {self.port}:{LOOPBACK}:{self.port} {self.host}"
        yield f"From your own computer: ssh -N -J {socket.gethostname()} {tunnel}"


def launch(
    model: str,
    out: Path,
    cluster: Cluster,
    adapter: Path | None = None,
    engine: Engine | None = None,
    python: str = "",
    gpus: int = 1,
    port: int = 0,
    options: Sequence[str] = (),
) -> Run:
    """Submit a job that serves, and return at once; `out` is a new folder, for request, key, address and proof.

    `model` may be an adapter's folder: it is served on its base. `python` is the interpreter of an environment with
    vLLM; without one the kit's is taken, with vLLM where it is installed, else with transformers. `options` are added
    to the command of the server. Raises InputError before anything is submitted for a model that cannot be found or
    does not fit, for an adapter whose tensors match no module of the base, and for a server that is not installed.
    """
    reach(cluster)
    if adapter is None and (Path(model) / CONFIG).is_file():
        adapter, model = Path(model), files.read_json(Path(model) / CONFIG)["base_model_name_or_path"]
    models.check_weights(model, cluster.paths.hf_home)
    base = Path(models.source(model, cluster.paths.hf_home)).absolute()
    python = python or jobscript.interpreter(cluster)
    engine = _engine(engine, python)
    _check_fit(base, cluster, gpus)
    rank = _check_adapter(adapter, base, engine) if adapter else 0
    out = Path(out).absolute()
    with files.new_folder(out) as folder:
        (folder / "model").mkdir()
        # Where both have a file, as a tokenizer, it is the base's: the training rows were made with that.
        for source in (adapter.absolute() if adapter else None, base):
            for path in source.iterdir() if source else ():
                (folder / "model" / path.name).unlink(missing_ok=True)
                (folder / "model" / path.name).symlink_to(path)
        adapter_path = str(adapter.absolute()) if adapter else ""
        links = str(out / "model")
        request = Request(engine, python, str(base), adapter_path, links, rank, gpus, port, list(options))
        files.write_json(folder / REQUEST, asdict(request))
    return slurm.launch_script(_script(cluster, out, gpus), cluster, "serve")


def _script(cluster: Cluster, out: Path, gpus: int) -> str:
    gres = re.sub(r"\d+$", str(gpus), cluster.slurm.gres)
    asked = jobscript.options(cluster, nodes=1, ntasks=1, cpus_per_task=cluster.nodes.cpus, gres=gres)
    body = f"{shlex.join(['cd', str(out)])}\nexec {jobscript.python(cluster)} -m kit.deploy.serve"
    variables = dict(jobscript.NOTHING_LEAVES) | models.hf_environment(cluster.paths.hf_home)
    return jobscript.render(cluster, asked, body, variables)


def _engine(asked: Engine | None, python: str) -> Engine:
    """The server that is installed. Raises InputError with the command that installs one."""
    wanted = {Engine.VLLM: "vllm", Engine.TRANSFORMERS: "uvicorn"}
    probe = "import sys, importlib.util as u; print(*[name for name in sys.argv[1:] if u.find_spec(name)])"
    try:
        done = subprocess.run([python, "-c", probe, *wanted.values()], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise InputError(f"{python} cannot be started: {error}.") from None
    installed = [engine for engine, package in wanted.items() if package in done.stdout.split()]
    if asked in installed or (asked is None and installed):
        return asked or installed[0]
    command = "pip install vllm" if asked == Engine.VLLM else "pip install 'finetune-kit[serve]'"
    raise InputError(
        f"{asked or 'A server'} is not installed for {python}: run `{command}`. vLLM needs an environment apart from "
        "the kit's, since it pins other versions: name its interpreter with --python."
    )


def _check_fit(base: Path, cluster: Cluster, gpus: int) -> None:
    """Raises InputError where the weights do not fit the GPUs' memory."""
    if cluster.nodes.gpus and gpus > cluster.nodes.gpus:
        raise InputError(f"{cluster.name} has {cluster.nodes.gpus} GPUs per node, not {gpus}.")
    size = sum(tensor.bytes for tensor in read_headers(base).tensors.values()) / 2**30
    room = cluster.nodes.gpu_memory_gib * gpus * WEIGHTS_PART
    if room and size > room:
        raise InputError(
            f"{base} has {size:.1f} GiB of weights, which do not fit {gpus} GPU(s) with "
            f"{cluster.nodes.gpu_memory_gib:.0f} GiB each: raise --gpus."
        )


def _check_adapter(adapter: Path, base: Path, engine: Engine) -> int:
    """The adapter's rank. Raises InputError where a tensor has no module in the base, or vLLM cannot serve it."""
    config, weights = files.read_json(adapter / CONFIG), read_headers(adapter)
    names = [name.removeprefix("base_model.model.") for name in weights.tensors]
    lora = [name for name in names if ".lora_" in name]
    if engine == Engine.VLLM and len(lora) < len(names):
        raise InputError(
            f"vLLM serves only LoRA matrices; {adapter} also has other tensors: merge it and serve the merged model."
        )
    expected = MemoryNames(base).expected
    modules = {name.partition(".lora_")[0] for name in lora}
    missing = sorted(module for module in modules if f"{module}.weight" not in expected)
    if not modules or (expected and missing):
        example = f", such as {missing[0]}" if missing else ""
        raise InputError(
            f"{adapter}: {len(missing)} of {len(modules)} modules are not in {base}{example}. A server would serve the "
            "base without them. Name the base that the adapter was trained on."
        )
    return int(config["r"])


def wait(run: Run, out: Path, every: float = 1.0) -> Served:
    """Wait until the server is proven. Raises KitError with the reason, as the checks that failed."""
    out = Path(out)
    while not (out / PROOF).is_file():
        if (state := run.state).ended:
            raise KitError(f"The server is {state.state}: {state.cause or 'no cause is known'}; see {run.log}.")
        time.sleep(every)
    proof = files.read_json(out / PROOF)
    if proof["error"]:
        raise KitError(f"{proof['error']} See {run.log}.")
    checks = tuple(Check(c["name"], Outcome(c["outcome"]), c["detail"]) for c in proof["checks"])
    address = files.read_json(out / ADDRESS)
    key_file = str(out / KEY) if (out / KEY).exists() else ""
    return Served(address["host"], address["port"], address["model"], key_file, checks)


def _free_port(wanted: int) -> int:
    """The wanted port, or any free one for 0. Raises KitError where it is in use."""
    with socket.socket() as listener:
        try:
            listener.bind((LOOPBACK, wanted))
        except OSError:
            raise KitError(
                f"Port {wanted} is in use on {socket.gethostname()}: choose another, or 0 for any."
            ) from None
        return int(listener.getsockname()[1])


def main() -> int:
    """The job's side, in its folder: expected answers, server, proof; then it serves until the job ends."""
    try:
        return _serve(Request.read(Path(REQUEST)))
    except KitError as error:
        _write_proof((), str(error))
        print(f"kit serve: {error}", file=sys.stderr)
        return 1


def _serve(request: Request) -> int:
    port, key = _free_port(request.port), secrets.token_urlsafe(32)
    questions = [json.loads(line)["question"] for line in (TASKS / "facts.jsonl").read_text("utf-8").splitlines()]
    # In a process that ends before the server starts, so that all memory of the GPUs is free again.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        expected = pool.submit(expected_answers, request, questions).result()
    server = SERVERS[request.engine].create(request, port, key)
    process = subprocess.Popen(server.command(), env=os.environ | {"VLLM_API_KEY": key})
    signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
    try:
        while not server.healthy():
            if process.poll() is not None:
                raise KitError(f"The server ended with exit code {process.returncode} before it answered.")
            time.sleep(1)
        checks = prove(server, expected, bool(request.adapter))
        if failed := [f"{check.name}: {check.detail}" for check in checks if check.outcome == Outcome.FAILED]:
            raise KitError(f"What is served is not what was trained, so the job ends. {'; '.join(failed)}.")
        _publish(server)
        _write_proof(checks)
        return process.wait()
    finally:
        process.terminate()
        process.wait()


def _publish(server: Server) -> None:
    """Write key and address. Only the owner can read the key."""
    if server.takes_key:
        with open(os.open(KEY, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:  # noqa: PTH123  (a mode)
            file.write(server.key)
    files.write_json(Path(ADDRESS), {"host": socket.gethostname(), "port": server.port, "model": server.name})


def _write_proof(checks: Iterable[Check], error: str = "") -> None:
    """Write the last file: who waits for it finds all the others."""
    files.write_json(Path(PROOF), {"checks": [asdict(check) for check in checks], "error": error})


if __name__ == "__main__":
    sys.exit(main())
