"""Nodes that worker pods may go to, by the rules of the scheduler."""

from contextlib import suppress

from rlhf_api.checks.pod_template import NodeTerm, PodSpec, Requirement
from rlhf_operator.snapshot import ObservedNode


def suits(node: ObservedNode, pod: PodSpec, resource: str = "") -> bool:
    """Whether a pod may go to a node. resource: GPU resource of the pod, whose taint worker pods tolerate."""
    return not obstacle(node, pod, resource)


def obstacle(node: ObservedNode, pod: PodSpec, resource: str = "") -> str:
    """Return what keeps a pod from a node, with what would help; empty if the pod may go there."""
    if not node.ready:
        return "not ready"
    if not node.schedulable:
        return "cordoned, which kubectl uncordon ends"
    if not pod.node_selector.items() <= dict(node.labels).items():
        return "without a label that nodeSelector of the worker's template asks for"
    required = pod.affinity.node_affinity.required
    if required and not any(_matches(node, term) for term in required.node_selector_terms):
        return "left out by nodeAffinity of the worker's template"
    for key, value, effect in node.taints:
        # Worker pods that ask for GPUs tolerate the taint that keeps others off these nodes.
        if effect in ("NoSchedule", "NoExecute") and key != resource and not _tolerated(pod, key, value, effect):
            taint = f"{key}{'=' * bool(value)}{value}:{effect}"
            return f"tainted {taint}, which spec.runtime.worker.template or worker.template of the chart can tolerate"
    return ""


def _matches(node: ObservedNode, term: NodeTerm) -> bool:
    """Whether a node matches all requirements of a node selector term; a term without requirements matches none."""
    required = [(each, node.labels.get(each.key)) for each in term.match_expressions]
    required += [(each, node.name) for each in term.match_fields]
    return bool(required) and all(_holds(each, value) for each, value in required)


def _holds(requirement: Requirement, value: str | None) -> bool:
    match requirement.operator:
        case "In":
            return value in requirement.values
        case "NotIn":
            return value not in requirement.values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    with suppress(ValueError):  # Gt, Lt: of whole numbers
        actual, bound = int(value or ""), int("".join(requirement.values))
        return actual > bound if requirement.operator == "Gt" else actual < bound
    return False


def _tolerated(pod: PodSpec, key: str, value: str, effect: str) -> bool:
    return any(
        each.effect in (None, effect)
        and each.key in (None, key)
        and (each.operator == "Exists" or (each.value or "") == value)
        for each in pod.tolerations
    )
