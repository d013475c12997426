{{- define "gpushare-agent.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "gpushare-agent.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "gpushare-agent.name" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{- define "gpushare-agent.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.name }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.name }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end }}

{{- /* "true" where the agent asks NVIDIA's device plugin for GPUs. */ -}}
{{- define "gpushare-agent.claims" -}}
{{- and (eq .Values.gpus.from "claim") (not .Values.observe) -}}
{{- end }}

{{- /* A new pod of an agent that claims GPUs may be given others than the sessions on its node run on. */ -}}
{{- define "gpushare-agent.updateStrategy" -}}
{{- ternary "OnDelete" "RollingUpdate" (eq (include "gpushare-agent.claims" .) "true") -}}
{{- end }}

{{- define "gpushare-agent.priorityClassName" -}}
{{- if eq .Values.priorityClassName "auto" -}}
{{- ternary "" "system-node-critical" (eq (include "gpushare-agent.claims" .) "true") -}}
{{- else -}}
{{- .Values.priorityClassName -}}
{{- end -}}
{{- end }}

{{- define "gpushare-agent.selector" -}}
app.kubernetes.io/name: gpushare-agent
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gpushare-agent.labels" -}}
{{ include "gpushare-agent.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* "true" where ValidatingAdmissionPolicy is of the API (1.30) and tokens name their node (on by default from 1.30). */ -}}
{{- define "gpushare-agent.admissionPolicy" -}}
{{- $policy := .Values.rbac.admissionPolicy -}}
{{- if eq $policy "auto" -}}
{{- semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version -}}
{{- else -}}
{{- eq $policy "always" -}}
{{- end -}}
{{- end }}

{{- /* A map of values as YAML without its null entries: a null removes a default, and `--reuse-values` keeps the null. */ -}}
{{- define "gpushare-agent.entries" -}}
{{- $entries := dict -}}
{{- range $name, $value := . -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $_ := set $entries $name $value -}}
{{- end -}}
{{- end -}}
{{- if $entries -}}
{{- toYaml $entries -}}
{{- end -}}
{{- end }}

{{- /* The files of the hub's folder of templates, by name. */ -}}
{{- define "gpushare-agent.policyFiles" -}}
{{- $files := dict "quotas" .Values.quotas "idle" .Values.idlePolicy "layers" .Values.layers "placement" .Values.placement -}}
{{- range $name, $template := .Values.templates -}}
{{- if hasKey $files $name -}}
{{- fail (printf "templates.%s: the name is reserved for the file %s.yaml: choose another" $name $name) -}}
{{- end -}}
{{- if $template }}
{{ $name }}.yaml: |
  {{- set (deepCopy $template) "name" (default $name $template.name) | toYaml | nindent 2 }}
{{- end -}}
{{- end -}}
{{- range $name, $content := $files -}}
{{- if $content }}
{{ $name }}.yaml: |
  {{- toYaml $content | nindent 2 }}
{{- end -}}
{{- end -}}
{{- end }}
