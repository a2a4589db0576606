"""Measure training speed on real GPUs: the kit, the kit before, TRL and Unsloth on the same packed rows.

    python tests/gpu/speed.py OUT PREPARED [--before TREE] [--unsloth SITE] [--arms NAME,NAME] [--seconds N]

PREPARED is a folder that `kit prepare` made with data.seq_len 4096; its documents are drawn with replacement, so that
the rows have their lengths. TREE is a checkout of the commit to compare with. SITE is a folder of packages for
Unsloth's arms, which want older releases of TRL and transformers than the kit. The arms are in arms.py. Each is a
process: patches of one library cannot reach another arm, and an arm that fails is a row with its error. OUT/speed.json
is written after each of them.

The model has the shape of Llama 3.1 8B and random weights. FlashAttention 2 for TRL and Unsloth is PyTorch's own build
of these kernels under the names of the package flash-attn. All arms import at once, since imports take longer than the
measurements; then they use the GPU one after another.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import ARMS, Arm

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.dataset import Dataset
from kit.data.pack import pack
from kit.files import REPOSITORY, read_json, write_json
from kit.forecast.choices import Resolution, resolve
from kit.slurm import launch
from kit.slurm.submit import submit
from kit.trainers import trl
from kit.watch.metrics import Metrics

HERE = Path(__file__).parent
LIMIT, IMPORTS = 150, 60  # seconds of one arm, and of the imports of one
FLASH = {  # a package flash-attn of these files, over torch's kernels
    "flash_attn/__init__.py": """
from torch.nn.attention.varlen import varlen_attn
__version__ = "2.8.3"

def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), **_):
    window = (window_size[0], 0) if causal else tuple(window_size)
    return varlen_attn(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale=softmax_scale,
                       window_size=window)

def flash_attn_func(*args, **kwargs):
    raise NotImplementedError("only packed rows")

