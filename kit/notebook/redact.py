"""Which variable names hold secrets, and the removal of secret values from everything that is written."""

import html
import json
import os
import re
from typing import Any
from urllib.parse import quote

SECRET_WORDS = {"secret", "secrets", "credential", "credentials", "passphrase", "passwd", "pwd", "apikey", "authtoken"}
SECRET_INSIDE = re.compile("password|api_?key|access_?key|secret_?key", re.IGNORECASE)  # PGPASSWORD, AWS_ACCESS_KEY_ID
# Words before a final "token" that make it a token of a tokenizer, and before a final "key" one of a table or a dict.
OF_TOKENIZERS = {"pad", "eos", "bos", "unk", "sep", "cls", "mask", "stop", "start", "end", "image", "special", "per"}
OF_TABLES = {"primary", "foreign", "sort", "group", "public", "dict", "row", "column", "text", "prompt"}
WORKING_DIRECTORY = {"PWD", "OLDPWD"}  # of every shell
SHORTEST = 8  # characters; shorter values are ordinary words


def is_secret(name: str) -> bool:
    """Whether a variable or parameter of this name holds a secret: HF_TOKEN, api_key, db_password.

    A key or token is the last word of the name: KEYBOARD_LAYOUT, key_metric and tokens_per_step are not secrets, and
    pad_token is one of a tokenizer. DB_PWD is a password, and PWD the working directory.
    """
    if name in WORKING_DIRECTORY:
        return False
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    if SECRET_INSIDE.search(name) or SECRET_WORDS & set(words):
        return True
    before = words[-2] if len(words) > 1 else ""
    if words and words[-1] in ("key", "keys"):
        return before not in OF_TABLES
    return bool(words) and words[-1] == "token" and before not in OF_TOKENIZERS


def secret_values() -> list[str]:
    """Secret values of the environment, longest first, each line of a value alone.

    Each comes in every spelling that a page, a string literal or an address has for it.
    """
    texts = [text for name, text in os.environ.items() if is_secret(name)]
    values = {line for text in texts for line in text.splitlines() if len(line) >= SHORTEST}
    spellings = {spelling for value in values for spelling in _spellings(value)}
    return sorted(spellings, key=len, reverse=True)


def _spellings(value: str) -> list[str]:
    return [value, html.escape(value), repr(value)[1:-1], json.dumps(value)[1:-1], quote(value, safe="")]


def hide(value: Any, secrets: list[str]) -> Any:
    """A copy of the text, or of JSON-like data, with `[hidden]` in place of the secrets."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, "[hidden]")
    elif isinstance(value, dict):
        return {hide(key, secrets): hide(item, secrets) for key, item in value.items()}
    elif isinstance(value, list):
        return [hide(item, secrets) for item in value]
    return value
