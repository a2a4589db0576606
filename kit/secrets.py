"""What looks like a secret, and keeping it out of whatever is written down."""

import os
import re
from typing import Any

SECRET = re.compile("key|token(?!i[sz])|password|secret", re.IGNORECASE)  # a tokenizer is none


def secret_values() -> list[str]:
    """Values of the environment that no file and no log may hold, longest first; below 8 characters they are words."""
    found = {value for name, value in os.environ.items() if SECRET.search(name) and len(value) >= 8}
    return sorted(found, key=len, reverse=True)


def hide(value: Any, secrets: list[str]) -> Any:
    """A copy of the text, or of JSON-like data, with `[hidden]` in place of the secrets."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, "[hidden]")
    elif isinstance(value, dict):
        return {k: hide(v, secrets) for k, v in value.items()}
    elif isinstance(value, list):
        return [hide(v, secrets) for v in value]
    return value
