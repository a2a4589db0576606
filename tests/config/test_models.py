import json
import os
import subprocess
import sys

import pytest

from kit.config import models
from kit.config.models import check_weights, find_config, load_tokenizer, source, use_hf_home
from kit.errors import InputError
from tests.conftest import REPOSITORY


def cached(home, commit="a" * 40, weights=True, name="some/model"):
    """A snapshot as huggingface_hub lays it out."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if weights:
        (snapshot / "model.safetensors").write_bytes(b"")
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    return snapshot


def test_a_folder_and_a_config_go_before_every_cache(tmp_path):
    cached(tmp_path / "hf")
    folder = tmp_path / "some" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert find_config("some/model").resolve() == folder / "config.json"
    assert find_config(str(folder / "config.json")) == folder / "config.json"
    assert find_config(str(tmp_path / "absent.json")) is None


def test_the_cache_of_the_profile_goes_before_the_users_own(tmp_path):
    own, pool = cached(tmp_path / "hf"), cached(tmp_path / "pool")
    assert find_config("some/model") == own / "config.json"
    assert find_config("some/model", str(tmp_path / "pool")) == pool / "config.json"
    assert find_config("some/model", str(tmp_path / "empty")) == own / "config.json"
    assert source("some/model", str(tmp_path / "pool")) == str(pool)


def test_a_cache_that_only_the_profile_names_is_found_without_hf_home(tmp_path):
    pool = cached(tmp_path / "pool")
    check_weights("some/model", str(tmp_path / "pool"))
    with pytest.raises(InputError, match="not found"):
        source("some/model")
    with use_hf_home(str(tmp_path / "pool")):
        assert source("some/model") == str(pool)
        code = "from kit.config.models import source; print(source('some/model'))"
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(pool)
    assert os.environ["HF_HOME"] == str(tmp_path / "hf") and "HF_HUB_CACHE" not in os.environ


def test_hf_hub_cache_is_honoured(tmp_path, monkeypatch):
    snapshot = cached(tmp_path / "elsewhere")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere" / "hub"))
    assert find_config("some/model") == snapshot / "config.json"


def test_the_snapshot_is_the_one_that_the_branch_names(tmp_path):
    first, second = cached(tmp_path / "hf", "a" * 40), cached(tmp_path / "hf", "b" * 40)
    (second.parents[1] / "refs" / "main").write_text("a" * 40)
    assert find_config("some/model") == first / "config.json"
    (second.parents[1] / "refs" / "main").unlink()
    os.utime(first / "config.json", (1, 1))
    assert find_config("some/model") == second / "config.json"


def test_weights_are_asked_for_where_the_job_looks(tmp_path):
    cached(tmp_path / "hf")
    check_weights("some/model")
    cached(tmp_path / "pool", weights=False)
    with pytest.raises(InputError, match=rf"no weights .*{tmp_path}/pool/hub.*HF_HUB_CACHE={tmp_path}/pool/hub"):
        check_weights("some/model", str(tmp_path / "pool"))


def test_a_model_that_is_nowhere_is_an_error_with_every_place(tmp_path):
    with pytest.raises(InputError) as caught:
        load_tokenizer("some/model")
    assert str(tmp_path / "hf" / "hub") in str(caught.value)
    with pytest.raises(InputError, match=r"pool/hub or .*hf/hub"):
        source("some/model", str(tmp_path / "pool"))


def test_the_embedded_model_is_found_from_any_folder(smollm2):
    assert find_config(models.EMBEDDED) == REPOSITORY / models.EMBEDDED / "config.json"
    assert source(models.EMBEDDED) == str(REPOSITORY / models.EMBEDDED)
