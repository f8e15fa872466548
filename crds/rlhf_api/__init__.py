"""The contract of rlhf-operator: the typed spec and status of a job, its names and its exit codes."""

from rlhf_api.exit_codes import ExitCode
from rlhf_api.files import dump, load
from rlhf_api.job import Job
from rlhf_api.names import API_VERSION, GROUP, KIND, VERSION, Role
from rlhf_api.problems import Problem, SpecError
from rlhf_api.status import Status

__all__ = [
    "API_VERSION",
    "GROUP",
    "KIND",
    "VERSION",
    "ExitCode",
    "Job",
    "Problem",
    "Role",
    "SpecError",
    "Status",
    "dump",
    "load",
]