flash_attn_with_kvcache = flash_attn_func
""",
    "flash_attn/bert_padding.py": "pad_input = unpad_input = index_first_axis = None\n",
    "flash_attn/flash_attn_interface.py": (
        "from flash_attn import flash_attn_func, flash_attn_varlen_func\nflash_attn_gpu = None\n"
    ),
    "flash_attn-2.8.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n",
    "flash_attn-2.8.3.dist-info/top_level.txt": "flash_attn\n",
}


class Bench:
    """Folder, rows and packages of the arms."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out = options.out.absolute()
        self.work = self.out / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        self.prepared = Dataset(options.prepared.absolute())
        self.flash = self.work / "flash"
        for name, text in FLASH.items():
            (self.flash / name).parent.mkdir(parents=True, exist_ok=True)
            (self.flash / name).write_text(text)
        self.cluster = cluster_here(self.work)

    def rows(self, seq_len: int) -> Path:
        """The packed rows of this length as arrays; made once."""
        path = self.work / f"rows{seq_len}.npz"
        if not path.exists():
            np.savez(path, **packed(self.prepared, seq_len, self.options.tokens))  # type: ignore[arg-type]
        return path

    def model(self, arm: Arm) -> Path:
        """The config.json of the model, with the tokenizer in its folder; made once."""
        changes = arm.shape | ({"num_hidden_layers": arm.layers} if arm.layers else {})
        folder = self.work / "-".join(["model", *(f"{key}={value}" for key, value in changes.items())])
        if not (folder / "config.json").exists():
            folder.mkdir(exist_ok=True)
            for path in (self.prepared.path / "tokenizer").iterdir():
                (folder / path.name).write_bytes(path.read_bytes())
            shapes = read_json(REPOSITORY / "kit" / "forecast" / "shapes.json")
            shape: Any = "meta-llama/Llama-3.1-8B-Instruct"
            while isinstance(shape, str):
                shape = shapes[shape]
            shape |= LLAMA | (TINY if self.options.tiny else {}) | changes
            (folder / "config.json").write_text(json.dumps(shape))
        return folder / "config.json"

    def start(self, number: int, name: str, arm: Arm) -> "Process":
        """Start the arm's process; it imports, and waits for its file `go`."""
        folder = self.work / f"{number:02}"
        folder.mkdir(exist_ok=True)
        seq_len = arm.seq_len // 16 if self.options.tiny else arm.seq_len
        warm, timed = self.options.steps
        warm = max(warm, arm.warm)
        steps = arm.steps or warm + timed + arm.profile
        spec = arm.more | {
            "name": name,
            "kind": "kit" if arm.kind == "before" else arm.kind,
            "work": str(folder),
            "rows": str(self.rows(seq_len)),
            "model": str(self.model(arm)),
            "targets": list(arm.targets),
            "batch": arm.batch,
            "seq_len": seq_len,
            "gpus": arm.gpus,
            "steps": steps,
            "warm": warm,
            "timed": timed,
            "profile": arm.profile,
            "on_gpu": torch.cuda.is_available(),
            **{key: str(folder / key) for key in ("ready", "go", "result")},
        }
        if arm.task:
            spec |= {"module": "agreement", "task": arm.task}
        if arm.kind in ("kit", "before"):
            spec |= self.write_recipe(folder, arm, steps)
        (folder / "spec.json").write_text(json.dumps(spec))
        log = (folder / "log").open("w")
        command = [sys.executable, str(HERE / "measure.py"), str(folder / "spec.json")]
        if arm.gpus > 1:
            launcher = ["-m", "accelerate.commands.launch", "--config_file", str(folder / trl.CONFIG)]
            command[1:1] = [*launcher, "--main_process_port", str(29600 + number)]
        child = subprocess.Popen(command, env=self.environment(arm), stdout=log, stderr=log, cwd=folder)
        return Process(name, arm, folder, child)

    def recipe(self, arm: Arm, steps: int) -> Recipe:
        """The arm's recipe, without `auto`."""
        changes = {
            "name": "speed", "model.name": str(self.model(arm)), "data.seq_len": arm.seq_len,
            "tuning.r": 16, "tuning.alpha": 32, "tuning.dropout": 0.0, "tuning.target_modules": list(arm.targets),
            "parallel.strategy": "ddp", "parallel.gpus_per_node": arm.gpus, "schedule.max_steps": steps,
            "schedule.micro_batch": arm.batch, "schedule.eval_every": 0, "schedule.save_every": steps,
            "schedule.lr": 1e-4,
        } | arm.recipe  # fmt: skip
        recipe = Recipe.load("demo").override(**changes)
        return recipe if arm.kind == "before" else resolved(recipe, self.cluster).recipe

    def write_recipe(self, folder: Path, arm: Arm, steps: int) -> dict[str, Any]:
        """Write the arm's recipe, and accelerate's config for it. An older kit does not know all keys."""
        recipe = self.recipe(arm, steps)
        text = recipe.toml()
        if arm.kind == "before":
            text = older(text)
        (folder / "recipe.toml").write_text(text)
        (folder / trl.CONFIG).write_text(trl.render_accelerate(recipe, self.cluster))
        return {"recipe": str(folder / "recipe.toml"), "choices": choices(recipe)}

    def launch(self, name: str, arm: Arm, seconds: float) -> dict[str, Any]:
        """Launch a run as a user does, and return what it logged. Its rows are those of the prepared folder."""
        begun = time.monotonic()
        recipe = self.recipe(arm, arm.steps)
        run = launch.freeze(Resolution(recipe), self.cluster, self.prepared, None)
        submit(run)
        end = run.wait(timeout=seconds)
        about = {"arm": name, "batch": arm.batch, "gpus": arm.gpus, "state": end.state, "choices": choices(recipe)}
        about["wall_s"] = round(time.monotonic() - begun, 1)
        if end.state != "COMPLETED":
            return about | {"error": end.cause, "log": run.log.read_text()[-1500:]}
        metrics = Metrics(run.path)
        while metrics.poll():
            pass
        seconds_each = metrics.series["train/step_s"].values
        timed = slice(len(seconds_each) // 2, None)
        pace = np.array(metrics.series["train/tokens_per_s"].values[timed]) / arm.gpus
        return (
            about
            | read_json(run.state_folder.result)
            | {
                "tokens_per_s": [round(float(value)) for value in (np.median(pace), pace.min(), pace.max())],
                "all_steps_s": [round(float(value), 4) for value in seconds_each],
                "losses": list(metrics.series["train/loss"].values),
            }
        )

    def environment(self, arm: Arm) -> dict[str, str]:
        """Where the arm finds its packages."""
        places = {"before": [self.options.before], "kit": [REPOSITORY], "unsloth": [self.options.unsloth], "trl": []}
        path = [*places[arm.kind], *([self.flash] if arm.more.get("flash") else [])]
        if arm.kind != "unsloth":
            path += [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p) != REPOSITORY]
        return os.environ | {
            "PYTHONPATH": os.pathsep.join(str(Path(place).absolute()) for place in path),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "inductor"),
            "TRITON_CACHE_DIR": str(self.work / "triton"),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(arm.gpus))),  # of several, Trainer would use all
        }


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "dtype": "bfloat16",
}  # fmt: skip
TINY = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 49152, "head_dim": 32,
}  # fmt: skip
NEW_KEYS = ("base = ", "compile = ", "save = ", "python = ")


