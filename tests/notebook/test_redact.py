import pytest

from kit.notebook.redact import hide, is_secret, secret_values


@pytest.mark.parametrize(
    "name",
    [
        "api_key", "apiKey", "OPENAI_API_KEY", "WANDB_API_KEY", "OPENAI_API_KEY_2", "AZURE_STORAGE_KEY", "KEY",
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "access_token", "token",
        "GITHUB_TOKEN", "password", "db_password", "PGPASSWORD", "passphrase", "secret", "CLIENT_SECRET", "credential",
        "CREDENTIALS", "DB_PWD", "SMTP_PASS", "GITHUB_PAT", "SLACK_BOT_TOKEN", "refresh_token", "auth_token", "ssh_key",
        "private_key", "api_keys", "userPassword", "hub_token", "wandb_key", "COMPANY_TOKEN",
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
        "image_token", "assistant_token", "think_token", "cost_per_token", "first_token", "num_token", "cache_key",
        "label_key", "metric_key", "state_keys", "keys", "partition_key", "message_key", "password_length",
        "token_file", "API_KEY_FILE", "passwordless", "forward_pass", "pattern", "passport", "hotkey", "keynote",
        "turkey", "tokenised", "bypass", "compass", "author", "key_size", "secretariat", "top_k", "sortKey",
    ],
)  # fmt: skip
def test_other_names_are_not_secrets(name):
    assert not is_secret(name)


def test_every_spelling_of_a_secret_is_hidden_and_its_variable_is_listed(monkeypatch):
    import html
    import json
    from urllib.parse import quote, quote_plus

    value = "s/1 +<\"'\u00e9=="
    monkeypatch.setenv("MY_API_KEY", value)
    monkeypatch.setenv("OTHER_TOKEN", "never printed")
    secrets = secret_values()
    spellings = (str, repr, json.dumps, html.escape, quote, quote_plus, lambda text: quote(text, safe=""))
    for spell in spellings:
        assert "[hidden]" in hide(f"x {spell(value)} y", secrets), spell
    assert secrets.hidden == {"MY_API_KEY"}


def test_only_values_of_secrets_are_hidden(monkeypatch):
    monkeypatch.setenv("KEYBOARD_LAYOUT", "us-international")
    monkeypatch.setenv("MY_API_KEY", "quiet<river>")
    hidden = hide({"out": ["quiet<river> quiet&lt;river&gt; us-international"]}, secret_values())
    assert hidden == {"out": ["[hidden] [hidden] us-international"]}
