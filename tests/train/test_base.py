"""Frozen weights in fp8: what they cost in accuracy, and that nothing else of training changes."""

import importlib.util
import warnings

import pytest
import torch

from kit.errors import InputError, KitError
from kit.train.base import FP8_ROUNDING, Fp8Linear, Fp8Product, check_fp8_gradient, quantise_rows, use_fp8, use_nf4
from kit.train.compile import compile_layers
from kit.train.load import load_base
from kit.train.patches import ignore_renamed_arguments
from kit.train.trainer import adapt
from tests.train.small import COMPILES, adapted, loss_and_gradients, packed, relative_error

pytestmark = COMPILES


def test_a_row_is_rounded_to_a_sixteenth_of_each_value_and_its_largest_value_is_kept():
    rows = torch.randn(5, 64) * torch.tensor([1e-6, 1e-2, 1.0, 1e3, 0.0])[:, None]
    values, scale = quantise_rows(rows)
    back = values.float() * scale
    torch.testing.assert_close(back.abs().amax(-1), rows.abs().amax(-1))
    normal = rows.abs() > scale * 2**-6  # below, e4m3 has no more bits
    assert ((back - rows).abs() <= rows.abs() / 16)[normal].all()


def test_the_product_and_its_gradient_are_those_of_the_rounded_weight_up_to_the_rounding_of_the_other_operand():
    linear = torch.nn.Linear(64, 48)
    small = Fp8Linear(linear)
    weight, scale = quantise_rows(linear.weight.detach())
    rounded = weight.float() * scale
    inputs = torch.randn(3, 7, 64, requires_grad=True)
    out = small(inputs)
    (gradient,) = torch.autograd.grad(out, inputs, slope := torch.randn(3, 7, 48))
    assert relative_error(out, inputs @ rounded.t() + linear.bias) < 0.04
    assert relative_error(gradient, slope @ rounded) < 0.04
    assert out.dtype == gradient.dtype == torch.float32


def test_frozen_layers_of_the_decoder_are_in_fp8_and_no_others():
    model = adapted("llama")
    assert use_fp8(model) == 14  # 7 of each layer
    assert isinstance(model.get_output_embeddings(), torch.nn.Linear)
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    assert names == {"base_layer"}
    assert not any("base_layer" in name for name in model.state_dict())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_adapters_learn_through_fp8_weights_with_a_gradient_that_is_off_by_less_than_a_third(recipe, compiled):
    expected, gradients = loss_and_gradients(adapted("llama"), packed(recipe))
    model = adapted("llama")
    use_fp8(model)
    if compiled:
        compile_layers(model, backend="aot_eager")
    loss, found = loss_and_gradients(model, packed(recipe))
    assert loss == pytest.approx(expected, abs=0.02)
    assert 0.01 < relative_error(found, gradients) < 0.33


def test_a_recipe_for_fp8_trains_the_same_adapters_as_one_without(recipe, tmp_path):
    parameters = {}
    for base in ("bf16", "fp8"):
        job = recipe.override(**{"model.base": base, "tuning.method": "lora"})
        with warnings.catch_warnings():
            ignore_renamed_arguments()
            model = adapt(load_base(job), job)
        parameters[base] = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        model.save_pretrained(tmp_path / base)
    assert parameters["bf16"] == parameters["fp8"]
    sizes = {base: (tmp_path / base / "adapter_model.safetensors").stat().st_size for base in parameters}
    assert sizes["bf16"] == sizes["fp8"]


def test_adapters_begin_with_the_numbers_of_the_seed(recipe):
    weights = []
    for seed in (1, 1, 2):
        torch.rand(seed)
        job = recipe.override(**{"schedule.seed": seed})
        with warnings.catch_warnings():
            ignore_renamed_arguments()
            model = adapt(load_base(job), job)
        weights.append(next(parameter for parameter in model.parameters() if parameter.requires_grad))
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_qlora_without_bitsandbytes_is_refused_with_what_to_install():
    with pytest.raises(InputError, match="pip install bitsandbytes"):
        use_nf4(adapted("llama"))


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_adapters_learn_through_nf4_weights(recipe):
    from bitsandbytes.nn import Linear4bit

    job = recipe.override(**{"tuning.method": "qlora", "tuning.target_modules": ["all-linear"]})
    with warnings.catch_warnings():
        ignore_renamed_arguments()
        model = adapt(load_base(job), job)
    assert sum(isinstance(module, Linear4bit) for module in model.modules()) == 14
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 28 and all(parameter.dtype == torch.float32 for parameter in trained)
    loss, gradients = loss_and_gradients(model, packed(job))
    assert loss > 0 and gradients.abs().sum() > 0


def test_the_forward_of_a_product_converts_nothing_to_the_type_that_it_has():
    # dynamo of torch 2.11 would lose the gradient: https://github.com/pytorch/pytorch/issues/180642
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    small = Fp8Linear(torch.nn.Linear(32, 16, bias=False))
    torch.compile(small, backend=backend)(torch.randn(4, 32, requires_grad=True)).sum().backward()
    conversions = [
        node
        for graph in graphs
        for module in graph.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if node.op == "call_method" and node.target == "to"
    ]
    assert conversions  # to fp8
    assert not any(node.args[0].meta["example_value"].dtype == node.args[1] for node in conversions)


def test_the_weight_of_a_product_gets_no_gradient():
    weight, scale = quantise_rows(torch.randn(16, 32))
    out = Fp8Product.apply(torch.randn(2, 32, requires_grad=True), weight, scale)
    out.sum().backward()
    assert weight.grad is None


def test_the_check_before_training_finds_an_fp8_layer_that_loses_its_gradient(monkeypatch):
    assert 0.01 < check_fp8_gradient(compiled=False) < FP8_ROUNDING
    monkeypatch.setattr(torch, "compile", lambda forward: lambda inputs: forward(inputs) * 0.0)
    with pytest.raises(KitError, match=r"fp8, compiled, passes .* wrong by 100% .* Set parallel\.compile to off"):
        check_fp8_gradient(compiled=True)
