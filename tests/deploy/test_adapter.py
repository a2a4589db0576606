"""The exported adapter against the model that was really trained, on two FSDP processes."""

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kit.checkpoints import inspect as checkpoint
from kit.checkpoints import weights
from kit.checkpoints.formats.base import ProblemKind
from kit.deploy import adapter
from kit.errors import InputError, KitError
from tests import shared
from tests.benchmarks import adapter as benchmark
from tests.checkpoints.test_inspect import REPOSITORY, TARGETS, TOKENS, fsdp2_saves, make_base
from tests.conftest import oracle
from tests.ranks import MODEL, TRAINING, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft 0.20 itself

# Sharded and unsharded forwards sum in the same order, so the exported adapter is held to fp32 rounding only.
EXPORTED = 1e-6


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

    out = adapter.export(saved(variant), tmp_path / "adapter").path
    assert sorted(p.name for p in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert (out / "adapter_model.safetensors").stat().st_mode & 0o777 == 0o666 & ~current_umask()
    base = base_model(fsdp2_saves() / "base")
    untouched = logits(base)
    difference = (logits(PeftModel.from_pretrained(base, out)) - trained_logits(variant)).abs().max()
    assert difference <= EXPORTED
    assert (untouched - trained_logits(variant)).abs().max() > 0.01  # so that the equality says something


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_an_adapter_that_peft_wrote_is_exported_under_the_same_checks(tmp_path):
    folder = tmp_path / "checkpoint-2"
    adapter.export(saved("adapter"), folder)
    out = adapter.export(folder, tmp_path / "out").path
    assert (out / "adapter_model.safetensors").read_bytes() == (folder / "adapter_model.safetensors").read_bytes()


def test_a_run_folder_exports_its_newest_complete_checkpoint(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    shutil.copytree(saved("adapter"), tmp_path / "checkpoints" / "checkpoint-2")
    newer = Path(shutil.copytree(saved("uneven"), tmp_path / "checkpoints" / "checkpoint-10"))
    (newer / "trainer_state.json").unlink()
    out = adapter.export(tmp_path, tmp_path / "out").path
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
    tensors = dict(weights.read_tensors(held := weights.read_headers(folder), held.tensors))
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


def test_a_checkpoint_is_exported_without_its_base(tmp_path):
    folder = copy("adapter", tmp_path)
    without_base(folder)
    assert adapter.export(folder, tmp_path / "out").path.is_dir()


def test_non_finite_values_are_refused(tmp_path):
    def spoil(tensors):
        next(iter(tensors.values()))[0, 0] = float("nan")

    refused(tmp_path, altered(tmp_path, "adapter", spoil), "1 tensors hold NaN or infinity")


def test_an_untrained_adapter_gives_a_warning(tmp_path):
    def reset(tensors):
        for name in tensors:
            if "lora_B" in name:
                tensors[name].zero_()

    folder = altered(tmp_path, "adapter", reset)
    with pytest.warns(UserWarning, match="untrained"):
        out = adapter.export(folder, tmp_path / "out").path
    assert [p.kind for p in checkpoint.inspect(out, values=True).problems] == [ProblemKind.UNTRAINED]


def test_names_that_collide_are_refused(tmp_path):
    def twice(tensors):
        name = next(iter(tensors))
        tensors[name.replace("base_model", "_fsdp_wrapped_module.base_model", 1)] = tensors[name]

    refused(tmp_path, altered(tmp_path, "adapter", twice), "two tensors would both be named")


def test_a_checkpoint_of_a_full_fine_tune_is_refused(tmp_path):
    def strip(tensors):
        for name in [n for n in tensors if "lora_" in n]:
            del tensors[name]

    refused(tmp_path, altered(tmp_path, "full", strip), "no LoRA tensors")


def test_a_truncated_shard_and_an_empty_save_are_refused(tmp_path):
    folder = copy("adapter", tmp_path)
    shard = folder / "pytorch_model_fsdp_0" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:1000])
    refused(tmp_path, folder, "is truncated: 1000 of at least")
    shutil.rmtree(folder / "pytorch_model_fsdp_0")
    save_dcp(folder / "pytorch_model_fsdp_0", {})
    refused(tmp_path, folder, "is empty|no LoRA tensors")


