{{/*
Fails where another release's operator runs jobs that this one would run, too: each job would be done twice. A release
is found by the Role in which its operator makes RayJobs and writes the status of jobs, whoever has rendered it.
Nothing is found without a cluster, as in `helm template`. With rbac.create=false or rbac.lookForOthers=false nobody
looks: who installs may then have no right to read Roles.
*/}}
{{- define "rlhf-operator.requireAlone" -}}
{{- if and .Values.rbac.create .Values.rbac.lookForOthers }}
{{- $roles := (lookup "rbac.authorization.k8s.io/v1" "ClusterRole" "" "").items | default list }}
{{- range .Values.watchNamespaces | default (list "") }}
{{- $roles = concat $roles ((lookup "rbac.authorization.k8s.io/v1" "Role" . "").items | default list) }}
{{- end }}
{{- range $roles }}
{{- $labels := .metadata.labels | default dict }}
{{- $rules := toJson .rules }}
{{- if and (contains "\"rayjobs\"" $rules) (contains "[\"rlhfjobs/status\"]" $rules) (not .aggregationRule) }}
{{- $release := index $labels "app.kubernetes.io/instance" | default .metadata.name }}
{{- $named := .metadata.name | regexFind "^[^:]+:" | trimSuffix ":" }}{{/* as of a ClusterRole that Argo CD makes */}}
{{- $in := index (.metadata.annotations | default dict) "meta.helm.sh/release-namespace" | default $named }}
{{- if or (ne $release $.Release.Name) (ne $in $.Release.Namespace) }}
{{- $whose := .metadata.namespace | empty | ternary "all namespaces" (printf "namespace %v" .metadata.namespace) }}
{{- fail (printf "the release %s of namespace %s runs the jobs of %s already, and two operators must not run one job: uninstall that release, or give each its own watchNamespaces" $release ($in | default "(unknown)") $whose) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
