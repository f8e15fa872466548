{{/* Fill in values that are missing: `helm upgrade --reuse-values` has those of the chart before, not this one's. */}}
{{- define "rlhf-operator.defaults" -}}
{{- include "rlhf-operator.fill" (list .Values (.Files.Get "files/values.yaml" | fromYaml)) }}
{{- end }}

{{/* Fill a mapping from another; parts of a pod stay as they are, where null takes a default away. */}}
{{- define "rlhf-operator.fill" -}}
{{- $values := first . }}
{{- range $key, $default := last . }}
{{- if not (hasKey $values $key) }}
{{- $_ := set $values $key $default }}
{{- else if and (kindIs "map" $default) (kindIs "map" (get $values $key)) (not (has $key (list "resources" "affinity" "podSecurityContext" "securityContext"))) }}
{{- include "rlhf-operator.fill" (list (get $values $key) $default) }}
{{- end }}
{{- end }}
{{- end }}