def older(recipe: str) -> str:
    """A recipe file of today in the words of the kit before."""
    kept = [line for line in recipe.partition("[trainer]")[0].splitlines() if not line.startswith(NEW_KEYS)]
    return "\n".join(kept).replace('offload = "none"', "offload = false")


def resolved(recipe: Recipe, cluster: Cluster) -> Resolution:
    """The recipe with every `auto` replaced as `kit launch` does for a run of 1,000 steps."""
    steps = recipe.schedule.max_steps
    chosen = resolve(recipe.override(**{"schedule.max_steps": 1000}), cluster, compiler=True)
    return dataclasses.replace(chosen, recipe=chosen.recipe.override(**{"schedule.max_steps": steps}))


def choices(recipe: Recipe) -> dict[str, Any]:
    """What decides the speed of a recipe."""
    model, parallel = recipe.model, recipe.parallel
    return {
        "method": recipe.tuning.method,
        "strategy": parallel.strategy,
        "attention": model.attention,
        "base": model.base,
        "compile": parallel.compile,
        "activation_checkpointing": parallel.activation_checkpointing,
    }


@dataclasses.dataclass
class Process:
    """An arm that has been started."""

    name: str
    arm: Arm
    folder: Path
    child: "subprocess.Popen[bytes]"

    def wait_ready(self, seconds: float) -> None:
        """Until it has imported, or has failed to."""
        begun = time.monotonic()
        while not (self.folder / "ready").exists() and self.child.poll() is None and time.monotonic() - begun < seconds:
            time.sleep(0.05)

    def run(self, seconds: float) -> dict[str, Any]:
        """Let it use the GPU, and return its result or its error."""
        begun = time.monotonic()
        (self.folder / "go").touch()
        try:
            self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()
        result = self.folder / "result"
        found = read_json(result) if result.exists() else {"error": f"no result after {seconds:.0f} s"}
        if "error" in found:
            found["log"] = (self.folder / "log").read_text(errors="replace")[-1500:]
        spec = read_json(self.folder / "spec.json")
        about = {"arm": self.name} | {key: spec[key] for key in ("batch", "seq_len", "gpus", "choices") if key in spec}
        return about | found | {"wall_s": round(time.monotonic() - begun, 1)}

    def end(self) -> None:
        """End the process and its ranks."""
        if self.child.poll() is None:
            self.child.terminate()
            try:
                self.child.wait(5)
            except subprocess.TimeoutExpired:
                self.child.kill()


def packed(prepared: Dataset, seq_len: int, tokens: int) -> dict[str, Any]:
    """About this many tokens of documents drawn with replacement, as rows that the kit's packer fills."""
    rows = prepared.rows("train")
    documents = []
    for row in rows:
        bounds = np.cumsum([0, *row["seq_lengths"]])
        for begin, end in itertools.pairwise(bounds):
            if end - begin <= seq_len:
                documents.append((row["input_ids"][begin:end], row["labels"][begin:end]))
    lengths = np.array([len(ids) for ids, _ in documents])
    drawn = np.random.RandomState(0).randint(len(documents), size=round(tokens / lengths.mean()))
    order, starts = pack(lengths[drawn], seq_len, seed=0)
    chosen = drawn[order]
    return {
        "input_ids": np.concatenate([documents[i][0] for i in chosen]).astype(np.int32),
        "labels": np.concatenate([documents[i][1] for i in chosen]).astype(np.int32),
        "lengths": lengths[chosen],
        "row_starts": starts[:-1],
    }