def test_an_existing_folder_is_not_changed(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(InputError, match="exists already"):
        adapter.export(saved("adapter"), out)
    assert [p.name for p in out.iterdir()] == ["mine"]


# What accelerate saves under FSDP1 and FSDP2 with several releases of PEFT. accelerate's own FSDP1 asks for a GPU;
# here torch's FSDP1 shards over two gloo ranks and accelerate's function saves.

PEFTS = {"0.19": "0.19.1", "0.20": "", "0.21": "0.21.2"}  # the second is the one that is installed


def save_variants(root: Path, names: list[str]) -> None:
    """One rank's part: random adapters, sharded and saved; rank 0 looks at each save as training does."""
    import torch
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils.fsdp_utils import save_fsdp_model
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from kit.train.saves import finish_checkpoint

    state = PartialState(cpu=True)  # all that the save function asks of an accelerator
    for name in names:
        kind, only, variant = name.split("-")
        model = random_adapter(root / "base", variant)
        if kind == "fsdp1":
            policy = ModuleWrapPolicy({LlamaDecoderLayer})
            model = FullyShardedDataParallel(
                model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
            )
        else:
            for layer in model.base_model.model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        folder = root / name / "checkpoint-2"
        plugin = FullyShardedDataParallelPlugin(fsdp_version=int(kind[-1]), state_dict_type="SHARDED_STATE_DICT")
        save_fsdp_model(plugin, state, model, str(folder), adapter_only=only == "adapter")
        torch.save({}, folder / f"rng_state_{state.process_index}.pth")  # what the Trainer writes beside the weights
        state.wait_for_everyone()
        if state.is_main_process:
            (folder / "trainer_state.json").write_text('{"global_step": 2}')
            torch.save({}, folder / "optimizer.bin")
            try:
                finish_checkpoint(folder, model)
            except KitError as error:
                (root / name / "stopped").write_text(str(error))
            for other, config in model.peft_config.items():
                config.save_pretrained(folder / ("" if other == "default" else other))
    state.destroy_process_group()


def random_adapter(base: Path, variant: str):
    """Every part of the adapter random and the same on each rank."""
    import torch
    from peft import LoraConfig, get_peft_model

    settings = {
        "plain": {"r": 3, "target_modules": TARGETS}, "dora": {"r": 4, "target_modules": TARGETS, "use_dora": True},
        "norm": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["norm"]},
        "two": {"r": 4, "target_modules": ["q_proj"]},
    }[variant]  # fmt: skip
    torch.manual_seed(6)
    model = get_peft_model(base_model(base), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings))
    if variant == "two":
        second = LoraConfig(r=2, target_modules=["k_proj"], lora_alpha=3, init_lora_weights=False)
        model.add_adapter("second", second)
    for name, weight in model.named_parameters():
        if "norm" in name or "magnitude" in name:
            weight.data += torch.rand_like(weight)
    return model


def peft_saves(peft: str) -> Path:
    """base/ and <kind>-<only>-<variant>/checkpoint-2/, saved with this PEFT by two processes; made once a session."""
    return shared.once(f"peft-saves-{peft}", lambda root: make_peft_saves(root, peft))


def make_peft_saves(root: Path, peft: str) -> None:
    packages = [oracle(f"peft-{PEFTS[peft]}")] if PEFTS[peft] else []
    make_base(root / "base")
    names = [f"fsdp{n}-{only}-plain" for n in (1, 2) for only in ("adapter", "full")]
    names += [f"fsdp{n}-full-{v}" for n in (1, 2) for v in ("dora", "norm", "two")] + ["fsdp2-adapter-dora"]
    run_ranks(2, __file__, root, *names, packages=packages, imports=MODEL if packages else TRAINING)


def bitwise(exported: Path, root: Path, variant: str, name: str = "default") -> bool:
    """Whether the file holds the very tensors that PEFT itself saves of the unsharded model."""
    import torch
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file

    found = load_file(exported / "adapter_model.safetensors")
    expected = get_peft_model_state_dict(random_adapter(root / "base", variant), adapter_name=name)
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)


@pytest.mark.slow
@pytest.mark.parametrize("only", ["adapter", "full"])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("peft", PEFTS)
def test_an_adapter_is_exported_bit_for_bit_or_its_first_save_stops_the_run(peft, kind, only, tmp_path):
    folder = peft_saves(peft) / f"{kind}-{only}-plain"
    if (peft, kind, only) == ("0.21", "fsdp1", "adapter"):  # two shards of 0 bytes, and no error of PEFT's own
        assert "it holds 0 of 16 adapter tensors" in (folder / "stopped").read_text()
        refused(tmp_path, folder / "checkpoint-2", "is empty")
        return
    assert not (folder / "stopped").exists()
    assert bitwise(adapter.export(folder / "checkpoint-2", tmp_path / "out").path, peft_saves(peft), "plain")


@pytest.mark.slow
@pytest.mark.parametrize("peft", PEFTS)
@pytest.mark.parametrize("variant", ["fsdp1-full-dora", "fsdp2-full-dora", "fsdp2-adapter-dora", "fsdp1-full-norm",
                                     "fsdp2-full-norm"])  # fmt: skip
