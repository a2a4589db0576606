"""The base read into the shards of FSDP2: the same training as from a whole copy, and each byte read once."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import Transpose, WeightConverter

from kit.checkpoints.saved_by import SavedBy
from kit.checkpoints.weights import read_headers
from kit.errors import InputError
from kit.train import load, patches
from kit.watch.metrics import Metrics
from tests.train.strategies import STEPS, base_model, train_ranks

LORA = {"tuning.method": "lora", "tuning.target_modules": ["q_proj", "v_proj"], "tuning.r": 2}
FULL = {"tuning.method": "full"}
COMMON = {
    "schedule.lr": 1e-2, "schedule.save_every": 0, "schedule.max_steps": STEPS, "model.attention": "sdpa",
    "parallel.activation_checkpointing": False,
}  # fmt: skip


@pytest.fixture
def job(recipe, tiny):
    """A recipe of so many ranks on a small base of this kind."""

    def make(kind, ranks, **changes):
        model = {"model.name": str(base_model(kind, tiny)), "parallel.gpus_per_node": ranks}
        return recipe.override(**COMMON | model | changes)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "changes"),
    [
        ("llama", 2, FULL | {"parallel.activation_checkpointing": True}),
        ("tied", 2, FULL),
        ("tied", 4, LORA),  # a matrix of two rows on four ranks
        ("bf16", 2, LORA | {"parallel.activation_checkpointing": True}),
        ("mixtral", 2, LORA),
        ("qwen3_moe", 4, FULL),  # six experts on four ranks
    ],
)
def test_training_is_the_same_as_from_a_whole_copy_and_each_byte_is_read_once(job, tmp_path, kind, ranks, changes):
    recipe = job(kind, ranks, **changes)
    whole, sharded = train_ranks(recipe, tmp_path / "run", {"whole": True}, {})
    assert len(sharded["losses"]) == STEPS and len(set(sharded["losses"])) > 1
    for key in ("losses", "norms", "sum", "elements"):
        assert sharded[key] == whole[key]
    stored = read_headers(base_model(kind, None)).bytes
    assert sharded["load"]["base_load_gb"] == pytest.approx(stored / 1e9, rel=1e-6)
    assert sum(sharded["bytes"]) == pytest.approx(stored, rel=1e-3)  # as the kernel counts them
    assert max(sharded["bytes"]) < stored / ranks * 1.4  # six experts on four ranks are two, two, two and none
    assert sharded["said"] == []


HYBRID = {"parallel.nodes": 2, "parallel.sharding": "hybrid"}  # two replicas of two ranks


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "changes"), [("mixtral", LORA), ("tied", FULL)])
def test_hybrid_sharding_trains_and_resumes_as_full_sharding_does(job, tmp_path, kind, changes):
    full = job(kind, 4, **changes)
    hybrid = job(kind, 2, **changes | HYBRID | {"schedule.save_every": 3})
    resume = {"resume": str(tmp_path / "hybrid" / "checkpoints" / "checkpoint-3")}
    (expected,) = train_ranks(full, tmp_path / "full", {})
    whole, sharded, resumed = train_ranks(hybrid, tmp_path / "hybrid", {"whole": True}, {}, resume)
    assert sharded["placements"] == "(Replicate(), Shard(dim=0))"
    assert sharded["elements"] == whole["elements"]
    for key, tolerance in (("losses", 1e-5), ("norms", 3e-4)):  # Adam magnifies rounding; 2.1e-5 was measured
        assert sharded[key] == whole[key] == resumed[key]
        assert sharded[key] == pytest.approx(expected[key], rel=tolerance)
    stored = read_headers(base_model(kind, None)).bytes
    assert sum(sharded["bytes"]) == pytest.approx(stored, rel=1e-3)
    assert max(sharded["bytes"]) < 0.4 * stored  # each replica reads a half of the rows that both hold


@pytest.mark.slow
def test_a_resumed_full_fine_tune_reads_no_base_and_trains_on_as_if_it_had_not_stopped(job, tmp_path):
    recipe = job("tied", 2, **FULL | {"schedule.save_every": 3})
    resume = {"resume": str(tmp_path / "run" / "checkpoints" / "checkpoint-3")}
    first, resumed = train_ranks(recipe, tmp_path / "run", {}, resume)
    assert resumed["losses"] == first["losses"]
    assert resumed["sum"] == first["sum"]
    assert resumed["bytes"] == [0, 0] and "base_load_gb" not in resumed["load"]


@pytest.mark.slow
@pytest.mark.parametrize(("saves", "resumes", "changes"), [(2, 4, FULL), (4, 2, LORA)])
def test_training_goes_on_from_a_checkpoint_of_another_number_of_ranks(job, tmp_path, saves, resumes, changes):
    rows = 8
    saved, other = (
        job("llama", ranks, **changes | {"schedule.micro_batch": rows // ranks, "schedule.save_every": 3})
        for ranks in (saves, resumes)
    )
    (first,) = train_ranks(saved, tmp_path / "saved", {})
    checkpoint = tmp_path / "saved" / "checkpoints" / "checkpoint-3"
    assert SavedBy.read(checkpoint) == SavedBy(saves, rows, reshards=True)
    (resumed,) = train_ranks(other, tmp_path / "other", {"resume": str(checkpoint)})
    assert resumed["losses"] == pytest.approx(first["losses"], rel=1e-6)
    assert resumed["sum"] == pytest.approx(first["sum"], rel=1e-5)


@pytest.mark.slow
def test_a_run_logs_how_fast_its_base_was_read(finished_run):
    gigabytes = read_headers(Path(finished_run.recipe.model.name)).bytes / 1e9
    assert f"base read into the shards: {gigabytes:.2f} GB in " in finished_run.log.read_text()
    metrics = Metrics(finished_run.path)
    while metrics.poll():
        pass
    assert metrics.last("train/base_load_gb") == pytest.approx(gigabytes, rel=1e-6)
    assert metrics.last("train/base_load_gb_s") == pytest.approx(
        gigabytes / metrics.last("train/base_load_s"), rel=1e-3
    )


@pytest.fixture
def copied(job, tmp_path):
    """A recipe on a copy of a base, and the copy's folder."""

    def make(kind="llama", **changes):
        recipe = job(kind, 2, **changes)
        folder = shutil.copytree(recipe.model.name, tmp_path / "base")
        return recipe.override(**{"model.name": str(folder)}), folder

    return make


