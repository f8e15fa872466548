"""Calls of the program kubectl, which reaches the cluster with its user's credentials and rights."""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, Final

from rlhf_api.contract import DNS_LABEL
from rlhf_api.exit_codes import ExitCode
from rlhf_api.problems import one_line
from rlhf_operator.snapshot import Document

TIMEOUT: Final = "--request-timeout=10s"
SERVER_ERROR: Final = re.compile(r"^(?:Error from server|error from server) \((?P<reason>\w+)\): ")
"""Pattern of the prefix that kubectl puts before an error of the API server."""
COMMAND_ENDED: Final = re.compile(r"command terminated with exit code")
"""Pattern of the line that kubectl adds to stderr after a program that it ran in a pod has failed."""
MAX_MESSAGE: Final = 1000


class KubectlError(Exception):
    """Error in one sentence for the user, with the exit code of its kind."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.ENVIRONMENT, reason: str = "") -> None:
        self.exit_code, self.reason = exit_code, reason
        """Exit code of this program for the error; reason: the API server's word, such as NotFound, or empty."""
        super().__init__(message)

    @property
    def is_final(self) -> bool:
        """Whether the same request would fail again: its object does not exist, or the user has no right to it."""
        return self.reason in ("NotFound", "Forbidden")


@dataclass(frozen=True)
class Kubectl:
    """Caller of kubectl for one context and namespace; by default the current context and its namespace."""

    context: str | None = None
    requested_namespace: str | None = None

    @cached_property
    def namespace(self) -> str:
        """Return the requested namespace, or that of the context."""
        if self.requested_namespace:
            if not re.fullmatch(DNS_LABEL, self.requested_namespace):
                raise KubectlError(f"--namespace: {self.requested_namespace} is no name of a namespace", ExitCode.SPEC)
            return self.requested_namespace
        try:
            namespace = self.run("config", "view", "--minify", "--output=jsonpath={.contexts[0].context.namespace}")
        except KubectlError:  # no current context, as in a pod
            return "default"
        return namespace.decode().strip() or "default"

    def get(self, path: str) -> Document:
        """Return the API server's answer to a GET of a path."""
        return self._document("get", "--raw", path)

    def find(self, path: str) -> Document | None:
        """Return the API server's answer to a GET; None if there is no such object, or the user may not read it."""
        try:
            return self.get(path)
        except KubectlError as error:
            if not error.is_final:
                raise
            return None

    def items(self, path: str) -> list[Document] | None:
        """Return the objects of a list; None if the server has no such list, or the user may not read it."""
        found = self.find(path)
        return None if found is None else found.get("items") or []

    def create(self, path: str, manifest: Mapping[str, Any]) -> Document:
        """Create an object, and return it as the server has it."""
        return self._document("create", "--raw", path, "--filename=-", text=json.dumps(manifest))

    def apply(self, manifest: Mapping[str, Any], *options: str) -> Document:
        """Apply an object by server-side apply in the namespace, and return it as the server has it."""
        words = ("--server-side", "--field-manager=rlhf-submit", f"--namespace={self.namespace}", "--output=json")
        return self._document("apply", *words, *options, "--filename=-", text=json.dumps(manifest))

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
        """Run kubectl and return its stdout. KubectlError, with a message from stderr, if kubectl fails."""
        with self.start(*words, stdin=subprocess.PIPE) as process:
            out, err = process.communicate(text.encode())
        require_success(process.returncode, err)
        return out

    def stream(self, *words: str) -> None:
        """Run kubectl, which prints to this process's stdout. KubectlError if kubectl fails."""
        with self.start(*words, stdin=subprocess.DEVNULL, stdout=None) as process:
            _, err = process.communicate()
        require_success(process.returncode, err)

    def start(
        self, *words: str, stdin: int = subprocess.DEVNULL, stdout: int | None = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        """Start kubectl. KubectlError if it is not installed."""
        context = [f"--context={self.context}"] if self.context else []
        try:
            return subprocess.Popen(["kubectl", *context, *words], stdin=stdin, stdout=stdout, stderr=subprocess.PIPE)
        except OSError as error:
            raise KubectlError(f"kubectl cannot be started: {error.strerror}; install it, and put it on PATH") from None


def require_success(code: int, stderr: bytes) -> None:
    """Raise KubectlError, with a message from stderr, if kubectl's exit code is not 0."""
    if not code:
        return
    printed = stderr.decode(errors="replace").splitlines()
    errors = [line for line in printed if line.strip() and not COMMAND_ENDED.match(line)]
    lines: Sequence[str] = errors or [f"it ended with {code}"]
    for line in lines:
        if refused := SERVER_ERROR.match(line):
            words = f"the cluster refuses: {line[refused.end() :]}"
            raise KubectlError(one_line(words, MAX_MESSAGE), reason=refused["reason"])
    begins = (place for place, line in enumerate(lines) if line.startswith("error: ") or " is invalid: " in line)
    first = next(begins, len(lines) - 1)
    fields = takewhile(lambda line: line.startswith(("- ", "* ")), lines[first + 1 :])
    message = " ".join([lines[first].removeprefix("error: "), *fields])
    # kubectl tries this address if there is no current context
    hint = "; choose a cluster by kubectl config use-context" if "localhost:8080" in message else ""
    raise KubectlError(f"kubectl: {_words(message.encode())}{hint}")


def _words(output: bytes) -> str:
    return one_line(output.decode(errors="replace"), MAX_MESSAGE)
