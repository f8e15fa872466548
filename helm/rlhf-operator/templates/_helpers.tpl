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
app.kubernetes.io/name: {{ include "rlhf-operator.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "rlhf-operator.labels" -}}
{{- with .Values.commonLabels }}
{{- toYaml . }}
{{ end -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "rlhf-operator.selectorLabels" . }}
{{- end }}

{{- define "rlhf-operator.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "rlhf-operator.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "rlhf-operator.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{ end }}
{{- end }}
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
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]  # delete: pods whose node is gone
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, create]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [list, watch]
{{- end }}
