{{- define "rlhf-operator.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "rlhf-operator.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains (include "rlhf-operator.name" .) .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "rlhf-operator.name" .) | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "rlhf-operator.selectorLabels" -}}
app.kubernetes.io/name: {{ include "rlhf-operator.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "rlhf-operator.labels" -}}
{{- include "rlhf-operator.labelsAnd" (list . dict) }}
{{- end }}

{{/* The chart's labels, those of one object and those of all, in this order where they share a key. */}}
{{- define "rlhf-operator.labelsAnd" -}}
{{- $root := first . }}
{{- $own := include "rlhf-operator.selectorLabels" $root | fromYaml }}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_") }}
{{- $_ := set $own "app.kubernetes.io/version" $root.Chart.AppVersion }}
{{- $_ := set $own "app.kubernetes.io/managed-by" $root.Release.Service }}
{{- merge $own (last . | default dict) ($root.Values.commonLabels | default dict) | toYaml }}
{{- end }}

{{- define "rlhf-operator.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "rlhf-operator.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* A name of an image that this chart knows by itself, in the registry of all of them. */}}
{{- define "rlhf-operator.inRegistry" -}}
{{- $root := first . }}
{{- with $root.Values.image.registry }}{{ . }}/{{ end }}{{ last . }}
{{- end }}

{{- define "rlhf-operator.image" -}}
{{- with .Values.image }}
{{- include "rlhf-operator.inRegistry" (list $ .repository) }}
{{- if .digest }}@{{ .digest }}{{ else }}:{{ default $.Chart.AppVersion .tag }}{{ end }}
{{- end }}
{{- end }}

{{/* A quantity as text. It may be a number, which helm has as a float: printed, 16 GiB would be 1.7179869184e+10. */}}
{{- define "rlhf-operator.quantity" -}}
{{- kindIs "string" . | ternary . (toJson .) | quote }}
{{- end }}

{{/* Nodes belong to no namespace: a Role cannot allow them. */}}
{{- define "rlhf-operator.readsNodes" -}}
{{- if and .Values.rbac.readNodes (not .Values.watchNamespaces) }}true{{ else }}false{{ end }}
{{- end }}

{{/* What the operator does in a namespace with jobs; tests/helm holds it against the code. */}}
{{- define "rlhf-operator.jobRules" -}}
- apiGroups: [rlhf.hybridflow.io]
  resources: [rlhfjobs]
  verbs: [get, list, watch, delete]  # delete: spec.runPolicy.ttlSecondsAfterFinished
- apiGroups: [rlhf.hybridflow.io]
  resources: [rlhfjobs/status]
  verbs: [patch]
- apiGroups: [ray.io]
  resources: [rayjobs]
  verbs: [get, list, watch, create, delete]
- apiGroups: [ray.io]
  resources: [rayclusters]
  verbs: [get, patch]  # the size of elastic pools
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]  # create: sandboxes. delete: also pods whose node is gone
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, create]  # they read the shapes of models
- apiGroups: [""]
  resources: [configmaps, services]  # services: of sandboxes
  verbs: [get, create]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch]  # patch: spec.storage.retain
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]  # also where jobNetworkPolicy.enabled is false: those of sandboxes
  verbs: [get, create]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [list, create, patch]  # list: why no pods are made
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [list, watch]
{{- end }}
