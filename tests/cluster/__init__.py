"""A real Kubernetes on one machine, for tests and benchmarks: no Docker, no registry, no systemd.

This folder is a library without tests; those are in `api/` and `pods/`, one folder a level. A program outside of the
tests (`benchmarks/operators.py`, `make cluster-demo`, `make accept`) imports it with the repository's root on its path:

    from tests.cluster.launch import cluster

    with cluster("api") as running:  # a client.Cluster
        running.kubectl("get", "nodes")

Two levels:

- `api`: etcd, API server, controllers, scheduler and KubeRay as processes of this user on free ports. No kubelet: the
  one Node is made up, pods are bound to it and stay Pending until a test writes their status. Needs openssl; about 10 s
  to start.
- `pods`: all of that, and containerd, kubelet, kube-proxy and CoreDNS on 1 to 4 nodes; nothing is faked. Each node is a
  set of namespaces (network, mounts, processes), so killing one process takes a node away with all that runs on it, and
  no packet leaves the machine. Needs root and a machine on which no other such cluster runs; about 15 s to start.

`python -m tests.cluster api FOLDER` (or `pods`) runs one in the foreground; FOLDER/admin.kubeconfig is the way in.
In tests: the fixtures of `conftest.py`, which give a `client.Cluster`. `kueue.py` adds a real Kueue to level api.

A pod at level pods whose image is `localhost/hostroot:test` sees the machine's /usr, the repository, the virtual
environment and its interpreter, read-only (`settings.mounts`), in an almost empty root (`images.py`): a change of the
code is in the next pod. What such a pod cannot show is that something is missing from a real image: the golden path's
operator runs from the image that `images.build` builds, and `pods/test_the_trainers_image.py` (slow) has both.

Not there: GPU devices (a node may be given invented ones), load balancers, dynamic volumes. NetworkPolicies are
enforced by `network_plugin.py`, for TCP and UDP in both directions, half a second after a pod has its address.
Level pods has run on cgroup v1 (hybrid); version 2 has its code path in `cgroups.py`, which has not run yet.

The programs are built from the modules in `go/` by `build.sh` and kept by content (`build.py`,
`make cluster-programs`): Kubernetes 1.36.1, etcd 3.6.8, KubeRay 1.6.1, CoreDNS 1.14.7, Helm 3.22.0, Kueue 0.15.0.
containerd, runc and the CNI plugins are those of Debian. Blackhole routes for the three networks stay when a cluster of
level pods ends, so that a client of a dead cluster fails at once and nothing is sent off the machine.
"""
