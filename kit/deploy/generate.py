"""Generate text with an adapter or a merged model, and compare the two."""

import warnings
from pathlib import Path
from typing import Any

from kit.config.models import load_model, load_tokenizer
from kit.show import progress_bar

TOKENS = 80  # of a reply


def load_tuned(folder: Path) -> tuple[Any, Any]:
    """(model, tokenizer) of an adapter with its base, or of a merged model; on a GPU where there is one."""
    import torch
    from peft import PeftConfig, PeftModel

    on_gpu, adapted = torch.cuda.is_available(), (folder / "adapter_config.json").is_file()
    base = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path if adapted else str(folder)
    loaded = load_model(base, torch.bfloat16 if on_gpu else torch.float32).to("cuda" if on_gpu else "cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # peft 0.20 still reads it
        tuned = PeftModel.from_pretrained(loaded, str(folder)) if adapted else loaded
    return tuned.eval(), load_tokenizer(base)


def _encode_prompt(model: Any, tokenizer: Any, prompt: str) -> Any:
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)


def answer(folder: Path, prompt: str) -> str:
    """The reply of an adapter or a merged model to a prompt: greedy decoding, at most TOKENS tokens."""
    return _reply(*load_tuned(folder), prompt)


def answers(adapter: Path, prompt: str) -> dict[str, str]:
    """The replies of the base model and of the base with the adapter to a prompt, decoded as by `answer`."""
    model, tokenizer = load_tuned(adapter)
    with model.disable_adapter():
        base = _reply(model, tokenizer, prompt)
    return {"base": base, "adapter": _reply(model, tokenizer, prompt)}


class _TokenCount:
    """What transformers calls with the prompt and then with each new token, as a "streamer"."""

    def __init__(self, bar: Any) -> None:
        self._bar, self._tokens = bar, 0

    def put(self, tokens: Any) -> None:
        self._bar.update(min(1, self._tokens))  # the first call has the prompt
        self._tokens += 1

    def end(self) -> None:
        """Nothing is left to do."""


def _reply(model: Any, tokenizer: Any, prompt: str) -> str:
    encoded = _encode_prompt(model, tokenizer, prompt)
    with progress_bar(TOKENS, "answer", "token") as bar:
        generated = model.generate(
            **encoded,
            max_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
            streamer=_TokenCount(bar),
        )
    return str(tokenizer.decode(generated[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True))


def difference(adapter: Path, merged: Path, prompt: str) -> float:
    """The largest difference of the two models' logits for a prompt, divided by the adapter's largest logit."""
    import torch

    with torch.no_grad():
        expected, found = (
            model(**_encode_prompt(model, tokenizer, prompt)).logits.float()
            for model, tokenizer in map(load_tuned, (adapter, merged))
        )
    return float((expected - found).abs().max() / expected.abs().max())
