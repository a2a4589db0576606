"""The exported adapter and the merged model against the model that was really trained, on two FSDP2 processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kit import adapter, checkpoint, weights
from kit.errors import InputError, KitError
from tests.test_checkpoint import REPOSITORY, TOKENS, fsdp2_saves, make_base

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft 0.20 itself

# Sharded and unsharded forwards sum in the same order, so the exported adapter is held to fp32 rounding only; merging
# adds B A to W before the product instead of after it, which costs a few roundings of logits near 1.
EXPORTED, MERGED = 1e-6, 1e-5


def saved(variant: str) -> Path:
    return fsdp2_saves() / variant / "checkpoint-2"


def logits(model):
    import torch

    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor(TOKENS)).logits


def trained_logits(variant: str):
    import torch

    return torch.load(fsdp2_saves() / variant / "logits.pt", weights_only=True)


def base_model(folder: Path):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def copy(variant: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved(variant), tmp_path / "checkpoint-2"))


@pytest.mark.parametrize("variant", ["adapter", "uneven", "full", "norm", "full-norm"])
def test_the_exported_adapter_gives_the_logits_of_the_trained_model(variant, tmp_path):
    from peft import PeftModel

    out = adapter.export(saved(variant), tmp_path / "adapter")
    assert sorted(p.name for p in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert (out / "adapter_model.safetensors").stat().st_mode & 0o777 == 0o666 & ~current_umask()
    base = base_model(fsdp2_saves() / "base")
    untouched = logits(base)
    difference = (logits(PeftModel.from_pretrained(base, out)) - trained_logits(variant)).abs().max()
    assert difference <= EXPORTED
    assert (untouched - trained_logits(variant)).abs().max() > 0.01  # so that the equality says something


@pytest.mark.parametrize("variant", ["adapter", "uneven", "full-norm"])
def test_the_merged_model_gives_the_logits_of_the_trained_model(variant, tmp_path):
    exported = adapter.export(saved(variant), tmp_path / "adapter")
    merged = adapter.merge(exported, fsdp2_saves() / "base", tmp_path / "merged", shard_gb=1e-4)
    assert len(list(merged.glob("model-*.safetensors"))) > 2
    assert (logits(base_model(merged)) - trained_logits(variant)).abs().max() <= MERGED


def test_a_sharded_base_is_merged_like_a_single_file(tmp_path):
    import torch

    exported = adapter.export(saved("adapter"), tmp_path / "adapter")
    base_model(fsdp2_saves() / "base").save_pretrained(tmp_path / "base", max_shard_size="100KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    one, two = (
        weights.weights(adapter.merge(exported, base, tmp_path / name))
        for base, name in ((fsdp2_saves() / "base", "one"), (tmp_path / "base", "two"))
    )
    first, second = dict(weights.read(one, one.tensors)), dict(weights.read(two, two.tensors))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_merged_bfloat16_base_stays_bfloat16_and_rounds_once(tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    base = make_base(tmp_path / "base")
    model = base_model(base).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16")
    config = LoraConfig(target_modules=["q_proj"], r=4, lora_alpha=8, rank_pattern={"layers.1.self_attn.q_proj": 2},
                        alpha_pattern={"layers.1.self_attn.q_proj": 6}, init_lora_weights=False)  # fmt: skip
    peft = get_peft_model(model, config)
    peft.save_pretrained(tmp_path / "adapter")
    merged = adapter.merge(tmp_path / "adapter", tmp_path / "bf16", tmp_path / "merged")
    assert sorted(p.name for p in merged.glob("*.safetensors")) == ["model.safetensors"]
    found = dict(weights.read(held := weights.weights(merged), held.tensors))
    for number, scaling in ((0, 8 / 4), (1, 6 / 2)):
        layer = peft.base_model.model.model.layers[number].self_attn.q_proj
        a, b = layer.lora_A.default.weight.float(), layer.lora_B.default.weight.float()
        expected = (layer.base_layer.weight.float() + scaling * (b @ a)).to(torch.bfloat16)
        assert torch.equal(found[f"model.layers.{number}.self_attn.q_proj.weight"], expected)


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_an_adapter_that_peft_wrote_is_exported_under_the_same_checks(tmp_path):
    folder = tmp_path / "checkpoint-2"
    adapter.export(saved("adapter"), folder)
    out = adapter.export(folder, tmp_path / "out")
    assert (out / "adapter_model.safetensors").read_bytes() == (folder / "adapter_model.safetensors").read_bytes()


def test_a_run_folder_means_its_newest_complete_checkpoint(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    shutil.copytree(saved("adapter"), tmp_path / "checkpoints" / "checkpoint-2")
    newer = Path(shutil.copytree(saved("uneven"), tmp_path / "checkpoints" / "checkpoint-10"))
    (newer / "trainer_state.json").unlink()
    out = adapter.export(tmp_path, tmp_path / "out")
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 4
    shutil.rmtree(tmp_path / "checkpoints" / "checkpoint-2")
    with pytest.raises(KitError, match="no complete checkpoint"):
        adapter.export(tmp_path, tmp_path / "second")


def refused(tmp_path: Path, source: Path, words: str) -> None:
    with pytest.raises(KitError, match=words):
        adapter.export(source, tmp_path / "refused")
    assert not [p for p in tmp_path.iterdir() if "refused" in p.name]


def save_dcp(folder: Path, state: dict) -> None:
    import warnings

    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that one process is one process
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)


def altered(tmp_path: Path, variant: str, change) -> Path:
    """A copy of a checkpoint whose tensors went through change(dict) and were saved again by one process."""
    folder = copy(variant, tmp_path)
    part = folder / "pytorch_model_fsdp_0"
    tensors = dict(weights.read(held := weights.weights(folder), held.tensors))
    change(tensors)
    shutil.rmtree(part)
    save_dcp(part, tensors)
    return folder


def without_base(folder: Path) -> None:
    """As if the base model were not on this machine."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "nobody/nothing"}))


