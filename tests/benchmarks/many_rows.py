"""Preparation of many conversations: `python tests/benchmarks/many_rows.py [CONVERSATIONS]` writes many_rows.json.

Short made-up conversations go from JSONL to packed rows with the embedded model's tokenizer, in a new process each, for
half as many conversations and for all, so that the memory that each takes follows.
"""

import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SENTENCE = "the model reads a file and writes rows that are packed into sequences of tokens for training on nodes"
RECIPE = """
name = "many"
[model]
name = "models/SmolLM2-135M-Instruct"
[data]
source = "{source}"
seq_len = 1024
eval_fraction = 0.0
"""
PREPARE = """
import json, re, sys, time
from pathlib import Path
import kit
from kit.data.dataset import prepare
recipe = kit.Recipe.load(sys.argv[1])
start = time.monotonic()
prepare(recipe, Path(sys.argv[2]), progress=False)
status = Path("/proc/self/status").read_text()
found = {"wall_s": time.monotonic() - start, "cpu_s": time.process_time()}
print(json.dumps(found | {"peak_mb": int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) / 1024}))
"""


def write_conversations(path: Path, count: int) -> None:
    """Conversations of about 40 tokens, no two the same."""
    draw, words = random.Random(1), SENTENCE.split()
    with path.open("w") as stream:
        for number in range(count):
            question, answer = (" ".join(draw.choices(words, k=size)) for size in (8, 24))
            messages = [{"role": "user", "content": f"{number} {question}"}, {"role": "assistant", "content": answer}]
            stream.write(json.dumps({"messages": messages}) + "\n")


def measured(folder: Path, count: int) -> dict[str, float]:
    """Seconds and MB of one preparation."""
    folder.mkdir()
    write_conversations(folder / "rows.jsonl", count)
    (folder / "recipe.toml").write_text(RECIPE.format(source=folder / "rows.jsonl"))
    command = [sys.executable, "-c", PREPARE, str(folder / "recipe.toml"), str(folder / "out")]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {name: round(value, 1) for name, value in found.items()}


def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        half, all_rows = measured(Path(folder, "half"), count // 2), measured(Path(folder, "all"), count)
    each_mb = (all_rows["peak_mb"] - half["peak_mb"]) / (count - count // 2)
    found = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
        "conversations": count,
        **all_rows,
        "of_half_as_many": half,
        "peak_mb_of_a_million_by_extrapolation": round(all_rows["peak_mb"] + each_mb * max(0, 1_000_000 - count)),
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
