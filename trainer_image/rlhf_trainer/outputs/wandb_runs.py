"""Runs in Weights & Biases; WANDB_API_KEY holds the key, WANDB_BASE_URL the address of a private server."""

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_api.files import document_of
from rlhf_api.job import Job
from rlhf_api.spec.outputs import WandB
from rlhf_api.status import Phase
from rlhf_trainer.errors import EnvironmentProblem

KEY, URL = "WANDB_API_KEY", "WANDB_BASE_URL"
ANSWER_SECONDS = 10.0
VARIABLES = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
"""Environment variables for W&B's client; a value that the user has set takes precedence."""


class WandBRuns:
    """Tracking service that records each job as a run in a project of W&B; unsent files lie in DIR/<job>/wandb."""

    def __init__(self, field: str, settings: WandB, folder: Path) -> None:
        self.field, self._settings, self._folder = field, settings, folder
        self.target: Mapping[str, Any] = settings.model_dump(mode="json")
        self._run: Any = None

    def check(self) -> None:
        wandb()
        if self._settings.mode == "Offline":
            return
        if not (key := os.environ.get(KEY)):
            raise EnvironmentProblem(f"{self.field}: {KEY} is not set; mode Offline needs none")
        import httpx  # a second that a job without trackers does not need

        url = os.environ.get(URL, "https://api.wandb.ai").strip().rstrip("/")
        question = {"query": "query { viewer { id } }"}
        try:
            answer = httpx.post(f"{url}/graphql", auth=("api", key), json=question, timeout=ANSWER_SECONDS)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EnvironmentProblem(f"{self.field}: {url} does not answer: {type(error).__name__}") from error
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise EnvironmentProblem(f"{self.field}: {url} refuses {KEY}")

    def create(self, job: Job) -> str:  # noqa: ARG002 the id is all that is made before the run is opened
        return uuid.uuid4().hex

    def go_on(self, job: Job, run: str) -> None:
        """Open W&B's run of this id; `wandb sync` joins the files of several attempts by the id."""
        client = wandb()
        document = document_of(job)
        document["spec"].pop("runtime")  # settings of pods
        self._run = client.init(
            project=self._settings.project,
            entity=self._settings.entity,
            name=job.name,
            id=run,
            resume="allow" if self._settings.mode == "Online" else None,
            mode=self._settings.mode.lower(),
            dir=str(self._folder),
            config=document,
            settings=client.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                finish_timeout=10.0,  # less than LAST_SECONDS, the job's own wait
                finish_timeout_raises=True,
            ),
        )

    def send(self, records: Sequence[Mapping[str, float]]) -> None:
        for record in records:
            values = {name: value for name, value in record.items() if name != "step"}
            self._run.log(values, step=int(record["step"]))

    def close(self, phase: Phase) -> None:
        self._run.finish(exit_code=0 if phase == "Succeeded" else 1)
        wandb().teardown()  # waits for its process, which writes the file


def wandb() -> Any:
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    import wandb as package

    return package
