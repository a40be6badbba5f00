{{- /* The configuration file of rljob_sandbox_pool.cluster. */ -}}
{{- define "rljob.sandboxPool.config" -}}
guest_image: {{ include "rljob.image" (dict "root" . "image" .Values.images.sandboxPool) | quote }}
sandbox_image: {{ include "rljob.image" (dict "root" . "image" .Values.images.sandbox) | quote }}
image_pull_policy: {{ .Values.image.pullPolicy }}
image_pull_secrets: {{ .Values.image.pullSecrets | toJson }}
operator_namespace: {{ .Release.Namespace | quote }}
namespaces: {{ .Values.namespaces | toJson }}
broker_url: {{ include "rljob.brokerUrl" . }}
dns_namespace: {{ .Values.jobs.dnsNamespace }}
reaper: {{ .Values.sandboxes.reaper | quote }}
{{- end -}}