@pytest.mark.parametrize("base_is_here", [True, False])
def test_a_missing_tensor_is_refused_and_nothing_is_left(tmp_path, base_is_here):
    def lose_one(tensors):
        del tensors["model.base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"]

    folder = altered(tmp_path, "adapter", lose_one)
    if not base_is_here:
        without_base(folder)
    refused(tmp_path, folder, r"15 adapter tensors, 16 were expected .* 1 missing, such as .*v_proj.lora_B.weight")


def test_a_target_that_is_absent_is_refused_without_the_base(tmp_path):
    def lose_v(tensors):
        for name in [n for n in tensors if "v_proj" in n]:
            del tensors[name]

    folder = altered(tmp_path, "adapter", lose_v)
    without_base(folder)
    refused(tmp_path, folder, "missing, such as v_proj")


def test_a_checkpoint_without_its_base_at_hand_is_exported_all_the_same(tmp_path):
    folder = copy("adapter", tmp_path)
    without_base(folder)
    assert adapter.export(folder, tmp_path / "out").is_dir()


def test_values_that_are_not_finite_are_refused(tmp_path):
    def spoil(tensors):
        next(iter(tensors.values()))[0, 0] = float("nan")

    refused(tmp_path, altered(tmp_path, "adapter", spoil), "1 tensors hold NaN or infinity")


def test_an_untrained_adapter_is_told(tmp_path):
    def reset(tensors):
        for name in tensors:
            if "lora_B" in name:
                tensors[name].zero_()

    folder = altered(tmp_path, "adapter", reset)
    with pytest.warns(UserWarning, match="untrained"):
        out = adapter.export(folder, tmp_path / "out")
    assert checkpoint.inspect(out, values=True).problems == (checkpoint.UNTRAINED,)


def test_names_that_collide_are_refused(tmp_path):
    def twice(tensors):
        name = next(iter(tensors))
        tensors[name.replace("base_model", "_fsdp_wrapped_module.base_model", 1)] = tensors[name]

    refused(tmp_path, altered(tmp_path, "adapter", twice), "two tensors would both be named")


def test_another_adapter_beside_default_is_refused(tmp_path):
    def second(tensors):
        for name in [n for n in tensors if ".default." in n]:
            tensors[name.replace(".default.", ".other.")] = tensors[name]

    refused(tmp_path, altered(tmp_path, "full", second), "only 'default'")


def test_a_checkpoint_of_a_full_fine_tune_is_no_adapter(tmp_path):
    def strip(tensors):
        for name in [n for n in tensors if "lora_" in n]:
            del tensors[name]

    refused(tmp_path, altered(tmp_path, "full", strip), "no LoRA tensors")