def cluster_here(folder: Path) -> Cluster:
    """This machine as a cluster profile."""
    gpus = torch.cuda.device_count()
    card = torch.cuda.get_device_properties(0) if gpus else None
    memory = f"{card.total_memory / 2**30:.1f}" if card else "0.0"
    (folder / "here.toml").write_text(
        f'name = "here"\n[nodes]\ncount = 1\ngpus = {gpus}\ngpu = "{card.name if card else ""}"\n'
        f"gpu_memory_gib = {memory}\ngpu_bf16_tflops = 989.0\ncpus = {os.cpu_count()}\nram_gib = 128\n"
        '[links]\nintra = { kind = "nvlink4", gb_s = 450.0 }\n'
        f'[paths]\nruns = "{folder}/runs"\n'
    )
    return Cluster.load(folder / "here.toml")


def facts(rows: Path) -> dict[str, Any]:
    """Card, driver, date and the rows."""
    stored = np.load(rows)
    count = torch.cuda.device_count()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return {
        "card": f"{count} x {torch.cuda.get_device_name(0)}" if count else "none",
        "driver": subprocess.run(query, capture_output=True, text=True).stdout.strip() if count else "",
        "date": datetime.date.today().isoformat(),
        "rows": {
            "count": len(stored["row_starts"]),
            "mean_tokens": round(float(stored["lengths"].sum() / len(stored["row_starts"])), 1),
            "documents_per_row": round(len(stored["lengths"]) / len(stored["row_starts"]), 2),
            "in_loss": round(float((stored["labels"] >= 0).mean()), 3),
        },
    }


def main() -> int:
    """Measure the arms that this machine can run, or those named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("prepared", type=Path)
    parser.add_argument("--before", type=Path, help="checkout of the commit to compare with")
    parser.add_argument("--unsloth", type=Path, help="folder of packages with Unsloth's")
    parser.add_argument("--arms", default="", help="names or beginnings of names, separated by ';'")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no arm after this time")
    parser.add_argument("--tokens", type=int, default=600_000, help="tokens of the rows")
    parser.add_argument("--steps", type=int, nargs=2, default=(3, 7), help="steps before the timed ones, and those")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers, to try the script")
    options = parser.parse_args()
    begun, bench = time.monotonic(), Bench(options)
    wanted = [name for name in options.arms.split(";") if name]
    gpus = max(1, torch.cuda.device_count())
    places = {"before": options.before, "unsloth": options.unsloth, "kit": True, "trl": True, "launch": True}
    possible = {name: arm for name, arm in ARMS.items() if places[arm.kind] and arm.gpus <= gpus}
    chosen = {name: arm for name, arm in possible.items() if arm.gpus == gpus}
    if wanted:
        names = [name for word in wanted for name in ([word] if word in ARMS else ARMS) if name.startswith(word)]
        chosen = {name: possible[name] for name in names if name in possible}
    report: dict[str, Any] = facts(bench.rows(4096 if not options.tiny else 256)) | {"arms": []}
    started = {
        name: bench.start(number, name, arm)
        for number, (name, arm) in enumerate(chosen.items())
        if arm.kind != "launch"
    }
    for process in started.values():  # imports of the others would disturb the first
        process.wait_ready(IMPORTS)
    for name, arm in chosen.items():
        left = options.seconds - (time.monotonic() - begun)
        if left < 0:
            report["arms"].append({"arm": name, "error": "no time was left"})
            continue
        seconds = min(LIMIT, left)
        report["arms"].append(started[name].run(seconds) if name in started else bench.launch(name, arm, seconds))
        write_json(bench.out / "speed.json", report)
        shown = {key: value for key, value in report["arms"][-1].items() if key not in ("versions", "all_steps_s")}
        print(json.dumps(shown), flush=True)
    for process in started.values():
        process.end()
    write_json(bench.out / "speed.json", report)
    return int(any("error" in arm for arm in report["arms"]))


if __name__ == "__main__":
    sys.exit(main())
