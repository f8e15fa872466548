"""The chart's roles allow what the operator's code does, and nothing else."""

from collections import defaultdict
from collections.abc import Iterable

import pytest

from rlhf_operator.cluster import resources
from tests.helm.rendering import NAMESPACE, RELEASE, Helm, Manifest, Values, the

WATCH = {"list", "watch"}
LOOK = {"get", *WATCH}
NEEDED = {
    ("rlhf.hybridflow.io", "rlhfjobs"): LOOK | {"delete"},  # when its time to live is over
    ("rlhf.hybridflow.io", "rlhfjobs/status"): {"patch"},  # no finalizers: no owner reference blocks a deletion
    ("ray.io", "rayjobs"): LOOK | {"create", "delete"},
    ("ray.io", "rayclusters"): {"get", "patch"},  # the size of elastic pools
    ("", "pods"): LOOK | {"create", "delete"},  # sandboxes, and pods whose node is gone
    ("batch", "jobs"): {"get", "create"},  # which read the shapes of models
    ("", "configmaps"): {"get", "create"},
    ("", "services"): {"get", "create"},  # of sandboxes
    ("", "persistentvolumeclaims"): LOOK | {"create", "patch"},  # patch: spec.storage.retain
    ("networking.k8s.io", "networkpolicies"): {"get", "create"},
    ("policy", "poddisruptionbudgets"): {"get", "create"},
    ("events.k8s.io", "events"): {"list", "create", "patch"},  # list: why no pods are made
    ("kueue.x-k8s.io", "workloads"): WATCH,
}
"""(API group, resource) -> verbs, in each namespace with jobs."""
NODES = {
    ("", "nodes"): WATCH,
    ("scheduling.k8s.io", "priorityclasses"): WATCH,
    ("resource.k8s.io", "resourceslices"): WATCH,
    ("karpenter.sh", "nodepools"): {"list"},
}
LEASES = {("coordination.k8s.io", "leases"): {"get", "create", "update"}}
"""In the namespace of the release."""
CLUSTER_ROLE = f"{NAMESPACE}:{RELEASE}"
NAMESPACED: Values = {"watchNamespaces": ["team-a", "team-b"]}

Rights = dict[tuple[str, str], set[str]]


def rights(roles: Iterable[Manifest]) -> Rights:
    """What roles allow."""
    found: Rights = defaultdict(set)
    for rule in (rule for role in roles for rule in role["rules"]):
        for key in ((group, resource) for group in rule["apiGroups"] for resource in rule["resources"]):
            found[key] |= set(rule["verbs"])
    return dict(found)


def bound(manifests: list[Manifest]) -> list[Manifest]:
    """The roles that a binding gives to somebody."""
    given = {
        (each["kind"].removesuffix("Binding"), each["metadata"]["name"]) for each in manifests if "roleRef" in each
    }
    return [each for each in manifests if (each["kind"], each["metadata"]["name"]) in given]


def test_it_may_do_in_all_namespaces_what_its_code_does(helm: Helm) -> None:
    manifests = helm.template()
    assert rights([the(manifests, "ClusterRole", CLUSTER_ROLE)]) == {**NEEDED, **NODES}


def test_nodes_are_not_shown_to_it_where_that_is_not_wished(helm: Helm) -> None:
    manifests = helm.template({"rbac": {"readNodes": False}})
    assert rights([the(manifests, "ClusterRole", CLUSTER_ROLE)]) == NEEDED


def test_it_reads_the_state_of_no_other_program(helm: Helm) -> None:
    (role,) = (each for each in bound(helm.template()) if each["kind"] == "ClusterRole")
    named = [rule["resourceNames"] for rule in role["rules"] if "resourceNames" in rule]
    assert named == [["cluster-autoscaler-status"]]
    assert not [rule for rule in role["rules"] if "nodepools" in rule["resources"] and rule["verbs"] != ["list"]]


def test_it_makes_policies_of_sandboxes_where_jobs_get_none(helm: Helm) -> None:
    manifests = helm.template({"jobNetworkPolicy": {"enabled": False}})
    assert rights([the(manifests, "ClusterRole", CLUSTER_ROLE)]) == {**NEEDED, **NODES}


def test_with_namespaces_it_has_a_role_in_each_and_none_beyond(helm: Helm) -> None:
    given = bound(helm.template(NAMESPACED))
    assert {role["kind"] for role in given} == {"Role"}
    assert {role["metadata"]["namespace"] for role in given} == {"team-a", "team-b", NAMESPACE}
    for namespace in ("team-a", "team-b"):
        assert rights(role for role in given if role["metadata"]["namespace"] == namespace) == NEEDED


@pytest.mark.parametrize("values", [{}, NAMESPACED])
def test_it_holds_its_own_lease_only(helm: Helm, values: Values) -> None:
    manifests = helm.template(values)
    role = the(manifests, "Role", f"{RELEASE}-lease")
    assert role["metadata"]["namespace"] == NAMESPACE
    assert rights([role]) == LEASES
    named = [rule for rule in role["rules"] if set(rule["verbs"]) & {"get", "update"}]
    assert [rule["resourceNames"] for rule in named] == [[RELEASE]]


def test_without_an_election_it_has_no_right_to_leases(helm: Helm) -> None:
    manifests = helm.template({"leaderElection": {"enabled": False}})
    assert not set(rights(bound(manifests))) & set(LEASES)


@pytest.mark.parametrize("values", [{}, NAMESPACED])
def test_no_secret_and_no_wildcard_is_in_any_role(helm: Helm, values: Values) -> None:
    found = rights(each for each in helm.template(values) if "rules" in each)
    assert found
    assert not [key for key in found if key[1].split("/")[0] in {"secrets", "*"} or key[0] == "*"]
    assert not [key for key, verbs in found.items() if verbs & {"*", "escalate", "bind", "impersonate"}]


@pytest.mark.parametrize("values", [{}, NAMESPACED])
def test_rights_go_to_the_operators_account_alone(helm: Helm, values: Values) -> None:
    account = {"kind": "ServiceAccount", "name": RELEASE, "namespace": NAMESPACE}
    bindings = [each for each in helm.template(values) if "roleRef" in each]
    assert bindings
    assert all(binding["subjects"] == [account] for binding in bindings)


def test_every_kind_that_the_code_knows_is_allowed_and_no_other() -> None:
    known = [each for each in vars(resources).values() if isinstance(each, resources.Resource)]
    used = {(each.group, each.plural) for each in known}
    allowed = {(group, resource) for group, resource in {**NEEDED, **NODES, **LEASES} if "/" not in resource}
    assert used == allowed


def test_users_see_jobs_with_view_and_change_them_with_edit(helm: Helm) -> None:
    manifests = helm.template()
    group = "rlhf.hybridflow.io"
    view, edit = (the(manifests, "ClusterRole", f"{CLUSTER_ROLE}-{name}") for name in ("view", "edit"))
    aggregated = "rbac.authorization.k8s.io/aggregate-to-"
    assert {f"{aggregated}{name}" for name in ("view", "edit", "admin")} <= set(view["metadata"]["labels"])
    assert f"{aggregated}view" not in edit["metadata"]["labels"]
    assert rights([view]) == {(group, "rlhfjobs"): LOOK, (group, "rlhfjobs/status"): LOOK}
    assert rights([edit]) == {(group, "rlhfjobs"): {"create", "update", "patch", "delete", "deletecollection"}}
