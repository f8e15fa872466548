"""Every error of the tree has the exit code of the contract and survives a trip between processes."""

import pickle

import pytest

from rlhf_api.exit_codes import ExitCode
from rlhf_trainer import errors

CODES = {
    errors.TrainerError: ExitCode.INTERNAL,
    errors.ConfigError: ExitCode.SPEC,
    errors.DataError: ExitCode.DATA,
    errors.EnvironmentProblem: ExitCode.ENVIRONMENT,
    errors.MemoryProblem: ExitCode.OUT_OF_MEMORY,
    errors.NumericsError: ExitCode.NUMERICS,
    errors.UserCodeError: ExitCode.USER_CODE,
    errors.CommunicationError: ExitCode.COMMUNICATION,
}


@pytest.mark.parametrize("kind", CODES, ids=lambda kind: kind.__name__)
def test_error(kind: type[errors.TrainerError]) -> None:
    back = pickle.loads(pickle.dumps(kind("spec.data.train: no rows")))
    assert type(back) is kind
    assert isinstance(back, errors.TrainerError)
    assert (str(back), back.exit_code) == ("spec.data.train: no rows", CODES[kind])
