"""Keys of rows and messages that other tools train by: which the kit honours, and which it only counts.

Names from the data formats of OpenAI's fine-tuning, TRL, axolotl, LLaMA-Factory, ms-swift, torchtune and NeMo.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]

REPLY_ROLES = ("assistant", "gpt", "chatgpt", "bing", "bard", "model")
SYSTEM_KEYS = ("system", "system_prompt", "system_message", "instructions")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
CALL_KEYS = ("tool_calls", "function_call")
TOOL_KEYS = ("tools", "functions")
TURN_KEYS = ("name", "tool_call_id")  # templates may show them, training does not depend on them

# Weights of a turn or of a row: the value that leaves it out of the loss, and the one that keeps it with weight 1.
WEIGHTS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("weight", "loss_weight"), (0, 1)),
    **dict.fromkeys(("train", "training", "trainable", "train_on_turn", "loss"), (False, True)),
    "masked": (True, False),  # torchtune
}
GOOD = ("label", "kto_tag")  # false marks an answer to avoid (TRL's and LLaMA-Factory's KTO)

# Non-empty lists of files: the text is only a part of what the row means.
MEDIA_LISTS = ("images", "videos", "audios")
MEDIA_SINGLE = ("image", "video", "audio")
MEDIA_TOKEN = re.compile(r"<\|?(?:image|video|audio)(?:_?\w+)?\|?>|\[IMG\]")

# Names of reasoning and of weights that are not read.
_OTHER_REASONING = {"think", "thought", "thoughts", "chain_of_thought", "cot", "rationale", "reasoning_text"}
_OTHER_WEIGHTS = {"sample_weight", "example_weight", "do_not_train", "ignore_loss", "no_loss", "skip_loss"}
_COUNTED_IN_ROWS = frozenset(
    {*_OTHER_REASONING, *_OTHER_WEIGHTS}
    | {*SYSTEM_KEYS, *REASONING_KEYS, *CALL_KEYS, *TOOL_KEYS, *WEIGHTS, *GOOD, *MEDIA_LISTS}
    | {*MEDIA_SINGLE, "chosen", "rejected", "rejected_response", "rejected_messages", "chosen_response", "preference"}
    | {"score", "scores", "reward", "rating", "margin", "score_chosen", "score_rejected", "chosen_score", "mask"}
    | {"rejected_score", "chosen_rating", "rejected_rating", "advantage", "labels", "loss_mask", "prompt_loss_weight"}
)
_COUNTED_IN_MESSAGES = frozenset(
    {*_OTHER_REASONING, *_OTHER_WEIGHTS, "tool_call"}
    | {*REASONING_KEYS, *CALL_KEYS, *WEIGHTS, *MEDIA_LISTS, *MEDIA_SINGLE, *TOOL_KEYS, "label", "score"}
    | {"train_detail", "mask", "loss_mask", "reward", "rating", "rejected", "chosen", "refusal", "annotations"}
)
_WEIGHT_KEYS = frozenset(WEIGHTS)
# Columns of tables that are read for these. OASST's `labels` are large, and their meaning is another.
COLUMNS = _COUNTED_IN_ROWS - {"labels"}


def is_empty(value: Any) -> bool:
    """Whether a value says nothing: null, or an empty text, list or object. 0 and false are values."""
    return value is None or (isinstance(value, str | list | tuple | dict) and len(value) == 0) or value in ("[]", "{}")


def counted(row: Row) -> frozenset[str]:
    """The keys of the row that other tools train by."""
    return _COUNTED_IN_ROWS.intersection(row)


def unused(row: Row, messages: Iterable[Row], read: Iterable[str]) -> tuple[str, ...]:
    """Keys with a value that training does not use: of the row, and as "message.KEY" of its messages, each once.

    `read` are the keys of the row that were used.
    """
    found = [key for key in counted(row).difference(read) if not is_empty(row[key])]
    for message in messages:
        keys = _COUNTED_IN_MESSAGES.intersection(message)
        found += [f"message.{key}" for key in keys if not is_empty(message[key]) and not _honoured(message, key)]
    return tuple(sorted(set(found)))


def leaves_out(values: Row) -> str:
    """The key, with its value, that leaves a turn or a row out of the loss; empty where none does."""
    for key in _WEIGHT_KEYS.intersection(values):
        value = values[key]
        if _is_weight(key, value) and value == WEIGHTS[key][0]:
            return f"{key} {str(value).lower()}"
    return ""


def _honoured(message: Row, key: str) -> bool:
    """Whether the message converter reads this key, or the loss has the weight that it gives."""
    is_reply = message.get("role", message.get("from")) in REPLY_ROLES
    if key in (*CALL_KEYS, *REASONING_KEYS):
        return is_reply
    if key not in WEIGHTS or not _is_weight(key, message[key]):
        return False
    outside, inside = WEIGHTS[key]
    return bool(message[key] == outside or (message[key] == inside and is_reply))


def _is_weight(key: str, value: Any) -> bool:
    """Weights are numbers; flags are booleans, or 0 and 1. A float under a flag's name is something else."""
    return isinstance(value, int) or (isinstance(value, float) and not isinstance(WEIGHTS[key][0], bool))
