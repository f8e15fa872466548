"""NetworkPolicy of a job: its pods may connect to each other, few others to one port or two; egress is free."""

from __future__ import annotations

import json
from typing import Any

from rlhf_operator import names
from rlhf_operator.actions import Manifest
from rlhf_operator.resources import identity
from rlhf_operator.settings import JobNetworkPolicy
from rlhf_operator.snapshot import ObservedJob


def policy(job: ObservedJob, admitted: JobNetworkPolicy) -> Manifest:
    """Return the NetworkPolicy of all pods of the job; it is deleted with the job, and never changed."""
    own = {"matchLabels": {names.JOB_UID: job.uid}}
    ports_of = (
        (admitted.kube_ray, (names.DASHBOARD_PORT,)),
        (admitted.operator, (names.STATUS_PORT,)),
        (admitted.prometheus, (names.METRICS_PORT, names.RAY_METRICS_PORT)),
    )
    spec: dict[str, Any] = {
        "podSelector": own,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": own}]},
            *(
                {"from": list(peers), "ports": [{"port": port, "protocol": "TCP"} for port in ports]}
                for peers, ports in ports_of
                if peers  # an empty `from` would admit everybody
            ),
        ],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": identity.metadata(job, names.by_content(job.name, json.dumps(spec, sort_keys=True))),
        "spec": spec,
    }
