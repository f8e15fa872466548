#!/usr/bin/env bash
# Builds programs of the test cluster from the Go modules beside this file: build.sh FOLDER GROUP ...
# Groups: api, kuberay, node (kubelet, kube-proxy, pause), dns, helm, kueue. `python -m tests.cluster.build` calls it and keeps the result.
set -euo pipefail
bin=$(mkdir -p "$1" && cd "$1" && pwd)
shift
here=$(cd "$(dirname "$0")/go" && pwd)
export CGO_ENABLED=0 GOFLAGS="-mod=readonly -buildvcs=false" GOTOOLCHAIN=local

build() { # module package output [linker flags]
    local start=$SECONDS
    (cd "$here/$1" && go build -p "${JOBS:-$(nproc)}" -ldflags "-s -w ${4:-}" -o "$bin/$3" "$2")
    printf '%-26s %4d s %4d MB\n' "$3" $((SECONDS - start)) $(($(stat -c %s "$bin/$3") / 1000000))
}

manifests() { # module path-of-module folder-in-it output
    local source
    source=$(cd "$here/$1" && go list -m -f '{{.Dir}}' "$2")
    mkdir -p "$bin/$4"
    cp -r --no-preserve=mode "$source/$3/." "$bin/$4"
}

# Without a version the server calls itself v0.0.0-master and charts with a kubeVersion refuse to install.
kube=$(cd "$here/kube" && go list -m -f '{{.Version}}' k8s.io/kubernetes)
IFS=. read -r major minor _ <<< "${kube#v}"
stamp=""
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    stamp+=" -X $package.gitVersion=$kube -X $package.gitMajor=$major -X $package.gitMinor=$minor -X $package.gitTreeState=clean"
done

for group in "$@"; do
    case $group in
        api)
            build kube go.etcd.io/etcd/server/v3 etcd
            for name in kube-apiserver kube-controller-manager kube-scheduler kubectl; do
                build kube k8s.io/kubernetes/cmd/$name $name "$stamp"
            done
            ;;
        kuberay)
            build kuberay github.com/ray-project/kuberay/ray-operator kuberay-operator
            manifests kuberay github.com/ray-project/kuberay/ray-operator config/crd/bases kuberay-crds
            ;;
        node)
            for name in kubelet kube-proxy; do build kube k8s.io/kubernetes/cmd/$name $name "$stamp"; done
            build pause . pause
            ;;
        dns) build coredns . coredns ;;
        helm) build helm helm.sh/helm/v3/cmd/helm helm ;;
        kueue)
            build kueue sigs.k8s.io/kueue/cmd/kueue kueue
            manifests kueue sigs.k8s.io/kueue config kueue-config
            ;;
        *)
            echo "unknown group $group" >&2
            exit 2
            ;;
    esac
done
