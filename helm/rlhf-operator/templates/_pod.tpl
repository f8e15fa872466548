{{/* What the pods of this chart share: account, registry, security, and where they may go. */}}
{{- define "rlhf-operator.pod" -}}
serviceAccountName: {{ include "rlhf-operator.serviceAccountName" . }}
automountServiceAccountToken: true
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "rlhf-operator.container" -}}
image: {{ include "rlhf-operator.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- with .Values.securityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The port of the metrics in a monitor: labels of a series that Prometheus also gives (namespace, job) are kept. */}}
{{- define "rlhf-operator.endpoint" -}}
port: metrics
honorLabels: true
{{- with .Values.metrics.tls }}
{{- if .secretName }}
scheme: https
tlsConfig:
  {{- $server := printf "%s-metrics.%s.svc" (include "rlhf-operator.fullname" $) $.Release.Namespace }}
  {{- $ca := dict "secret" (dict "name" .secretName "key" "ca.crt") }}
  {{- range $field, $value := dict "ca" $ca "serverName" $server }}
  {{- if not (hasKey (default dict $.Values.metrics.tls.monitor) $field) }}
  {{ $field }}: {{ toJson $value }}
  {{- end }}
  {{- end }}
  {{- with .monitor }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}
{{- end }}
