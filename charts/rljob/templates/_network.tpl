{{- /* Who may read metrics; the chart's own test may always. An absent `from` is anyone. */ -}}
{{- define "rljob.metricsFrom" -}}
{{- with .Values.networkPolicy.metricsFrom -}}
from:
  {{- toYaml . | nindent 2 }}
  - podSelector:
      matchLabels:
        {{- include "rljob.selector" "test" | nindent 8 }}
{{- end -}}
{{- end -}}