def test_magnitudes_and_whole_modules_are_exported_bit_for_bit(peft, variant, tmp_path):
    out = adapter.export(peft_saves(peft) / variant / "checkpoint-2", tmp_path / "out").path
    assert bitwise(out, peft_saves(peft), variant.rpartition("-")[2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_each_of_several_adapters_is_exported_by_its_name(kind, tmp_path):
    root = peft_saves("0.20")
    source = root / f"{kind}-full-two" / "checkpoint-2"
    refused(tmp_path, source, "holds the adapters default, second; name one of them")
    for name, rank in (("default", 4), ("second", 2)):
        out = adapter.export(source, tmp_path / name, name).path
        assert bitwise(out, root, "two", name)
        assert json.loads((out / "adapter_config.json").read_text())["r"] == rank
    with pytest.raises(KitError, match=r"third/adapter_config.json does not exist"):
        adapter.export(source, tmp_path / "third", "third")
    (source / "third").mkdir(exist_ok=True)
    shutil.copy(source / "adapter_config.json", source / "third")
    with pytest.raises(KitError, match="holds the adapters default, second"):
        adapter.export(source, tmp_path / "third", "third")


@pytest.mark.parametrize("key", [
    "model.base_model.model.model.layers.0.q_proj.lora_A.weight",
    "model.base_model.model.model.layers.0.q_proj.lora_A.default.weight",
    "_fsdp_wrapped_module.base_model.model.model.layers.0._checkpoint_wrapped_module.q_proj.lora_A.default.weight",
    "model._orig_mod.base_model.model.model.layers.0._fsdp_wrapped_module.q_proj.lora_A.default.weight",
])  # fmt: skip
def test_wrappers_and_the_adapters_name_are_removed_from_names(key):
    assert adapter.peft_name(key) == "base_model.model.model.layers.0.q_proj.lora_A.weight"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Could not find a config file in")
def test_export_and_merge_read_and_hold_no_more_than_needed(tmp_path):
    small = benchmark.make(tmp_path / "small", 0.01, hidden=256)
    large = benchmark.make(tmp_path / "large", 0.6)
    found = benchmark.cost("export", large, small)
    size = benchmark.size(large / "adapter")
    assert size > 8e6  # so that names and headers are little beside it
    assert size <= found["read_bytes"] <= 1.05 * size
    assert found["device_bytes"] <= 1.05 * size
    assert found["peak_bytes"] <= 2.5 * size
    shard = 1e8
    found = benchmark.cost("merge", large, small, shard / 1e9)
    assert len(list((large / "merged").glob("model-*.safetensors"))) >= 6
    assert found["peak_bytes"] <= shard + size + 128e6 < 0.5 * benchmark.size(large / "base")


def test_push_names_what_is_not_set(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(KitError, match="a repository"):
        adapter.push(tmp_path, "")
    with pytest.raises(KitError, match="HF_TOKEN"):
        adapter.push(tmp_path, "me/mine")


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's API that an upload without Xet takes: preupload, LFS batch and PUT, commit."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        host = f"http://127.0.0.1:{self.server.server_port}"
        if self.headers["Authorization"] != "Bearer hf_right":
            self.answer(401, {"error": "Invalid credentials in Authorization header"})
        elif "/preupload/" in self.path:
            modes = [{"path": f["path"], "shouldIgnore": False,
                      "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular"}
                     for f in json.loads(body)["files"]]  # fmt: skip
            self.answer(200, {"files": modes})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [o | {"actions": {"upload": {"href": f"{host}/put/{o['oid']}"}}}
                       for o in json.loads(body)["objects"]]  # fmt: skip
            self.answer(200, {"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            self.server.commits.append((self.path, [json.loads(line) for line in body.splitlines()]))
            self.answer(200, {"success": True, "commitOid": "0" * 40, "commitUrl": f"{host}/me/mine/commit/{'0' * 40}"})
        else:
            self.answer(404, {"error": f"not of this hub: {self.path}"})

    def do_PUT(self) -> None:
        self.server.blobs[self.path.removeprefix("/put/")] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, {})

    def answer(self, code: int, value: dict) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.commits, server.blobs = [], {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def push(hub: Hub, folder: Path, token: str) -> subprocess.CompletedProcess:
    """`kit adapter push` in a process of its own: the hub's client reads its address when it is imported."""
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": token, "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": str(REPOSITORY),
    }  # fmt: skip
    command = [sys.executable, "-m", "kit.cli", "adapter", "push", str(folder), "me/mine"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_push_commits_both_files_and_uploads_the_weights_unchanged(hub, tmp_path):
    out = adapter.export(saved("adapter"), tmp_path / "adapter").path
    done = push(hub, out, "hf_right")
    assert done.returncode == 0, done.stderr
    ((path, lines),) = hub.commits
    assert path == "/api/models/me/mine/commit/main"
    values = {line["value"]["path"]: line["value"] for line in lines if line["key"] in ("file", "lfsFile")}
    assert base64.b64decode(values["adapter_config.json"]["content"]) == (out / "adapter_config.json").read_bytes()
    assert hub.blobs[values["adapter_model.safetensors"]["oid"]] == (out / "adapter_model.safetensors").read_bytes()
    assert values.keys() == {"adapter_config.json", "adapter_model.safetensors"}


def test_a_push_that_the_hub_refuses_is_reported_and_leaves_nothing(hub, tmp_path):
    done = push(hub, adapter.export(saved("adapter"), tmp_path / "adapter").path, "hf_wrong")
    assert (done.returncode, hub.commits, hub.blobs) == (1, [], {})
    assert "kit: Nothing was pushed to me/mine: Client error '401 Unauthorized'" in done.stderr


if __name__ == "__main__":
    save_variants(Path(sys.argv[1]), sys.argv[2:])
