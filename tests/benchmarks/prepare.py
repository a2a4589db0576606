"""Preparation measured: `python tests/benchmarks/prepare.py` writes prepare.json beside it (needs the 100 real trees).

5,125 conversations, made of the 100 real OASST trees with new ids and small changes of text so that nothing repeats,
go from JSONL to packed Arrow through the kit and through TRL's own path, on the same rows in one run.
"""

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

import numpy as np  # noqa: E402

from kit.config.recipe import Recipe  # noqa: E402
from kit.data.dataset import find_prepared, prepare  # noqa: E402
from kit.data.pack import lower_bound, pack  # noqa: E402
from kit.data.sources import open_source  # noqa: E402

SHARED = Path(os.environ.get("KIT_SHARED", REPOSITORY.parent / "shared"))
TREES = SHARED / "data" / "oasst_en_100_trees.jsonl"
CONVERSATIONS = 5125  # the published run's


def main() -> None:
    """Measure and write; a process of its own for each cold preparation."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tokenizer = _llama31(work)
        trees, chats = _write_inputs(work)
        found: dict[str, Any] = {
            "machine": f"{os.cpu_count()} cores, {_processor()}, load {os.getloadavg()[0]:.1f} at start",
            "cold": {engine: _cold(trees, tokenizer, engine, work) for engine in ("tokenizers", "gigatoken")},
            "same_rows": _side_by_side(chats, tokenizer, work),
            "pack": _packing(),
        }
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())


def _llama31(work: Path) -> Path:
    from tests.llama31 import build

    build(work / "llama31")
    return work / "llama31"


def _write_inputs(work: Path) -> tuple[Path, Path]:
    """The same conversations as OASST trees and as chat rows."""
    real = [json.loads(line) for line in TREES.read_text().splitlines()]
    with (work / "trees.jsonl").open("w") as stream:
        for i in range(CONVERSATIONS):
            tree = json.loads(json.dumps(real[i % len(real)]))
            tree["message_tree_id"] += f"-{i}"
            _change(tree["prompt"], i)
            stream.write(json.dumps(tree) + "\n")
    with (work / "chats.jsonl").open("w") as stream:
        for _, found in open_source(str(work / "trees.jsonl")).read("en", lambda row, reason: None):
            stream.write(json.dumps({"id": found.id, "messages": found.messages}) + "\n")
    return work / "trees.jsonl", work / "chats.jsonl"


def _change(node: dict[str, Any], i: int) -> None:
    node["message_id"] += f"-{i}"
    node["text"] = node["text"].replace(". ", f" ({i}). ", 1) + f" {i}"
    for reply in node.get("replies", []):
        _change(reply, i)


def recipe(source: Path, tokenizer: Path) -> Recipe:
    """The published run's, on this source; all of it for training."""
    return Recipe.load("llama405b-oasst2").override(
        **{"model.name": str(tokenizer), "data.source": str(source), "data.eval_fraction": 0.0}
    )


def one(source: str, tokenizer: str, engine: str, out: str) -> None:
    """In a new process: prepare, and print seconds, memory and sizes."""
    job, start = recipe(Path(source), Path(tokenizer)), time.perf_counter()
    dataset = prepare(job, Path(out), engine=engine)  # type: ignore[arg-type]
    wall, cpu = time.perf_counter() - start, time.process_time()
    start = time.perf_counter()
    prepare(job, Path(out), engine=engine)  # type: ignore[arg-type]
    hit = time.perf_counter() - start
    start = time.perf_counter()
    find_prepared(job, Path(out))
    find = time.perf_counter() - start
    told = dataset.as_dict()
    print(
        json.dumps(
            {
                "tokens": told["ledger"]["read_tokens"],
                "wall_s": round(wall, 2),
                "cpu_s": round(cpu, 2),
                "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
                "hit_s": round(hit, 4),
                "find_prepared_s": round(find, 4),  # plan and predict wait for it: at most 0.05 s
                "rows": told["splits"]["train"]["rows"],
                "lower_bound": told["splits"]["train"]["bound"],
                "optimizer_steps": told["optimizer_steps"],
            }
        )
    )


