{{- /* Names are fixed, not built from the release's: jobs and their operator meet by them, and one namespace holds one release. */ -}}

{{- define "rljob.operator" -}}rljob-operator{{- end -}}
{{- define "rljob.sandboxPool" -}}rljob-sandbox-pool{{- end -}}
{{- define "rljob.keys" -}}{{ .Values.keys.existingSecret | default "rljob-keys" }}{{- end -}}

{{- /* Where claims go. */ -}}
{{- define "rljob.brokerUrl" -}}http://{{ include "rljob.sandboxPool" . }}.{{ .Release.Namespace }}.svc:8080{{- end -}}

{{- /* Labels that select the pods of one component; never change on upgrade. Takes the component's name. */ -}}
{{- define "rljob.selector" -}}
app.kubernetes.io/name: rljob
app.kubernetes.io/component: {{ . }}
{{- end -}}

{{- /* Labels of every object: dict root, component. */ -}}
{{- define "rljob.labels" -}}
{{ include "rljob.selector" .component }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: rljob
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- /* Full name of an image: dict root, image (one of .Values.images). */ -}}
{{- define "rljob.image" -}}
{{- $registry := .image.registry | default .root.Values.image.registry -}}
{{- $name := .image.repository -}}
{{- if and $registry (ne $registry "-") -}}
{{- $name = printf "%s/%s" (trimSuffix "/" $registry) $name -}}
{{- end -}}
{{- if .image.digest -}}
{{ $name }}@{{ .image.digest }}
{{- else -}}
{{ $name }}:{{ .image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}
