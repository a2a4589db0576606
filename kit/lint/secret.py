"""Secrets in scripts: names of variables that hold one, and texts that look like one."""

import re

SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|API_?KEY|ACCESS_KEY|SECRET(?:_KEY)?|PASSWORD|PASSWD)$")
SECRET = re.compile(r"\b(?:hf_\w{30,}|gh[pousr]_\w{36}|sk-[\w-]{32,}|AKIA[0-9A-Z]{16}|glpat-[\w-]{20})\b")
# Words of a text that a person has yet to replace: YOUR_WANDB_API_KEY_HERE
NOT_YET_FILLED_IN = re.compile(r"your|here|change|replace|insert|example|dummy|api_?key|token", re.I)
WANDB_KEY = re.compile(r"wandb\b.*\b[0-9a-f]{40}\b")


def may_hold_secret(row: str) -> bool:
    """Whether a line of a script, or a part of it, may contain a secret, so that it must not be shown.

    Wider than the rules: any text after a secret's name counts, unless it is an expansion.
    """
    named = re.findall(r"([\w-]+)(?:=|\s+)[\"']?(?=[^\s$\"'])", row)
    if any(SECRET_NAME.search(name.replace("-", "_").upper()) for name in named):
        return True
    return bool(SECRET.search(row) or WANDB_KEY.search(row))