def change_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def drop_tensor(folder, name):
    index = folder / "model.safetensors.index.json"
    shard = folder / json.loads(index.read_text())["weight_map"][name]
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard)
    change_json(index, lambda content: content["weight_map"].pop(name))


def test_a_truncated_shard_is_refused_before_training_with_its_name(copied):
    recipe, folder = copied()
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(InputError, match=rf"{shard.name} is truncated"):
        load.open_base(recipe)


def test_a_tensor_that_no_file_holds_is_refused_with_its_name(copied):
    recipe, folder = copied()
    drop_tensor(folder, "model.norm.weight")
    with pytest.raises(InputError, match=r"lacks 1 of the 21 tensors of the model .* such as model\.norm\.weight"):
        load.open_base(recipe)


def test_a_tensor_that_the_index_does_not_name_is_refused_with_its_name(copied):
    recipe, folder = copied()
    index = folder / "model.safetensors.index.json"
    change_json(index, lambda content: content["weight_map"].pop("model.norm.weight"))
    with pytest.raises(InputError, match=r"index\.json does not name all tensors .*: model\.norm\.weight"):
        load.open_base(recipe)


@pytest.mark.parametrize(
    ("kind", "key", "words"),
    [
        ("llama", "intermediate_size", r"layers\.0\.mlp\.\w+\.weight has the shape \[.*48.*\], .* wants .*56"),
        ("mixtral", "intermediate_size", r"experts\.0\.w.\.weight has the shape"),
        (
            "mixtral",
            "num_local_experts",
            r"gate\.weight has the shape \[6, 32\], and the model wants \S+ of \[14, 32\]",
        ),
        ("llama", "num_hidden_layers", r"lacks 108 of the .* such as model\.layers\.2\."),
    ],
)
def test_files_of_another_model_than_config_json_describes_are_refused(copied, kind, key, words):
    recipe, folder = copied(kind)
    change_json(folder / "config.json", lambda content: content.update({key: content[key] + 8 + 4 * ("layers" in key)}))
    with pytest.raises(InputError, match=words):
        load.open_base(recipe)


