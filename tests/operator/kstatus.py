"""The generic rules of kstatus (kubernetes-sigs/cli-utils, pkg/kstatus), by which Flux judges an object."""

from typing import Any


def state(document: dict[str, Any]) -> str:
    """Terminating, InProgress, Failed or Current."""
    metadata, status = document["metadata"], document.get("status", {})
    if metadata.get("deletionTimestamp"):
        return "Terminating"
    observed = status.get("observedGeneration")
    if observed is not None and observed != metadata["generation"]:
        return "InProgress"
    conditions = status.get("conditions", [])
    for each in conditions:
        if (each["type"], each["status"]) == ("Reconciling", "True"):
            return "InProgress"
        if (each["type"], each["status"]) == ("Stalled", "True"):
            return "Failed"
    ready = [each["status"] for each in conditions if each["type"] == "Ready"]
    return "Current" if ready in ([], ["True"]) else "InProgress"
