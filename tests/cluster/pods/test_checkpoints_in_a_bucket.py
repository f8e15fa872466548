"""Checkpoints of real pods in a bucket of S3 (moto), with a key from a Secret that is replaced while the job runs."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import botocore.session
import pytest

from tests.cluster import chart, golden_path
from tests.cluster.client import Cluster
from tests.cluster.golden_path import SFT, Document
from tests.cluster.pods.test_kills_on_pods import is_past_checkpoint
from tests.cluster.settings import HOST_IP
from tests.trainer.conftest import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BUCKET, SECRET, USER = "bucket", "bucket-key", "trainer"
STEPS, SAVED_EVERY = 100, 5
FREE_REQUESTS = 4
"""Requests that need no key: those by which the first user, its right, its key and the bucket are made."""
RIGHT = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}


class Bucket:
    """A server of S3 and IAM that takes one key at a time."""

    def __init__(self, url: str) -> None:
        self.url, self._key = url, {"AccessKeyId": "none", "SecretAccessKey": "none"}
        iam = self._client("iam")
        iam.create_user(UserName=USER)
        iam.put_user_policy(UserName=USER, PolicyName="all", PolicyDocument=json.dumps(RIGHT))
        self._key = iam.create_access_key(UserName=USER)["AccessKey"]
        self._client("s3").create_bucket(Bucket=BUCKET)

    def _client(self, service: str) -> Any:
        key = {"aws_access_key_id": self._key["AccessKeyId"], "aws_secret_access_key": self._key["SecretAccessKey"]}
        session = botocore.session.Session()
        return session.create_client(service, region_name="us-east-1", endpoint_url=self.url, **key)

    @property
    def secret(self) -> Document:
        """Secret with the key."""
        data = {"id": self._key["AccessKeyId"], "key": self._key["SecretAccessKey"]}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": data}

    def make_new_key(self) -> str:
        """Make another key: the id of the old one, which still works."""
        old, self._key = self._key, self._client("iam").create_access_key(UserName=USER)["AccessKey"]
        return str(old["AccessKeyId"])

    def delete_key(self, key: str) -> None:
        self._client("iam").delete_access_key(UserName=USER, AccessKeyId=key)

    def objects(self) -> list[str]:
        """Names of all objects."""
        pages = self._client("s3").get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return [each["Key"] for page in pages for each in page.get("Contents", [])]


@contextmanager
def bucket() -> Iterator[Bucket]:
    """A bucket that pods reach at the machine's address to their network."""
    with socket.socket() as free:
        free.bind((HOST_IP, 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", str(port)]
    environment = {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": str(FREE_REQUESTS)}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port)
        yield Bucket(f"http://{HOST_IP}:{port}")
    finally:
        server.kill()
        server.wait()


def test_a_replaced_key_costs_no_step_before_the_checkpoint(pods_cluster: Cluster, pods_namespace: str) -> None:
    """Pods keep the old key; the attempt ends at a checkpoint that it may not save, and the next has the new key."""
    chart.install(pods_cluster)
    pods_cluster.offer_volumes()
    secrets = f"/api/v1/namespaces/{pods_namespace}/secrets"
    with bucket() as store:
        pods_cluster.expect("POST", secrets, store.secret)
        job = golden_path.shortened({SFT: STEPS}, every_steps=SAVED_EVERY)
        job[SFT]["spec"]["checkpoint"]["storage"] = f"s3://{BUCKET}/runs"
        keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
        job[SFT]["spec"]["runtime"] = {
            "env": [
                {"name": "AWS_ENDPOINT_URL", "value": store.url},
                {"name": "AWS_DEFAULT_REGION", "value": "us-east-1"},
                *({"name": name, "secret": {"name": SECRET, "key": key}} for name, key in keys.items()),
            ]
        }
        golden_path.apply(pods_cluster, pods_namespace, job)
        found = golden_path.until(pods_cluster, pods_namespace, SFT, is_past_checkpoint, 600)
        assert found["checkpoint"]["uri"].startswith(f"s3://{BUCKET}/runs/{pods_namespace}/output/{SFT}/step-")
        old = store.make_new_key()
        pods_cluster.expect("PATCH", f"{secrets}/{SECRET}", store.secret)
        store.delete_key(old)
        ended = golden_path.succeeded(pods_cluster, pods_namespace, SFT)
        names = store.objects()
    first, second = ended["attempts"]
    print(first["message"], first["firstStep"], first["lastStep"], second["firstStep"])
    assert (first["outcome"], first["reason"], second["outcome"]) == ("Failed", "Environment", "Succeeded")
    assert golden_path.saved_step(found) <= second["firstStep"] <= first["lastStep"]
    assert f"step-{STEPS:06}" in "".join(names)
    folder = pods_cluster.folder_of_claim(pods_namespace, f"{SFT}-output") / SFT
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    assert not (folder / "checkpoints").exists()
