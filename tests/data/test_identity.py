import hashlib
import json
import os
import shutil
from dataclasses import replace

import pytest

from kit.data import identity
from kit.data.dataset import find_prepared, prepare
from kit.data.documents import Documents
from kit.data.identity import FORMAT_VERSION, dataset_digest
from kit.data.sources import find_files
from kit.errors import InputError

# Of each FORMAT_VERSION, sha256 over the Arrow files of the project's own sample, for each way to fit long documents.
PACKED_BYTES = {
    1: {
        "truncate": "5e3bc2349bcfe3bfe48b19a44680ba0aa81137a69b1847a0370c04e387e07616",
        "split": "c189093ff503dff58ac5803dfa6dc03eb9681534600e4d6942cc8113efdaa63d",
    }
}
PACKED_BYTES[2] = PACKED_BYTES[3] = PACKED_BYTES[1]  # the sample has no weights, tools or reasoning


@pytest.mark.parametrize("overlong", ["truncate", "split"])
def test_rows_do_not_change_without_a_new_format_version(recipe, overlong):
    made = prepare(recipe.override(**{"data.overlong": overlong}), engine="tokenizers")
    digest = hashlib.sha256()
    for path in sorted(made.path.glob("*/*.arrow")):
        digest.update(path.read_bytes())
    assert digest.hexdigest() == PACKED_BYTES.get(FORMAT_VERSION, {}).get(overlong), (
        "The same inputs gave other rows than before. If that is intended, raise FORMAT_VERSION in "
        "kit/data/identity.py by one and add its digests to PACKED_BYTES, so that no old folder is taken for a new one."
    )


def test_another_format_version_has_another_digest(recipe, tmp_path, monkeypatch):
    found = find_files(recipe.data.source)
    before = dataset_digest(recipe, found, tmp_path)
    assert dataset_digest(recipe, found, tmp_path) == before
    monkeypatch.setattr(identity, "FORMAT_VERSION", FORMAT_VERSION + 1)
    assert dataset_digest(recipe, found, tmp_path) != before


def test_the_digest_does_not_depend_on_the_source_text_of_modules(recipe, tmp_path, monkeypatch):
    read = []
    digest_file = hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda stream, kind: read.append(stream.name) or digest_file(stream, kind)
    )
    dataset_digest(recipe, find_files(recipe.data.source), tmp_path)
    assert read and not [name for name in read if name.endswith(".py")]


@pytest.fixture
def chats(recipe, tmp_path):
    """A recipe on a file of chats that changed long ago, so that its digest is kept."""
    source = tmp_path / "chats.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"Question {i}?"}, {"role": "assistant", "content": f"Answer {i}."}]}
        for i in range(9)
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(source, (1e9, 1e9))
    return recipe.override(**{"data.source": str(source), "data.eval_fraction": 0.0})


def test_find_prepared_returns_what_prepare_made(chats, tmp_path):
    source = tmp_path / "chats.jsonl"
    assert find_prepared(chats) is None
    first = prepare(chats)
    assert find_prepared(chats) == first
    assert find_prepared(chats.override(**{"data.loss": "all"})) is None
    source.write_text(source.read_text().replace("Answer 1.", "Answer 9."))  # same size, other bytes
    assert find_prepared(chats) is None
    second = prepare(chats)
    assert second != first and find_prepared(chats) == second
    source.write_text(source.read_text().replace("Answer 9.", "Answer 1.", 1))
    assert find_prepared(chats) == first  # other time stamp, same bytes


def test_a_folder_of_another_format_version_is_not_found(chats, monkeypatch):
    prepare(chats)
    monkeypatch.setattr(identity, "FORMAT_VERSION", FORMAT_VERSION + 1)
    assert find_prepared(chats) is None


def test_recipes_with_equal_inputs_share_one_folder(chats):
    first = prepare(chats)
    other = chats.override(name="other", **{"schedule.lr": 1e-3})
    assert find_prepared(other).path == prepare(other).path == first.path


def test_without_its_data_no_folder_is_found(chats, tmp_path):
    prepare(chats)
    (tmp_path / "chats.jsonl").unlink()
    assert find_prepared(chats) is None


def test_find_prepared_does_not_read_unchanged_data(chats, monkeypatch):
    made = prepare(chats)
    digest_file, read = hashlib.file_digest, []

    def spy(stream, kind):
        read.append(stream.name)
        return digest_file(stream, kind)

    monkeypatch.setattr(hashlib, "file_digest", spy)
    assert find_prepared(chats) == made
    assert chats.data.source not in read


def test_data_are_not_read_without_a_folder_of_these_settings(chats, monkeypatch):
    monkeypatch.setattr(hashlib, "file_digest", lambda stream, kind: pytest.fail(f"{stream.name} was read"))
    assert find_prepared(chats) is None


def test_find_prepared_works_in_a_read_only_folder(chats, monkeypatch, tmp_path):
    made = prepare(chats)
    os.utime(tmp_path / "chats.jsonl", (1e9 + 5, 1e9 + 5))

    def refuse(path, value):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(identity.files, "write_json", refuse)
    assert find_prepared(chats) == made


def test_documents_of_no_parts_are_empty():
    assert len(Documents([]).length) == 0


def test_the_cache_that_a_profile_names_is_where_prepare_looks(recipe, tiny, local, tmp_path):
    snapshot = tmp_path / "pool" / "hub" / "models--some--tiny" / "snapshots" / ("a" * 40)
    shutil.copytree(tiny, snapshot)
    pool = replace(local, paths=replace(local.paths, hf_home=str(tmp_path / "pool")))
    job = recipe.override(**{"model.name": "some/tiny"})
    with pytest.raises(InputError, match="not found"):
        prepare(job, tmp_path / "out")
    made = prepare(job, tmp_path / "out", cluster=pool)
    assert find_prepared(job, tmp_path / "out", pool) == made
    assert find_prepared(job, tmp_path / "out") is None
