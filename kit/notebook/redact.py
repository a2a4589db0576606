"""Which variable names hold secrets, and the removal of secret values from everything that is written."""

import html
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, quote_plus


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SECRET_WORDS = {"secret", "secrets", "credential", "credentials", "passphrase", "passwd", "pwd", "apikey", "authtoken"}
SECRET_INSIDE = re.compile("password(?!less)|api_?key|access_?key|secret_?key", re.IGNORECASE)  # PGPASSWORD
# Words before a final "token" that make it a token of a tokenizer.
OF_TOKENIZERS = _words(
    "pad padding eos bos unk unknown sep separator cls mask stop start end begin eot eod eom image video audio vision "
    "special per placeholder new first last next prev previous prompt fim prefix suffix middle header turn system "
    "assistant role newline space blank target source lang language speaker ignore extra added trigger answer response "
    "think thinking reasoning tool call max min num each single control boundary modality instruction human decoder "
    "forced suppress word sub text latent memory cost loss logit attention input output"
)
# Words before a final "key" that make it the name of something: of a column, of an item of a dict, of a key on a board.
OF_TABLES = _words(
    "primary foreign sort group public dict row column text prompt cache partition join label input output index merge "
    "metric field feature data config json target response message messages image question answer chosen rejected "
    "lookup map id name unique shard bucket object state param parameter cluster batch by order split dataset score "
    "reward loss value best query arrow home enter return shift hot legend attention rope completion instruction "
    "system tensor weight layer module model monitor role content conversation conversations history any each registry"
)
OF_ACCOUNTS = _words("db smtp mysql mail email ftp ssh sudo user login root admin proxy redis postgres pg imap vpn")
OF_FORGES = _words("github gh gitlab gitea azure ado git bitbucket")
ABOUT_SECRETS = _words("file path dir folder env var length count policy provider name")  # password_length
WORKING_DIRECTORY = {"PWD", "OLDPWD"}  # of every shell
SHORTEST = 8  # characters; shorter values are ordinary words


def is_secret(name: str) -> bool:
    """Whether a variable or parameter of this name holds a secret: HF_TOKEN, api_key, db_password, SMTP_PASS.

    A key or token is the last word of the name: KEYBOARD_LAYOUT, key_metric and tokens_per_step are not secrets, and
    pad_token is one of a tokenizer. DB_PWD is a password, and PWD the working directory. password_file is a path.
    """
    if name in WORKING_DIRECTORY:
        return False
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    if not words or words[-1] in ABOUT_SECRETS:
        return False
    if SECRET_INSIDE.search(name) or SECRET_WORDS & set(words):
        return True
    before = words[-2] if len(words) > 1 else ""
    match words[-1]:
        case "key":
            return before not in OF_TABLES
        case "keys":
            return bool(before) and before not in OF_TABLES
        case "token":
            return before not in OF_TOKENIZERS
        case "pass":
            return before in OF_ACCOUNTS
        case "pat":  # a personal access token
            return before in OF_FORGES
    return False


@dataclass
class Secrets:
    """Texts that must not be written, longest first, by the variable that each is the value of.

    `hidden` are the variables whose values were found in something, and hidden.
    """

    variables: Mapping[str, str]
    hidden: set[str] = field(default_factory=set)

    def __iter__(self) -> Iterator[str]:
        return iter(self.variables)


def secret_values() -> Secrets:
    """Secret values of the environment, longest first, each line of a value alone.

    Each comes in every spelling that a page, a string literal or an address has for it.
    """
    variables = {
        spelling: name
        for name, text in os.environ.items()
        if is_secret(name)
        for line in text.splitlines()
        if len(line) >= SHORTEST
        for spelling in _spellings(line)
    }
    return Secrets({text: variables[text] for text in sorted(variables, key=len, reverse=True)})


def _spellings(value: str) -> list[str]:
    in_addresses = [quote(value, safe=""), quote(value), quote_plus(value)]
    return [value, html.escape(value), repr(value)[1:-1], json.dumps(value)[1:-1], *in_addresses]


def hide(value: Any, secrets: Secrets) -> Any:
    """A copy of the text, or of JSON-like data, with `[hidden]` in place of the secrets."""
    if isinstance(value, str):
        for secret, variable in secrets.variables.items():
            if secret in value:
                value = value.replace(secret, "[hidden]")
                secrets.hidden.add(variable)
    elif isinstance(value, dict):
        return {hide(key, secrets): hide(item, secrets) for key, item in value.items()}
    elif isinstance(value, list):
        return [hide(item, secrets) for item in value]
    return value
