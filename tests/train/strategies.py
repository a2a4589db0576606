"""Training on several CPU ranks by the kit's own parts, for tests that compare strategies; also the ranks' script."""

import functools
import hashlib
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

from tests import shared
from tests.ranks import TRAINING, run_ranks
from tests.train.forked import use_accelerate_config

STEPS = 6
SIZES = {
    "vocab_size": 49152, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 6, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

ODD = {"hidden_size": 96, "intermediate_size": 4097, "num_hidden_layers": 4, "tie_word_embeddings": True}


def base_model(kind, tokenizer):
    """The folder of a small model of random weights: llama, tied, bf16 or odd (both bf16 in files), mixtral, qwen3_moe.

    odd: larger, and nf4's blocks of 64 weights do not end where the rows of ranks do.
    """

    def build(folder):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(0)
        family = kind if kind in ("mixtral", "qwen3_moe") else "llama"
        sizes = SIZES | (EXPERTS if family != "llama" else {}) | {"tie_word_embeddings": kind == "tied"}
        sizes |= ODD if kind == "odd" else {}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        if kind in ("bf16", "odd"):
            model = model.to(torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="2MB")
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)

    return shared.once(f"base-{kind}", build)


def train_ranks(recipe, folder, *variants):
    """Train on recipe.world_size ranks, once for each variant; what the ranks found, for each.

    A variant may have steps, else it is STEPS; whole=True, which loads the base as a whole; read_at_once, bytes that
    are quantised together; resume, a checkpoint; and dies_at, the step whose checkpoint rank 1 does not complete.
    """
    from kit.config.cluster import Cluster
    from kit.trainers.trl import render_accelerate

    folder.mkdir(exist_ok=True)
    (folder / "recipe.toml").write_text(recipe.toml())
    (folder / "accelerate.yaml").write_text(render_accelerate(recipe, Cluster.load("local")))
    (folder / "variants.json").write_text(json.dumps(variants))
    run_ranks(recipe.world_size, __file__, folder, imports=TRAINING)
    return [json.loads((folder / f"found-{number}.json").read_text()) for number in range(len(variants))]


def packed_rows(count, length=48):
    """Rows of two documents of random tokens."""
    import torch
    from datasets import Dataset

    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 49152, (length,), generator=draw).tolist() for _ in range(count)]
    return Dataset.from_list([{"input_ids": row, "labels": row, "seq_lengths": [length // 2] * 2} for row in ids])


def digest(model):
    """Of everything that this rank holds of a model, the scales of 4-bit weights included."""
    import torch

    found = hashlib.sha256()
    for tensor in [*model.parameters(), *model.buffers()]:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(local.detach().contiguous().flatten().view(torch.uint8).numpy())
    for module in model.modules():
        for name, value in sorted(module.quant_state.as_dict().items() if hasattr(module, "quant_state") else ()):
            found.update(f"{name} {value.tolist() if hasattr(value, 'tolist') else value}".encode())
    return found.hexdigest()


def bytes_read():
    """Bytes that this process has read from files and other descriptors."""
    return int(Path("/proc/self/io").read_text().split()[1])


def die_after_writing(checkpoint, before):
    """Have this process killed as it has written its files of a checkpoint; all writes take a second.

    Writes to killed.json whether the checkpoint before it is complete then.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    from kit.checkpoints.inspect import complete

    write_data = FileSystemWriter.write_data

    def write(writer, *arguments):
        time.sleep(1)
        written = write_data(writer, *arguments)
        if checkpoint in Path(writer.path).parents:
            (checkpoint.parents[1] / "killed.json").write_text(json.dumps(complete(before)))
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    FileSystemWriter.write_data = write


def resident(key):
    """Bytes of memory of this process: VmRSS now, VmHWM at its fullest."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def measured(peaks, fill, *arguments, **more):
    """Call `fill`, and note by how many bytes the memory of this process grew at its fullest meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    before = resident("VmRSS")
    found = fill(*arguments, **more)
    peaks.append(resident("VmHWM") - before)
    return found


def rank(folder):
    """One rank: train each variant, and have rank 0 write found-<number>.json."""
    warnings.simplefilter("ignore")
    use_accelerate_config(folder / "accelerate.yaml")
    import torch
    from accelerate.state import AcceleratorState

    from kit.train import patches

    patches.shard_cpu_processes()
    patches.load_checkpoints_with_own_reader()
    for number, variant in enumerate(json.loads((folder / "variants.json").read_text())):
        AcceleratorState._reset_state()
        found = train(folder, variant)
        if os.environ["RANK"] == "0":
            (folder / f"found-{number}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def train(folder, variant):
    """What all ranks found in one training."""
    from accelerate.utils import gather_object
    from transformers import AutoTokenizer

    from kit.checkpoints import sharded
    from kit.config import models
    from kit.config.recipe import Recipe
    from kit.train import load, packed, shards, trainer

    recipe, resume = Recipe.load(folder / "recipe.toml"), variant.get("resume")
    arguments = trainer.settings(folder, recipe, variant.get("steps", STEPS))
    said, reads = [], []

    def counted(cuts):
        before = bytes_read()
        sharded.read_into(cuts)
        reads.append(bytes_read() - before)

    shards.read_into = packed.read_into = counted
    if variant.get("dies_at") and os.environ["RANK"] == "1":
        saves = [folder / "checkpoints" / f"checkpoint-{variant['dies_at'] - before}" for before in (0, 2)]
        die_after_writing(*saves)
    packed.READ_AT_ONCE = variant.get("read_at_once", packed.READ_AT_ONCE)
    peaks = []
    if variant.get("whole"):
        base, loaded = load.load_base(recipe), shards.Load()
    else:
        base, loaded = load.prepare_base(recipe, resume, said.append)
        base.fill = functools.partial(measured, peaks, base.fill)
    tokenizer = AutoTokenizer.from_pretrained(models.source(recipe.model.name))
    training = trainer.build_trainer(recipe, arguments, packed_rows(STEPS * recipe.batch), None, tokenizer, base)
    training.add_callback(load.LogLoad(training, loaded))
    training.train(resume_from_checkpoint=resume)
    if training.background:
        training.background.close()
    rows = [row for row in training.state.log_history if "loss" in row]
    parameters = list(training.model.parameters())
    return {
        "losses": [row["loss"] for row in rows],
        "norms": [row["grad_norm"] for row in rows],
        "sum": sum(parameter.full_tensor().double().sum().item() for parameter in parameters),
        "load": loaded.row(),
        "bytes": gather_object([sum(reads)]),
        "digest": gather_object([digest(training.model)]),
        "elements": gather_object([sum(parameter.to_local().numel() for parameter in parameters)]),
        "peaks": gather_object(peaks),
        "said": said,
        "placements": str(parameters[0].placements),
    }


if __name__ == "__main__":
    rank(Path(sys.argv[1]))