def _cold(source: Path, tokenizer: Path, engine: str, work: Path) -> dict[str, Any]:
    """With all imports: transformers and torch take their seconds and their memory in it."""
    command = [sys.executable, __file__, "one", source, tokenizer, engine, work / f"cold-{engine}"]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def _side_by_side(chats: Path, tokenizer: Path, work: Path) -> dict[str, Any]:
    """Medians of five preparations of the same chat rows, all libraries imported.

    `growing` leaves out what does not grow with the rows, such as the kit's loading of the tokenizer: the medians of
    the same times less those of 100 rows, measured in turn. TRL is given its tokenizer.
    """
    few = work / "few.jsonl"
    few.write_text("".join(chats.read_text().splitlines(keepends=True)[:100]))
    found: dict[str, Any] = {}
    for way in ("trl", "tokenizers", "gigatoken"):
        measure = _trl if way == "trl" else _kit
        measure(few, tokenizer, work / f"imports-{way}", way)
        pairs = [
            [measure(rows, tokenizer, work / f"{rows.stem}-{way}-{i}", way) for rows in (few, chats)] for i in range(5)
        ]
        found[way] = _rates(*np.median([whole for _, whole in pairs], axis=0))
        found[way]["growing"] = _rates(*np.median([np.subtract(whole, part) for part, whole in pairs], axis=0))
    for way in ("tokenizers", "gigatoken"):
        for mine, trl in ((found[way], found["trl"]), (found[way]["growing"], found["trl"]["growing"])):
            mine["times_trl"] = round(mine["tokens_per_s"] / trl["tokens_per_s"], 1)
    return found


def _rates(tokens: float, wall: float, cpu: float) -> dict[str, Any]:
    return {"wall_s": round(wall, 2), "tokens_per_s": round(tokens / wall), "tokens_per_cpu_s": round(tokens / cpu)}


def _kit(rows: Path, tokenizer: Path, out: Path, engine: Any) -> tuple[int, float, float]:
    """Tokens, seconds and CPU seconds of one preparation."""
    wall, cpu = time.perf_counter(), time.process_time()
    dataset = prepare(recipe(rows, tokenizer), out, engine=engine)
    return dataset.manifest["ledger"]["read_tokens"], time.perf_counter() - wall, time.process_time() - cpu


def _trl(chats: Path, tokenizer: Path, work: Path, way: str) -> tuple[int, float, float]:
    """load_dataset and SFTTrainer's own preparation: template, tokens and best-fit packing through datasets.map."""
    import datasets
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    datasets.disable_progress_bars()
    words = AutoTokenizer.from_pretrained(tokenizer)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    arguments = SFTConfig(
        str(work / "trl"), max_length=2048, packing=True, report_to=[], use_cpu=True, bf16=False,
    )  # fmt: skip
    spent: list[float] = []
    prepare_dataset = SFTTrainer._prepare_dataset

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter(), time.process_time()
        made = prepare_dataset(*args, **kwargs)
        spent[:] = time.perf_counter() - start[0], time.process_time() - start[1]
        return made

    start = time.perf_counter(), time.process_time()
    rows = datasets.load_dataset("json", data_files=str(chats), split="train", cache_dir=str(work / "cache"))
    loading = time.perf_counter() - start[0], time.process_time() - start[1]
    SFTTrainer._prepare_dataset = timed
    trainer = SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=words)
    SFTTrainer._prepare_dataset = prepare_dataset
    tokens = sum(map(len, trainer.train_dataset["input_ids"]))
    return tokens, loading[0] + spent[0], loading[1] + spent[1]


def _packing() -> dict[str, Any]:
    lengths = np.clip(np.random.RandomState(0).lognormal(5.8, 0.9, 10**6).astype(int) + 1, 1, 2048)
    start = time.process_time()
    rows = len(pack(lengths, 2048, 0)[1]) - 1
    return {"documents": 10**6, "cpu_s": round(time.process_time() - start, 2), "rows": rows,
            "lower_bound": lower_bound(lengths, 2048)}  # fmt: skip


if __name__ == "__main__":
    one(*sys.argv[2:]) if sys.argv[1:2] == ["one"] else main()