def test_tensors_that_the_model_does_not_have_are_counted(copied):
    recipe, folder = copied()
    change_json(folder / "config.json", lambda content: content.update(num_hidden_layers=1))
    base, reason = load.open_base(recipe)
    assert reason == ""
    assert base.unused.startswith("9 tensors of the files are not in the model, such as model.layers.1.")


def test_a_base_that_has_to_be_read_as_a_whole_is_with_the_reason(copied, monkeypatch):
    recipe, folder = copied("tied")
    assert "random weights" in load.why_not_sharded(recipe.override(**{"model.name": str(folder / "config.json")}))
    assert "fsdp1" in load.why_not_sharded(recipe.override(**{"parallel.strategy": "fsdp1"}))
    assert "model.base fp8" in load.why_not_sharded(recipe.override(**{"model.base": "fp8"}))
    monkeypatch.setattr(patches, "applies", lambda requirement: False)
    assert "not one of" in load.why_not_sharded(recipe)
    monkeypatch.undo()
    shard = next(folder.glob("*00001-of*.safetensors"))
    tensors = load_file(shard)
    save_file(tensors | {"lm_head.weight": torch.zeros(1)}, shard)
    change_json(
        folder / "model.safetensors.index.json",
        lambda index: index["weight_map"].update({"lm_head.weight": shard.name}),
    )
    said = []
    assert load.open_base(recipe)[1].startswith("its files hold both of ")
    every = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    del every["lm_head.weight"]
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    torch.save(every, folder / "pytorch_model.bin")
    base, loaded = load.prepare_base(recipe, None, said.append)
    assert said == [f"the base is not read into the shards: {folder} has no safetensors files"]
    assert loaded.row().keys() == {"base_load_s"} and loaded.seconds > 0
    assert not hasattr(base, "weights")


def test_a_conversion_that_the_kit_does_not_do_leaves_the_base_to_transformers(copied, monkeypatch):
    recipe, _ = copied()
    entry = WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", [Transpose(0, 1)])
    monkeypatch.setattr("kit.train.sources.get_model_conversion_mapping", lambda model: [entry])
    words = "transformers makes model.layers.0.mlp.up_proj.weight from the stored tensors by Transpose"
    assert load.open_base(recipe) == (None, words)


def test_the_empty_base_takes_no_memory_and_has_real_buffers(copied):
    recipe, _ = copied()
    base, _ = load.open_base(recipe)
    for parameter in base.model.parameters():
        assert parameter.untyped_storage().nbytes() == 4
    whole = dict(load.load_base(recipe).named_buffers())
    assert whole.keys() == dict(base.model.named_buffers()).keys()
    assert all(torch.equal(buffer, whole[name]) for name, buffer in base.model.named_buffers())


def test_a_base_without_some_of_its_tensors_is_named_where_one_process_reads_it_all(copied):
    recipe, folder = copied()
    name, lost = "model.layers.1.mlp.up_proj.weight", None
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        lost = tensors.pop(name, lost)
        save_file(tensors, file, {"format": "pt"})
    change_json(folder / "model.safetensors.index.json", lambda index: index["weight_map"].pop(name))
    assert lost is not None
    with pytest.raises(InputError, match=rf"lacks 1 of the tensors that .* describes, such as {name}: copy"):
        load.load_base(recipe)
