"""Small models with adapters and packed batches, for tests that compare ways to compute the same."""

import copy
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from kit.train import attention
from kit.train.batch import collator
from kit.train.patches import ignore_renamed_arguments

# torch.compile itself warns: of its own use of torch.jit, of hidden states whose .grad it looks at, and of autograd
# functions that it instantiates.
COMPILES = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
LENGTHS = [[20, 30, 10], [1, 45]]  # documents of the two rows of a batch: one has more documents, one more padding
KINDS = {  # grouped queries; and a sliding window that is shorter than a document
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "mistral": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=9)),
}


def adapted(kind, attention_name="sdpa", dropout=0.0, layers=2):
    """A model of random weights with LoRA, whose adapters are not zero; the same weights at each call."""
    attention.register()
    torch.manual_seed(0)
    build, config = KINDS[kind]
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    model = build._from_config(config, attn_implementation=attention_name)
    lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        ignore_renamed_arguments()
        model = get_peft_model(model, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def packed(recipe, lengths=LENGTHS):
    """A batch of rows of these documents; the loss counts three tokens of four."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for row in lengths:
        ids = torch.randint(97, (sum(row),), generator=generator)
        labels = torch.where(torch.arange(len(ids)) % 4 == 0, -100, ids)
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist(), "seq_lengths": row})
    return collator(recipe)(rows)


def loss_and_gradients(model, batch):
    """The loss, and the gradient of all adapters as one vector."""
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten().float() for p in model.parameters() if p.requires_grad])


def relative_error(found, expected):
    """The length of the difference of two vectors in lengths of the expected one."""
    return float((found - expected).detach().norm() / expected.detach().norm())
