import pytest

from kit.notebook.redact import hide, is_secret, secret_values


@pytest.mark.parametrize(
    "name",
    [
        "api_key", "apiKey", "OPENAI_API_KEY", "WANDB_API_KEY", "OPENAI_API_KEY_2", "AZURE_STORAGE_KEY", "KEY",
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "access_token", "token",
        "GITHUB_TOKEN", "password", "db_password", "PGPASSWORD", "passphrase", "secret", "CLIENT_SECRET", "credential",
        "CREDENTIALS", "DB_PWD",
    ],
)  # fmt: skip
def test_a_name_of_a_secret_is_recognised(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "KEYBOARD_LAYOUT", "KEYRING_DIR", "GNOME_KEYRING_CONTROL", "pad_token", "eos_token", "tokens_per_step",
        "tokens", "key_metric", "monkey", "tokenizer", "TOKENIZERS_PARALLELISM", "tokenize", "sort_key", "max_tokens",
        "secretary", "HF_TOKEN_PATH", "PWD", "OLDPWD", "passes", "",
    ],
)  # fmt: skip
def test_other_names_are_not_secrets(name):
    assert not is_secret(name)


def test_values_of_secrets_alone_are_hidden(monkeypatch):
    monkeypatch.setenv("KEYBOARD_LAYOUT", "us-international")
    monkeypatch.setenv("MY_API_KEY", "quiet<river>")
    hidden = hide({"out": ["quiet<river> quiet&lt;river&gt; us-international"]}, secret_values())
    assert hidden == {"out": ["[hidden] [hidden] us-international"]}
