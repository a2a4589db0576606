"""Adapters under autocast: gradients on the fast path are as near to fp32 as on the plain one."""

import torch

from kit.train import patches
from tests.train.small import adapted, loss_and_gradients, packed, relative_error


def in_bf16(model, batch):
    """Loss and gradients with frozen weights in bf16 and fp32 adapters under autocast, as on GPUs."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_and_gradients(model, batch)


def test_adapter_gradients_in_bf16_are_as_near_to_fp32_as_on_the_plain_path(recipe):
    expected, gradients = loss_and_gradients(adapted("llama"), packed(recipe))
    plain_loss, plain = in_bf16(adapted("llama"), packed(recipe))
    model = adapted("llama", "varlen")
    patches.leave_casts_to_autocast(model)
    loss, found = in_bf16(model, packed(recipe.override(**{"model.attention": "varlen"})))
    assert relative_error(found, gradients) < 1.1 * relative_error(plain, gradients) < 0.05
    assert abs(loss - expected) < 0.01 and abs(plain_loss - expected) < 0.01


def test_adapters_do_not_cast_what_they_read(recipe):
    model, seen = adapted("llama"), []
    patches.leave_casts_to_autocast(model)
    layer = model.base_model.model.model.layers[0].mlp.down_proj.lora_A["default"]
    layer.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].dtype))
    in_bf16(model, packed(recipe))
    assert seen == [torch.bfloat16]
