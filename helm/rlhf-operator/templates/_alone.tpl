{{/*
Fails where another release's operator runs jobs that this one would run, too: each job would be done twice. A release
is found by the Role in which its operator makes RayJobs. Nothing is found without a cluster, as in `helm template`.
With rbac.create=false nobody looks: who installs may then have no right to read Roles.
*/}}
{{- define "rlhf-operator.requireAlone" -}}
{{- if .Values.rbac.create }}
{{- $roles := (lookup "rbac.authorization.k8s.io/v1" "ClusterRole" "" "").items | default list }}
{{- range .Values.watchNamespaces | default (list "") }}
{{- $roles = concat $roles ((lookup "rbac.authorization.k8s.io/v1" "Role" . "").items | default list) }}
{{- end }}
{{- range $roles }}
{{- $labels := .metadata.labels | default dict }}
{{- $isOperators := contains "\"rayjobs\"" (toJson .rules) }}
{{- if and $isOperators (hasPrefix (printf "%s-" $.Chart.Name) (index $labels "helm.sh/chart" | default "")) }}
{{- $release := index $labels "app.kubernetes.io/instance" | default "" }}
{{- $in := index (.metadata.annotations | default dict) "meta.helm.sh/release-namespace" | default $.Release.Namespace }}
{{- if or (ne $release $.Release.Name) (ne $in $.Release.Namespace) }}
{{- $whose := .metadata.namespace | empty | ternary "all namespaces" (printf "namespace %v" .metadata.namespace) }}
{{- fail (printf "the release %s of namespace %s runs the jobs of %s already, and two operators must not run one job: uninstall that release, or give each its own watchNamespaces" $release $in $whose) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
