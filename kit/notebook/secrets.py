"""What looks like a secret, and keeping it out of whatever is written down."""

import html
import json
import os
import re
from typing import Any
from urllib.parse import quote

SECRET = re.compile("key|token(?!i[sz])|passw|passphrase|secret|credential", re.IGNORECASE)  # a tokenizer is none


def secret_values() -> list[str]:
    """Values of the environment that no file and no log may hold, longest first; below 8 characters they are words.

    Each as it is and as a page, a string literal or an address would spell it; of several lines, each line.
    """
    values = {v for name, text in os.environ.items() if SECRET.search(name) for v in text.splitlines() if len(v) >= 8}
    spellings = (str, html.escape, lambda v: repr(v)[1:-1], lambda v: json.dumps(v)[1:-1], lambda v: quote(v, safe=""))
    return sorted({spell(value) for value in values for spell in spellings}, key=len, reverse=True)


def hide(value: Any, secrets: list[str]) -> Any:
    """A copy of the text, or of JSON-like data, with `[hidden]` in place of the secrets."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, "[hidden]")
    elif isinstance(value, dict):
        return {hide(k, secrets): hide(v, secrets) for k, v in value.items()}
    elif isinstance(value, list):
        return [hide(v, secrets) for v in value]
    return value
