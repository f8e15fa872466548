"""Calls of kubectl, which knows the cluster, the credentials and the rights of its user."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from rlhf_api.contract import DNS_LABEL
from rlhf_api.exit_codes import ExitCode
from rlhf_api.problems import one_line
from rlhf_operator.snapshot import Document

TIMEOUT: Final = "--request-timeout=10s"
REFUSED: Final = re.compile(r"^(?:Error from server|error from server) \((?P<reason>\w+)\): ")
"""What kubectl says of an answer of the API server, before the server's own words."""
ENDED: Final = re.compile(r"command terminated with exit code")
"""What it adds to the words of a program in a pod."""
LONGEST: Final = 1000


class KubectlError(Exception):
    """What a user is told in a sentence, with the exit code of its kind."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.ENVIRONMENT, reason: str = "") -> None:
        self.exit_code, self.reason = exit_code, reason
        """reason: the API server's word, such as NotFound or Forbidden; empty where it did not answer."""
        super().__init__(message)


@dataclass(frozen=True)
class Kubectl:
    """kubectl for one context and namespace; without them it is the current context, and that one's namespace."""

    context: str | None = None
    asked_namespace: str | None = None

    @cached_property
    def namespace(self) -> str:
        """The one that is asked about."""
        if self.asked_namespace:
            if not re.fullmatch(DNS_LABEL, self.asked_namespace):
                raise KubectlError(f"--namespace: {self.asked_namespace} is no name of a namespace", ExitCode.SPEC)
            return self.asked_namespace
        try:
            said = self.run("config", "view", "--minify", "--output=jsonpath={.contexts[0].context.namespace}")
        except KubectlError:  # no current context, as in a pod
            return "default"
        return said.decode().strip() or "default"

    def get(self, path: str) -> Document:
        """What the API server answers to a GET."""
        return self._document("get", "--raw", path)

    def find(self, path: str) -> Document | None:
        """The same; None where there is nothing, or the user may not look."""
        try:
            return self.get(path)
        except KubectlError as error:
            if error.reason not in ("NotFound", "Forbidden"):
                raise
            return None

    def create(self, path: str, manifest: Mapping[str, Any]) -> Document:
        """Make an object: as the server has it."""
        return self._document("create", "--raw", path, "--filename=-", text=json.dumps(manifest))

    def delete(self, path: str) -> None:
        self.run("delete", "--raw", path, TIMEOUT)

    def _document(self, *words: str, text: str = "") -> Document:
        answer = self.run(*words, TIMEOUT, text=text)
        try:
            document: Document = json.loads(answer)
        except ValueError:
            raise KubectlError(f"kubectl {words[0]}: the answer is no JSON: {_words(answer)}") from None
        return document

    def run(self, *words: str, text: str = "") -> bytes:
        """What kubectl prints. KubectlError with the first line of what it says if it fails."""
        with self.start(*words, stdin=subprocess.PIPE) as process:
            out, err = process.communicate(text.encode())
        require(process.returncode, err)
        return out

    def stream(self, *words: str) -> None:
        """Have kubectl print to this process's stdout; KubectlError if it fails."""
        with self.start(*words, stdin=subprocess.DEVNULL, stdout=None) as process:
            _, err = process.communicate()
        require(process.returncode, err)

    def start(
        self, *words: str, stdin: int = subprocess.DEVNULL, stdout: int | None = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        """A kubectl that runs. KubectlError where there is none."""
        context = [f"--context={self.context}"] if self.context else []
        try:
            return subprocess.Popen(["kubectl", *context, *words], stdin=stdin, stdout=stdout, stderr=subprocess.PIPE)
        except OSError as error:
            raise KubectlError(f"kubectl cannot be started: {error.strerror}; install it, and put it on PATH") from None


def require(code: int, said: bytes) -> None:
    """KubectlError for a kubectl that has failed and said this on stderr."""
    if not code:
        return
    told = [line for line in said.decode(errors="replace").splitlines() if line.strip() and not ENDED.match(line)]
    lines: Sequence[str] = told or [f"it ended with {code}"]
    for line in lines:
        if refused := REFUSED.match(line):
            words = f"the cluster refuses: {line[refused.end() :]}"
            raise KubectlError(one_line(words, LONGEST), reason=refused["reason"])
    raise KubectlError(f"kubectl: {_words(lines[-1].removeprefix('error: ').encode())}")


def _words(said: bytes) -> str:
    return one_line(said.decode(errors="replace"), LONGEST)
