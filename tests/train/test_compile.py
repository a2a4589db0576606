"""Compiled layers: names, recomputation, dropout, and the number of graphs."""

import io
import os

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from kit.config.recipe import Recipe
from kit.files import REPOSITORY
from kit.slurm.folder import RunFolder
from kit.train.callbacks import Progress
from kit.train.compile import compile_layers, decoder_layers, use_cache_folder
from kit.train.trainer import without_missing_compiler
from tests.train.small import COMPILES, adapted, loss_and_gradients, packed, relative_error
from tests.train.test_patches import printed_by_two_ranks

VARLEN = {"model.attention": "varlen", "parallel.compile": "on", "data.seq_len": 64}
pytestmark = COMPILES


@pytest.fixture(autouse=True)
def no_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_names_of_modules_and_weights_stay(recipe):
    model = adapted("llama")
    before = list(model.state_dict()), [name for name, _ in model.named_modules()]
    assert len(compile_layers(model)) == 2
    assert (list(model.state_dict()), [name for name, _ in model.named_modules()]) == before


@pytest.mark.slow
def test_inductor_computes_the_same_gradients(recipe):
    expected, gradients = loss_and_gradients(adapted("llama", layers=1), packed(recipe))
    model = adapted("llama", "varlen", layers=1)
    compile_layers(model)
    loss, found = loss_and_gradients(model, packed(recipe.override(**VARLEN)))
    assert loss == pytest.approx(expected, rel=1e-5)
    assert relative_error(found, gradients) < 1e-5


def test_the_first_layer_has_one_graph_and_all_others_another_for_any_number_of_documents(recipe):
    """The first layer's input needs no gradient under LoRA."""
    counter = CompileCounterWithBackend("aot_eager")
    model, job = adapted("llama", "varlen"), recipe.override(**VARLEN)
    compile_layers(model, backend=counter)
    for lengths in ([[20, 30, 10], [1, 45]], [[64], [50]], [[2] * 30, [9, 9, 9]]):
        expected, gradients = loss_and_gradients(adapted("llama"), packed(recipe, lengths))
        loss, found = loss_and_gradients(model, packed(job, lengths))
        assert loss == pytest.approx(expected, rel=1e-6)
        assert relative_error(found, gradients) < 1e-5
    assert counter.frame_count == 2


def test_recomputed_layers_have_the_gradients_of_those_that_keep_their_activations(recipe):
    found = {}
    for recompute in (False, True):
        model = adapted("llama", "varlen", dropout=0.2)
        compile_layers(model, recompute=recompute, backend="aot_eager")
        torch.manual_seed(2)
        found[recompute] = loss_and_gradients(model, packed(recipe.override(**VARLEN)))
    assert found[True][0] == found[False][0]
    assert relative_error(found[True][1], found[False][1]) < 1e-6


def test_packed_rows_have_one_width_where_layers_are_compiled(recipe):
    short = [[3, 4], [5]]
    assert packed(recipe.override(**VARLEN | {"data.seq_len": 512}), short)["input_ids"].shape == (2, 512)
    assert packed(recipe.override(**{"data.seq_len": 512}), short)["input_ids"].shape == (2, 64)


def test_a_model_of_unknown_layers_has_none_to_compile():
    assert decoder_layers(torch.nn.Sequential(torch.nn.Linear(2, 2))) == []


def test_compiled_code_is_kept_in_the_users_cache_or_the_runs(tmp_path, monkeypatch):
    name = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setenv(name, "/elsewhere")
    use_cache_folder(tmp_path)
    assert os.environ[name] == "/elsewhere"
    for home, folder in (
        (tmp_path / "home", tmp_path / "home/kit/inductor"),
        (tmp_path / "file", tmp_path / "cache/inductor"),
    ):
        (tmp_path / "file").touch()
        monkeypatch.delenv(name)
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        use_cache_folder(tmp_path)
        assert os.environ[name] == str(folder)


SHARDED = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, REPOSITORY)
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from kit.config.recipe import Recipe
from kit.train.compile import compile_layers, decoder_layers
from tests.train.small import COMPILES, adapted, loss_and_gradients, packed, relative_error

dist.init_process_group("gloo")
recipe = Recipe.load("demo", **{"data.seq_len": 64, "model.attention": "varlen", "parallel.compile": "on"})
expected, gradients = loss_and_gradients(adapted("llama", "varlen"), packed(recipe))
model = adapted("llama", "varlen")
compile_layers(model, backend="aot_eager")
mesh = dist.init_device_mesh("cpu", (2,))
for layer in [*decoder_layers(model), model]:
    fully_shard(layer, mesh=mesh)
loss = model(**packed(recipe), use_cache=False).loss
loss.backward()
found = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters() if p.requires_grad])
names = [name for name in model.state_dict() if "_orig_mod" in name]
if dist.get_rank() == 0:
    print(abs(loss.item() - expected) < 1e-5, relative_error(found, gradients) < 1e-5, names)
dist.destroy_process_group()
"""


def test_layers_sharded_by_fsdp2_on_two_ranks_can_be_compiled(tmp_path):
    script = SHARDED.replace("REPOSITORY", repr(str(REPOSITORY)))
    assert printed_by_two_ranks(tmp_path, script) == ["True", "True", "[]"]


def test_a_node_without_a_compiler_trains_uncompiled_and_says_so(monkeypatch, tmp_path):
    run, console = RunFolder(tmp_path), io.StringIO()
    progress = Progress(run, 0, console)
    compiled = Recipe.load("llama8b", **{"parallel.compile": "on"})
    assert without_missing_compiler(compiled, progress) == compiled and not console.getvalue()
    monkeypatch.setattr("kit.train.trainer.find_compiler", lambda: "")
    assert not without_missing_compiler(compiled, progress).parallel.compiles
    assert "parallel.compile is off: this node has no C compiler" in console.getvalue()
