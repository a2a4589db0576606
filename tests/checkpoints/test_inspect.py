"""Real two-process FSDP2 saves, in the layouts that accelerate writes, and what inspect says of them."""

import json
import math
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kit.checkpoints import inspect as checkpoint
from kit.checkpoints import plan, weights
from kit.checkpoints.formats.base import ProblemKind, join_messages
from kit.cli import main
from kit.errors import InputError, KitError
from kit.show import format_duration
from tests import shared
from tests.ranks import TRAINING, run_ranks
from tests.train import forked

REPOSITORY = Path(__file__).resolve().parents[2]
TOKENS = [[5, 17, 99, 3, 64, 28, 7, 110]]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


def make_base(folder: Path, seed: int = 0, **shape: object) -> Path:
    """A tiny Llama with random weights, as a model folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**(SHAPE | shape))).save_pretrained(folder)
    return folder


def train_and_save(base: Path, out: Path, variants: dict[str, tuple[bool, dict[str, object]]]) -> None:
    """One rank's part: for each variant, one AdamW step under FSDP2, then accelerate's own save; logits kept."""
    import torch
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaForCausalLM

    state = PartialState(cpu=True)  # all that the save functions ask of an accelerator
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    tokens = torch.tensor(TOKENS)
    for name, (adapter_only, lora) in variants.items():
        torch.manual_seed(1)
        config = LoraConfig(task_type="CAUSAL_LM", **({"target_modules": TARGETS, "lora_alpha": 16} | lora))
        model = get_peft_model(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), config)
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            logits = model(input_ids=tokens).logits
        folder = out / name / "checkpoint-2"
        save_fsdp_model(plugin, state, model, str(folder), adapter_only=adapter_only)
        save_fsdp_optimizer(plugin, state, optimizer, model, str(folder))
        if state.is_main_process:
            config.save_pretrained(folder)
            (folder / "trainer_state.json").write_text('{"global_step": 2}')
            torch.save(logits, out / name / "logits.pt")
    state.destroy_process_group()


VARIANTS = {
    "adapter": (True, {"r": 4}),
    "uneven": (True, {"r": 3}),
    "full": (False, {"r": 4}),
    "norm": (True, {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
    "full-norm": (False, {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["norm"], "use_rslora": True}),
}


def fsdp2_saves() -> Path:
    """base/ and <variant>/checkpoint-2/ of every variant, saved by two gloo processes; made once a session."""
    return shared.once("fsdp2-saves", make_fsdp2_saves)


def make_fsdp2_saves(root: Path) -> None:
    make_base(root / "base")
    run_ranks(2, __file__, root, imports=TRAINING)


def copy(variant: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(fsdp2_saves() / variant / "checkpoint-2", tmp_path / "checkpoint-2"))


def problems(path: Path, **options: int) -> str:
    return join_messages(checkpoint.inspect(path, **options).problems)


@pytest.mark.parametrize(("variant", "tensors", "lora"), [("adapter", 16, 16), ("uneven", 16, 16), ("full", 37, 16)])
def test_a_complete_checkpoint_of_two_ranks_has_no_problems(variant, tensors, lora):
    # 2 layers x 4 modules x (A, B) = 16; the base: embedding, head, final norm, 2 x (7 linear + 2 norms) = 21 more.
    folder = fsdp2_saves() / variant / "checkpoint-2"
    found = checkpoint.inspect(folder, values=True)
    assert (found.format, found.tensors, found.lora_tensors, found.ranks) == ("dcp", tensors, lora, 2)
    assert found.dtypes == {"float32": tensors}
    assert found.problems == ()
    assert checkpoint.complete(folder)


def test_bytes_counts_the_bytes_of_the_tensors():
    # per layer 3 x (64 in + 64, 32, 32, 64 out): q 128, k 96, v 96, o 128 rows and columns, r = 3, fp32, 2 layers
    found = checkpoint.inspect(fsdp2_saves() / "uneven" / "checkpoint-2")
    assert found.bytes == 2 * 3 * (128 + 96 + 96 + 128) * 4


def test_the_json_keys_are_those_of_the_contract(tmp_path):
    value = json.loads(json.dumps(checkpoint.inspect(fsdp2_saves() / "adapter" / "checkpoint-2").as_dict()))
    assert {"format", "tensors", "bytes", "ranks", "lora_tensors", "dtypes", "problems"} <= set(value)


def test_values_read_from_uneven_shards_equal_those_that_dcp_loads():
    import warnings

    import torch
    import torch.distributed.checkpoint as dcp

    for variant in ("uneven", "full"):
        held = weights.read_headers(fsdp2_saves() / variant / "checkpoint-2")
        mine = dict(weights.read_tensors(held, held.tensors))
        theirs = {name: torch.full_like(tensor, math.nan) for name, tensor in mine.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that one process is one process
            dcp.load(theirs, checkpoint_id=str(held.files[0].parent), no_dist=True)
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_an_empty_dcp_save_is_a_problem_and_never_complete(tmp_path):
    import warnings

    import torch.distributed.checkpoint as dcp

    folder = copy("adapter", tmp_path)
    part = folder / "pytorch_model_fsdp_0"
    shutil.rmtree(part)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({}, checkpoint_id=str(part), no_dist=True)
    (part / "__0_0.distcp").touch()
    (part / "__1_0.distcp").touch()
    found = checkpoint.inspect(folder)
    assert found.tensors == 0
    assert "0 tensors" in problems(folder)
    assert "__1_0.distcp is empty" in problems(folder)
    assert not checkpoint.complete(folder)


@pytest.mark.parametrize("part", ["pytorch_model_fsdp_0", "optimizer_0"])
@pytest.mark.parametrize(("harm", "words"), [
    (lambda shard: os.truncate(shard, shard.stat().st_size - 1), "is truncated"),
    (lambda shard: os.truncate(shard, 0), "is empty"),
    (lambda shard: shard.unlink(), "does not exist, but .metadata names it"),
    (lambda shard: shard.with_name(".metadata").unlink(), "has no .metadata"),
    (lambda shard: os.truncate(shard.with_name(".metadata"), 500), "is damaged"),
])  # fmt: skip
def test_a_damaged_shard_is_a_problem_and_never_complete(tmp_path, part, harm, words):
    folder = copy("adapter", tmp_path)
    harm(folder / part / "__1_0.distcp")
    assert words in problems(folder)
    assert not checkpoint.complete(folder)


def test_a_save_that_did_not_finish_is_never_complete(tmp_path):
    folder = copy("adapter", tmp_path)
    (folder / "trainer_state.json").unlink()
    assert "the save did not finish" in problems(folder)
    assert not checkpoint.complete(folder)
    assert not checkpoint.complete(tmp_path)


def test_an_empty_file_next_to_the_weights_is_a_problem(tmp_path):
    folder = copy("adapter", tmp_path)
    (folder / "scheduler.pt").touch()
    assert "scheduler.pt is empty" in problems(folder)


@pytest.mark.parametrize("content", [{}, {"version": 1}, "text", None, 7])
def test_foreign_metadata_is_a_problem(tmp_path, content):
    folder = copy("adapter", tmp_path)
    (folder / "pytorch_model_fsdp_0" / ".metadata").write_bytes(pickle.dumps(content))
    assert "is damaged or not the metadata of a checkpoint" in problems(folder)
    assert not checkpoint.complete(folder)


def test_a_checkpoint_without_its_optimizer_is_never_complete(tmp_path):
    folder = copy("adapter", tmp_path)
    shutil.rmtree(folder / "optimizer_0")
    assert "has no optimizer state; resumed training would restart its moments from zero" in problems(folder)
    assert not checkpoint.complete(folder)


def test_a_truncated_state_file_is_a_problem(tmp_path):
    import torch

    folder = copy("adapter", tmp_path)
    torch.save({"last_epoch": 2}, folder / "scheduler.pt")
    assert problems(folder) == ""
    os.truncate(folder / "scheduler.pt", 200)
    assert "scheduler.pt is truncated or not a file of torch.save" in problems(folder)
    assert not checkpoint.complete(folder)


def test_a_missing_random_state_of_a_rank_is_a_problem(tmp_path):
    import torch

    folder = copy("adapter", tmp_path)
    torch.save({}, folder / "rng_state_0.pth")
    assert checkpoint.complete(folder) and not checkpoint.complete(folder, world=2)
    assert "holds the random state of 1 of 2 ranks" in problems(folder, world=2)
    torch.save({}, folder / "rng_state_1.pth")
    assert checkpoint.complete(folder, world=2)


def test_unreadable_files_are_a_permission_error_not_damage():
    if os.getuid():
        pytest.skip("only root can become another user here")
    with tempfile.TemporaryDirectory() as outer:  # other users may not enter pytest's folders
        Path(outer).chmod(0o755)
        folders = []
        for number, hidden in enumerate(("pytorch_model_fsdp_0/__1_0.distcp", "pytorch_model_fsdp_0/.metadata", ".")):
            (place := Path(outer) / str(number)).mkdir()
            folders.append(copy("adapter", place))
            (folders[-1] / hidden).chmod(0)
        code = (
            "import sys, os, torch.distributed.checkpoint.filesystem; from pathlib import Path\n"
            "from kit import errors; from kit.checkpoints import inspect as checkpoint; os.setuid(65534)\n"
            "for folder in sys.argv[1:]:\n"
            "    for look in (checkpoint.inspect, checkpoint.complete):\n"
            "        try: look(Path(folder))\n"
            "        except errors.KitError as error: print(error.exit_code, str(error).replace('\\n', ' '))\n"
        )
        command = [sys.executable, "-c", code, *map(str, folders)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        said = done.stdout.splitlines()
        assert len(said) == 2 * len(folders), done.stdout + done.stderr
        for number, line in enumerate(said):
            assert line.startswith("1 ") and f"{folders[number // 2]}" in line, line
            assert "You may not read " in line and "it has mode 0000 and belongs to root" in line, line


def test_metadata_that_would_run_code_is_not_run(tmp_path):
    folder = copy("adapter", tmp_path)
    path = folder / "pytorch_model_fsdp_0" / ".metadata"

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    path.write_bytes(pickle.dumps(Hostile()))
    assert "it asks for posix.mkdir" in problems(folder)
    assert not (tmp_path / "ran").exists()


def test_a_file_hidden_from_the_group_is_a_problem_where_the_umask_would_show_it(tmp_path):
    path = make_base(tmp_path / "model") / "model.safetensors"
    path.chmod(0o600)
    mask = os.umask(0o022)
    try:
        assert "mode 0600" in problems(tmp_path / "model")
        os.umask(0o077)
        assert problems(tmp_path / "model") == ""
    finally:
        os.umask(mask)


def test_non_finite_values_are_found_on_demand(tmp_path):
    import torch
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file(
        {"good": torch.ones(3), "bad": torch.tensor([1.0, math.inf]), "whole": torch.ones(2, dtype=torch.int64)}, path
    )
    path.chmod(0o644)
    assert problems(path) == ""
    assert problems(path, values=True) == "1 tensors hold NaN or infinity: bad."


def test_safetensors_headers_are_read_without_torch_and_truncation_is_found(tmp_path):
    folder = make_base(tmp_path / "model")
    path = folder / "model.safetensors"
    code = (
        "import sys; from kit.checkpoints.inspect import inspect; "
        "print(inspect(__import__('pathlib').Path(sys.argv[1])));"
        "sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(folder)]
    assert subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False).returncode == 0
    found = checkpoint.inspect(folder)
    assert (found.format, found.tensors, found.dtypes) == ("safetensors", 20, {"float32": 20})
    os.truncate(path, path.stat().st_size - 1)
    assert "is truncated" in problems(path)
    os.truncate(path, 4)
    assert "without a header" in problems(path)


def test_a_shard_that_the_index_names_and_that_is_absent_is_a_problem(tmp_path):
    from transformers import LlamaForCausalLM

    LlamaForCausalLM.from_pretrained(make_base(tmp_path / "one")).save_pretrained(
        tmp_path / "two", max_shard_size="100KB"
    )
    complete = checkpoint.inspect(tmp_path / "two")
    assert complete.tensors == 20
    shards = sorted((tmp_path / "two").glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    assert f"{shards[1]} does not exist" in problems(tmp_path / "two")


def test_two_models_in_one_folder_are_a_problem(tmp_path):
    folder = make_base(tmp_path / "model")
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    assert "the folder holds two models" in problems(folder)


def test_torch_files_are_described_and_nested_ones_flattened(tmp_path):
    import torch

    torch.save({"model": {"w": torch.zeros(4, 4, dtype=torch.bfloat16)}, "step": 3}, tmp_path / "lit_model.pth")
    found = checkpoint.inspect(tmp_path / "lit_model.pth")
    assert (found.format, found.tensors, found.bytes, found.dtypes) == ("torch", 1, 32, {"bfloat16": 1})
    os.truncate(tmp_path / "lit_model.pth", 100)
    assert "cannot be read by torch.load" in problems(tmp_path / "lit_model.pth")


def test_names_of_compiled_modules_are_a_problem(tmp_path):
    import torch

    torch.save({"layers.0._orig_mod.w": torch.zeros(2), "layers.1.w": torch.zeros(2)}, tmp_path / "model.pth")
    assert checkpoint.inspect(tmp_path / "model.pth").kinds == {ProblemKind.COMPILED_NAMES}
    assert "1 tensors" in problems(tmp_path / "model.pth") and "_orig_mod" in problems(tmp_path / "model.pth")


def test_a_folder_without_weights_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="no weights that kit knows"):
        checkpoint.inspect(tmp_path)


def test_a_shard_that_the_metadata_does_not_name_is_of_another_save(tmp_path):
    folder = copy("adapter", tmp_path)
    part = folder / "pytorch_model_fsdp_0"
    shutil.copy(part / "__1_0.distcp", part / "__2_0.distcp")
    assert "__2_0.distcp is not of the same save as .metadata" in problems(folder)
    assert not checkpoint.complete(folder)


def test_shards_of_another_save_under_the_same_names_are_a_problem(tmp_path):
    folder = copy("adapter", tmp_path)
    other = fsdp2_saves() / "full" / "checkpoint-2" / "pytorch_model_fsdp_0"
    shutil.copy(other / "__1_0.distcp", folder / "pytorch_model_fsdp_0" / "__1_0.distcp")
    assert "__1_0.distcp is not of the same save as .metadata: the folder holds two saves" in problems(folder)
    assert not checkpoint.complete(folder)


def test_metadata_of_another_save_is_a_problem(tmp_path):
    folder = copy("adapter", tmp_path)
    other = fsdp2_saves() / "full" / "checkpoint-2" / "pytorch_model_fsdp_0"
    shutil.copy(other / ".metadata", folder / "pytorch_model_fsdp_0" / ".metadata")
    assert "is truncated" in problems(folder)
    assert not checkpoint.complete(folder)


def test_a_trainer_state_of_another_step_is_a_problem(tmp_path):
    folder = copy("adapter", tmp_path)
    (folder / "trainer_state.json").write_text('{"global_step": 4}')
    assert "trainer_state.json is of step 4: the folder holds two checkpoints" in problems(folder)
    assert not checkpoint.complete(folder)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_state_is_a_problem_and_never_complete(tmp_path, text):
    folder = copy("adapter", tmp_path)
    (folder / "trainer_state.json").write_text(text)
    assert "trainer_state.json" in problems(folder)
    assert not checkpoint.complete(folder)


def test_shards_of_two_models_without_an_index_are_a_problem(tmp_path):
    import torch
    from safetensors.torch import save_file

    for name in ("model-00001-of-00002", "model-00001-of-00003"):
        save_file({name: torch.ones(3)}, tmp_path / f"{name}.safetensors")
    assert "holds 2 shards that are not all shards of one save" in problems(tmp_path)
    (tmp_path / "model-00001-of-00003.safetensors").unlink()
    assert "holds 1 shards that are not all shards of one save" in problems(tmp_path)
    assert "not all shards" not in problems(tmp_path / "model-00001-of-00002.safetensors")


def test_a_torch_file_that_would_run_code_is_not_run(tmp_path):
    import torch

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"w": torch.ones(2), "x": Hostile()}, tmp_path / "pytorch_model.bin")
    assert "cannot be read by torch.load" in problems(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_file_truncated_after_its_header_was_read_is_an_error_not_a_crash(tmp_path):
    path = make_base(tmp_path / "model") / "model.safetensors"
    held = weights.read_headers(path)
    stream = weights.read_tensors(held, held.tensors)
    next(stream)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(KitError, match="was truncated while it was read"):
        dict(stream)


TENSOR = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


def write_safetensors(path: Path, header: object, size: int) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    path.chmod(0o644)
    return path


@pytest.mark.parametrize(("header", "size", "kind"), [
    ([TENSOR], 16, ProblemKind.DAMAGED_FILE),
    ({"a": 7}, 16, ProblemKind.DAMAGED_FILE),
    ({"a": {"dtype": "F32", "shape": [4]}}, 16, ProblemKind.DAMAGED_FILE),
    ({"a": TENSOR | {"data_offsets": [0]}}, 16, ProblemKind.DAMAGED_FILE),
    ({"a": TENSOR | {"data_offsets": ["0", "16"]}}, 16, ProblemKind.DAMAGED_FILE),
    ({"a": TENSOR | {"dtype": 7}}, 16, ProblemKind.DAMAGED_FILE),
    ({"a": TENSOR | {"shape": None}}, 16, ProblemKind.DAMAGED_FILE),
    ({"a": TENSOR, "b": TENSOR | {"data_offsets": [8, 24]}}, 24, ProblemKind.DAMAGED_FILE),  # they overlap
    ({"a": TENSOR, "b": TENSOR | {"data_offsets": [24, 40]}}, 40, ProblemKind.DAMAGED_FILE),  # a gap
    ({"a": TENSOR | {"shape": [5]}}, 16, ProblemKind.DAMAGED_FILE),  # 20 bytes are needed
    ({"a": TENSOR}, 15, ProblemKind.TRUNCATED_FILE),
    ({"a": TENSOR}, 17, ProblemKind.DAMAGED_FILE),
])  # fmt: skip
def test_a_safetensors_file_that_safetensors_refuses_has_one_problem(tmp_path, header, size, kind):
    from safetensors import SafetensorError, safe_open

    path = write_safetensors(tmp_path / "model.safetensors", header, size)
    with pytest.raises(SafetensorError):
        safe_open(path, "pt").__enter__()
    found = checkpoint.inspect(path)
    assert [p.kind for p in found.problems if p.kind is not ProblemKind.NO_TENSORS] == [kind]
    assert str(path) in str(found.problems[0])
    assert not found.tensors


def test_a_sound_safetensors_file_has_no_problems(tmp_path):
    from safetensors import safe_open

    header = {"__metadata__": {"format": "pt"}, "a": TENSOR, "none": TENSOR | {"shape": [0], "data_offsets": [16, 16]}}
    path = write_safetensors(tmp_path / "model.safetensors", header, 16)
    with safe_open(path, "pt") as opened:
        assert set(opened.keys()) == {"a", "none"}
    assert (checkpoint.inspect(path).problems, checkpoint.inspect(path).tensors) == ((), 2)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "__0_0.distcp"])
def test_a_broken_link_is_a_problem(tmp_path, name):
    (tmp_path / name).symlink_to("gone")
    found = checkpoint.inspect(tmp_path)
    assert ProblemKind.MISSING_FILE in found.kinds
    assert "is a symbolic link to gone, which does not exist" in str(found.problems[0])
    assert ProblemKind.MISSING_FILE in checkpoint.inspect(tmp_path / name).kinds


def test_a_broken_link_in_a_checkpoint_makes_it_incomplete(tmp_path):
    folder = copy("adapter", tmp_path)
    (folder / "scheduler.pt").symlink_to("gone")
    assert checkpoint.inspect(folder).kinds == {ProblemKind.MISSING_FILE}
    assert not checkpoint.complete(folder)


@pytest.mark.parametrize("content", [
    {"metadata": {}}, {"weight_map": None}, {"weight_map": {"a": 1}}, [], None, "not JSON"
])  # fmt: skip
def test_an_index_without_a_weight_map_is_a_problem(tmp_path, content):
    text = content if content == "not JSON" else json.dumps(content)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    found = checkpoint.inspect(tmp_path)
    assert found.kinds == {ProblemKind.DAMAGED_FILE, ProblemKind.NO_TENSORS}
    assert "model.safetensors.index.json" in str(found.problems[0])


def test_a_tensor_that_the_index_names_and_no_shard_holds_is_a_problem(tmp_path):
    write_safetensors(tmp_path / "model-00001-of-00001.safetensors", {"a": TENSOR}, 16)
    index = {"weight_map": dict.fromkeys(("a", "lm_head.weight"), "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = checkpoint.inspect(tmp_path)
    assert found.kinds == {ProblemKind.MISSING_TENSOR}
    assert "names tensors that their shards do not hold: lm_head.weight." in str(found.problems[0])


def test_an_inspection_says_whether_it_read_the_values(tmp_path):
    import torch
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file({"bad": torch.tensor([math.nan])}, path)
    unread, read = checkpoint.inspect(path), checkpoint.inspect(path, values=True)
    assert (unread.values_read, unread.all_finite) == (False, None)
    assert (read.values_read, read.all_finite) == (True, False)
    assert "not read" in str(unread) and "not all finite" in str(read)
    save_file({"good": torch.ones(1)}, path)
    assert checkpoint.inspect(path, values=True).all_finite is True


@pytest.mark.slow
def test_the_saves_of_a_run_are_timed(finished_run, capsys):
    run = finished_run  # two ranks, saves at steps 2, 4 and 6
    blocks = plan.save_blocks(run)
    assert list(blocks) == [2, 4, 6]
    assert all(0 < seconds < 60 for seconds in blocks.values())
    assert f"saved checkpoint-4 (training blocked {blocks[4]:.2f} s)" in run.log.read_text()
    found = plan.plan_for_run(run)
    assert found.blocked_s == pytest.approx(statistics.median(blocks.values()))
    assert found.write_s >= found.blocked_s
    assert main(["checkpoint", "plan", str(run.path)]) == 0
    assert f"blocks training for {format_duration(found.blocked_s)}" in capsys.readouterr().out
    words = ["--gb", "0.01", "--repeats", "1", "--method", "sharded", "--json"]
    assert main(["checkpoint", "save", str(run.path), *words]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["methods"][0]["ranks"] == 2 and value["run_blocked_s"] == {str(n): s for n, s in blocks.items()}
    assert main(["checkpoint", "inspect", str(run.checkpoints()[-1]), "--values"]) == 0
    history = json.loads((run.checkpoints()[-1] / "trainer_state.json").read_text())["log_history"]
    assert [h["save_blocked_s"] for h in history if "save_blocked_s" in h] == [blocks[2], blocks[4]]


@pytest.mark.slow
def test_a_run_with_non_finite_weights_stops_at_its_first_save_and_keeps_older_checkpoints(recipe, local):
    run = forked.freeze(recipe.override(**{"schedule.lr": 1e30, "schedule.warmup_ratio": 0.0}), local)
    with pytest.raises(AssertionError, match="KitError: The weights hold NaN or infinity at step 2"):
        forked.train(run)
    assert run.checkpoints() == []


if __name__ == "__main__":  # a rank
    train_and_save(Path(sys.argv[1]) / "base", Path(sys.argv[1]), VARIANTS)
