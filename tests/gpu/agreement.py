"""What speed.py's arms check besides speed: gradients against fp32, and documents that do not see each other."""

from pathlib import Path
from typing import Any

import torch
from measure import kit_trainer, random_model, read_rows
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

SCALE = 0.02  # standard deviation of the adapters' second matrices, which start at 0 and would hide the first ones


def gradients(spec: dict[str, Any]) -> dict[str, Any]:
    """Gradients of all adapters from one batch of the trainer, against those of an fp32 model of the same weights."""
    trainer = kit_trainer(spec | {"steps": 1}, read_rows(Path(spec["rows"])))
    trainer.args.max_grad_norm = 0.0
    seen, batches = Adapters(), []
    collate = trainer.data_collator

    def keep(rows: list[dict[str, Any]]) -> Any:
        batches.append(collate(rows))
        return batches[-1]

    trainer.data_collator = keep
    trainer.add_callback(seen)
    trainer.train()
    loss = trainer.state.log_history[0]["loss"]
    del trainer.model, trainer.model_wrapped
    exact_loss, exact = reference(spec, batches[0], seen.values)
    ours = torch.cat([seen.gradients[name].flatten() for name in exact])
    theirs = torch.cat([gradient.flatten() for gradient in exact.values()])
    return {
        "relative_error": float((ours - theirs).norm() / theirs.norm()),
        "cosine": float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0)),
        "loss": loss,
        "loss_error": loss - exact_loss,
        "adapters": len(exact),
    }


class Adapters(TrainerCallback):  # type: ignore[misc]
    """Gives the adapters values at the start, and keeps them and their first gradients."""

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        """Fill the second matrix of each adapter."""
        for name, parameter in trainable(model).items():
            if "lora_B" in name:
                generator = torch.Generator(parameter.device).manual_seed(len(self.values))
                torch.nn.init.normal_(parameter, std=SCALE, generator=generator)
            self.values[name] = parameter.detach().clone()

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        """Keep the gradients."""
        self.gradients = {name: parameter.grad.float().clone() for name, parameter in trainable(model).items()}


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The adapters by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def reference(
    spec: dict[str, Any], batch: dict[str, Any], values: dict[str, torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients in fp32, without TF32, by transformers' sdpa."""
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    base = random_model(spec, "sdpa").float()
    adapters = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules=spec["targets"])
    model = get_peft_model(base, adapters)
    for name, parameter in trainable(model).items():
        parameter.data.copy_(values[name])
    inputs = {name: batch[name].to(base.device) for name in ("input_ids", "position_ids")}
    logits = model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
    labels = batch["labels"][:, 1:].flatten().to(base.device)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in trainable(model).items()}


def isolation(spec: dict[str, Any]) -> dict[str, Any]:
    """Change the first document of a batch of rows: by how much the logits of the others move, as trained."""
    from kit.config.recipe import Recipe
    from kit.train.isolation import check_isolation

    rows = read_rows(Path(spec["rows"]))
    trainer = kit_trainer(spec, rows)
    chosen = [rows[index] for index in range(spec["batch"])]
    length = chosen[0]["seq_lengths"][0]
    changed = [dict(chosen[0]), *chosen[1:]]
    changed[0]["input_ids"] = [token + 1 for token in chosen[0]["input_ids"][:length]] + chosen[0]["input_ids"][length:]
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=spec["on_gpu"]):
        before, after = (_logits(trainer, rows) for rows in (chosen, changed))
    moved = (before - after).abs()
    return {
        "documents": [len(row["seq_lengths"]) for row in chosen],
        "moved_in_the_document": float(moved[0, :length].max()),
        "moved_in_others": max(float(moved[0, length:].max()), float(moved[1:].max())),
        "check_isolation": check_isolation(Recipe.load(Path(spec["recipe"]))),
    }


def _logits(trainer: Any, rows: list[dict[str, Any]]) -> torch.Tensor:
    batch = {
        name: value.to(trainer.model.device) if isinstance(value, torch.Tensor) else value
        for name, value in trainer.data_collator(rows).items()
        if name != "labels"
    }
    return trainer.model(**batch, use_cache=False).logits.float()


TASKS = {"gradients": gradients, "isolation": isolation}
