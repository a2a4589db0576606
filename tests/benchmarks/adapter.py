"""Measure the export and the merge of an adapter: `python tests/benchmarks/adapter.py FOLDER OUT.json [GB]`.

FOLDER takes three times GB. Each figure is of a fresh process that has done the same once before on a small model, so
that imports count neither as reads nor as memory. Beside the kit's ways are torch's own load of the whole sharded
checkpoint and PEFT's merge_and_unload.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path

from kit import files
from kit.checkpoints import pagecache
from kit.deploy import adapter
from kit.deploy import merge as merging

REPOSITORY = Path(__file__).resolve().parents[2]
TARGETS = ["q_proj", "v_proj"]


def make(folder: Path, gb: float, r: int = 64, hidden: int = 2048, shard: str = "5GB") -> Path:
    """base/, a bf16 Llama of about `gb` (1e9 bytes), and checkpoint-1/, one process's DCP of base and fp32 adapter."""
    import torch
    import torch.distributed.checkpoint as dcp
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = max(1, round(gb * 1e9 / 2 / (16 * hidden**2)))  # 4 of attention and 3 x 4 of the MLP
    config = LlamaConfig(vocab_size=1000, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers)
    base = LlamaForCausalLM(config).to(torch.bfloat16)
    base.save_pretrained(folder / "base", max_shard_size=shard)
    base.config.name_or_path = base.name_or_path = str(folder / "base")
    model = get_peft_model(base, LoraConfig(r=r, target_modules=TARGETS, init_lora_weights=False))
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that one process is one process
        dcp.save(state, checkpoint_id=str(folder / "checkpoint-1" / "pytorch_model_fsdp_0"), no_dist=True)
    model.peft_config["default"].base_model_name_or_path = str(folder / "base")
    model.peft_config["default"].save_pretrained(folder / "checkpoint-1")
    return folder


def export(folder: Path) -> None:
    """The kit's export."""
    adapter.export(folder / "checkpoint-1", folder / "adapter")


def merge(folder: Path, shard_gb: float = 5.0) -> None:
    """The kit's merge."""
    merging.merge(folder / "adapter", folder / "base", folder / "merged", shard_gb)


def load_whole(folder: Path) -> None:
    """What torch offers for an export: the whole checkpoint, of which the adapter is then picked."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder / "checkpoint-1" / "pytorch_model_fsdp_0", folder / "whole.pt")


def merge_and_unload(folder: Path) -> None:
    """PEFT's merge."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload().save_pretrained(folder / "unloaded")


def cost(way: str, folder: Path, small: Path, *more: float) -> dict[str, float]:
    """Seconds, bytes read by calls and from the device, and peak memory above that before, of one way; files cold."""
    command = [sys.executable, __file__, "--cost", way, str(folder), str(small), *map(str, more)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(way: str, folder: Path, small: Path, *more: float) -> dict[str, float]:
    """In the fresh process: on the small model, then on the other."""
    globals()[way](small, *more)
    pagecache.evict(p for p in folder.rglob("*") if p.is_file())
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is used now (man 5 proc)
    used = _peak()
    read, device, begun = pagecache.read_bytes(), pagecache.device_bytes(), time.perf_counter()
    globals()[way](folder, *more)
    return {
        "s": time.perf_counter() - begun, "read_bytes": pagecache.read_bytes() - read,
        "device_bytes": pagecache.device_bytes() - device, "peak_bytes": _peak() - used,
    }  # fmt: skip


def _peak() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def size(folder: Path) -> int:
    """Bytes of a model's or an adapter's weights."""
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def main(folder: Path, out: Path, gb: float = 4.0) -> None:
    """Every way once, into one JSON file."""
    scratch = Path(tempfile.mkdtemp(dir=folder, prefix="adapter-"))
    try:
        small = make(scratch / "small", 0.01, hidden=256)
        large = make(scratch / "large", gb)
        found = {way: cost(way, large, small) for way in ("export", "load_whole")}
        (large / "whole.pt").unlink()
        found["merge"] = cost("merge", large, small, 0.5)
        shutil.rmtree(large / "merged")
        found["merge_and_unload"] = cost("merge_and_unload", large, small)
        machine = {"date": time.strftime("%Y-%m-%d"), "cpus": os.cpu_count(), "kernel": platform.release()}
        machine |= {name: version(name) for name in ("torch", "peft", "safetensors", "transformers")}
        sizes = {"base_bytes": size(large / "base"), "adapter_bytes": size(large / "adapter"), "shard_gb": 0.5}
        files.write_json(out, {"machine": machine, **sizes, "ways": found})
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    if sys.argv[1] == "--cost":
        print(json.dumps(measure(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), *map(float, sys.argv[5:]))))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]), *map(float, sys.argv[3:]))
