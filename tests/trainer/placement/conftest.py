"""The models of PPO, which tests of a rollout pool share."""

from collections.abc import Mapping

import pytest

from rlhf_api.names import Role
from tests.trainer.tiny import save_tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Role, str]:
    root = tmp_path_factory.mktemp("models")
    language, reward = save_tiny(root / "language", seed=3), save_tiny(root / "reward", seed=4, labels=1)
    return {"actor": language, "reference": language, "critic": reward, "reward": reward}