def test_a_cut_shard_and_an_empty_save_are_refused(tmp_path):
    folder = copy("adapter", tmp_path)
    shard = folder / "pytorch_model_fsdp_0" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:1000])
    refused(tmp_path, folder, "is cut off: 1000 of at least")
    shutil.rmtree(folder / "pytorch_model_fsdp_0")
    save_dcp(folder / "pytorch_model_fsdp_0", {})
    refused(tmp_path, folder, "is empty|no LoRA tensors")


def test_an_existing_folder_is_left_as_it_is(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(InputError, match="exists already"):
        adapter.export(saved("adapter"), out)
    assert [p.name for p in out.iterdir()] == ["mine"]


@pytest.mark.parametrize("key", [
    "model.base_model.model.model.layers.0.q_proj.lora_A.weight",
    "model.base_model.model.model.layers.0.q_proj.lora_A.default.weight",
    "_fsdp_wrapped_module.base_model.model.model.layers.0._checkpoint_wrapped_module.q_proj.lora_A.default.weight",
    "model._orig_mod.base_model.model.model.layers.0._fsdp_wrapped_module.q_proj.lora_A.default.weight",
])  # fmt: skip
def test_wrappers_and_the_adapters_name_go_from_names(key):
    assert adapter.peft_name(key) == "base_model.model.model.layers.0.q_proj.lora_A.weight"


def test_export_reads_only_the_adapters_bytes_beside_a_large_base(tmp_path):
    import torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    stem = "model.base_model.model.model.layers.{}.self_attn.q_proj"
    state = {"model.base_model.model.model.embed_tokens.weight": torch.ones(16_000, 1024)}  # 65 MB
    for number in range(2):
        state[stem.format(number) + ".base_layer.weight"] = torch.ones(1024, 1024)
        state[stem.format(number) + ".lora_A.default.weight"] = torch.ones(64, 1024)
        state[stem.format(number) + ".lora_B.default.weight"] = torch.ones(1024, 64)
    folder = tmp_path / "checkpoint-1"
    save_dcp(folder / "pytorch_model_fsdp_0", state)
    config = {"peft_type": "LORA", "r": 64, "target_modules": ["q_proj"], "base_model_name_or_path": "nobody/nothing"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    metadata = weights.dcp_metadata(folder / "pytorch_model_fsdp_0")
    wanted = sum(
        t.size.numel() * 4
        for n, t in metadata.state_dict_metadata.items()
        if isinstance(t, TensorStorageMetadata) and "lora_" in n
    )
    # A fresh process whose imports are done by a first export, so that only the second one's reads are counted.
    code = (
        "import sys; from pathlib import Path; from kit import adapter, pagecache\n"
        "adapter.export(Path(sys.argv[1]), Path(sys.argv[2] + '/first')); before = pagecache.read_bytes()\n"
        "adapter.export(Path(sys.argv[1]), Path(sys.argv[2] + '/second')); print(pagecache.read_bytes() - before)"
    )
    command = [sys.executable, "-c", code, str(folder), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    read = int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert wanted <= read <= 1.05 * wanted


@pytest.mark.parametrize(("setting", "words"), [
    ({"use_dora": True}, "use_dora"), ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"init_lora_weights": "pissa_niter_4"}, "pissa"), ({"peft_type": "IA3"}, "IA3"),
])  # fmt: skip
def test_what_is_no_plain_sum_is_not_merged(tmp_path, setting, words):
    exported = adapter.export(saved("adapter"), tmp_path / "adapter")
    path = exported / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | setting))
    with pytest.raises(KitError, match=words):
        adapter.merge(exported, fsdp2_saves() / "base", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(("shape", "words"), [({"hidden_size": 32}, "shape"), ({"num_hidden_layers": 1}, "no tensor")])
def test_another_base_is_refused(tmp_path, shape, words):
    exported = adapter.export(saved("adapter"), tmp_path / "adapter")
    with pytest.raises(KitError, match=words):
        adapter.merge(exported, make_base(tmp_path / "base", **shape), tmp_path / "merged")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base"]


def test_push_says_what_to_set(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(KitError, match="a repository"):
        adapter.push(tmp_path, "")
    with pytest.raises(KitError, match="HF_TOKEN"):
        adapter.push(tmp_path, "me/mine")
