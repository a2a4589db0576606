"""The figure of a dataset's tokens, and the steps of other settings."""

import pytest

from kit.data.dataset import Dataset, prepare
from kit.errors import InputError, KitError


@pytest.fixture
def dataset(recipe):
    return prepare(recipe)


def test_the_flow_accounts_for_every_token(dataset):
    flows = dataset.flow.flows
    read = sum(amount for source, _, amount in flows if source == "read")
    assert read == dataset.manifest["ledger"]["read_tokens"]
    trained = [amount for _, target, amount in flows if target == "trained on"]
    assert trained == [dataset.manifest["splits"]["train"]["loss_tokens"]]


def test_steps_with_the_recipes_settings_are_those_of_the_packed_rows(dataset, recipe):
    rows = dataset.manifest["splits"]["train"]["rows"]
    found = dataset.steps(epochs=1.0, batch=recipe.world_size).as_dict()
    assert found["rows"] == rows
    assert found["optimizer_steps"] == -(-rows // recipe.world_size)


def test_impossible_steps_are_errors(dataset, recipe):
    with pytest.raises(KitError, match="No document has 1 tokens or fewer"):
        dataset.steps(longest=1)
    with pytest.raises(InputError, match="does not divide"):
        dataset.steps(batch=recipe.world_size + 1)
    with pytest.raises(InputError, match="without a recipe"):
        Dataset(dataset.path).steps()
