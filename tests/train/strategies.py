"""Training on several CPU ranks by the kit's own parts, for tests that compare strategies; also the ranks' script."""

import json
import os
import sys
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


def base_model(kind, tokenizer):
    """The folder of a small model of random weights: llama, tied, bf16 (in files), mixtral or qwen3_moe."""

    def build(folder):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(0)
        family = kind if kind in ("mixtral", "qwen3_moe") else "llama"
        sizes = SIZES | (EXPERTS if family != "llama" else {}) | {"tie_word_embeddings": kind == "tied"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        if kind == "bf16":
            model = model.to(torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="2MB")
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)

    return shared.once(f"base-{kind}", build)


def train_ranks(recipe, folder, *variants):
    """Train for STEPS steps on recipe.world_size ranks, once for each variant; what the ranks found, for each.

    A variant may have whole=True, which loads the base as a whole, steps, and resume, a checkpoint.
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


def bytes_read():
    """Bytes that this process has read from files and other descriptors."""
    return int(Path("/proc/self/io").read_text().split()[1])


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

    from kit.config import models
    from kit.config.recipe import Recipe
    from kit.train import load, shards, trainer

    recipe, resume = Recipe.load(folder / "recipe.toml"), variant.get("resume")
    arguments = trainer.settings(folder, recipe, STEPS)
    said, reads = [], []

    def counted(cuts, read_into=shards.read_into):
        before = bytes_read()
        read_into(cuts)
        reads.append(bytes_read() - before)

    shards.read_into, kept = counted, shards.read_into
    if variant.get("whole"):
        base, loaded = load.load_base(recipe), shards.Load()
    else:
        base, loaded = load.prepare_base(recipe, resume is not None, said.append)
    tokenizer = AutoTokenizer.from_pretrained(models.source(recipe.model.name))
    training = trainer.build_trainer(recipe, arguments, packed_rows(STEPS * recipe.batch), None, tokenizer, base)
    training.add_callback(load.LogLoad(training, loaded))
    training.train(resume_from_checkpoint=resume)
    if training.background:
        training.background.close()
    shards.read_into = kept
    rows = [row for row in training.state.log_history if "loss" in row]
    parameters = list(training.model.parameters())
    return {
        "losses": [row["loss"] for row in rows],
        "norms": [row["grad_norm"] for row in rows],
        "sum": sum(parameter.full_tensor().double().sum().item() for parameter in parameters),
        "load": loaded.row(),
        "bytes": gather_object([sum(reads)]),
        "elements": gather_object([sum(parameter.to_local().numel() for parameter in parameters)]),
        "said": said,
        "placements": str(parameters[0].placements),
    }


if __name__ == "__main__":
    rank(Path(sys.argv[1]))
