{{- /* ClusterConfig of rljob_operator/observed.py. */ -}}
{{- define "rljob.operator.config" -}}
images:
  trainer: {{ include "rljob.image" (dict "root" . "image" .Values.images.trainer) | quote }}
  rollout_worker: {{ include "rljob.image" (dict "root" . "image" .Values.images.rolloutWorker) | quote }}
  services: {{ include "rljob.image" (dict "root" . "image" .Values.images.services) | quote }}
  engine: {{ include "rljob.image" (dict "root" . "image" .Values.images.engine) | quote }}
  sandbox_pool: {{ include "rljob.image" (dict "root" . "image" .Values.images.sandboxPool) | quote }}
  sandbox: {{ include "rljob.image" (dict "root" . "image" .Values.images.sandbox) | quote }}
image_pull_policy: {{ .Values.image.pullPolicy }}
image_pull_secrets: {{ .Values.image.pullSecrets | toJson }}
operator_namespace: {{ .Release.Namespace | quote }}
broker_url: {{ include "rljob.brokerUrl" . }}
storage_class: {{ .Values.jobs.storageClass | default nil | toJson }}
artifacts_size: {{ .Values.jobs.artifacts.size | quote }}
artifacts_access_mode: {{ .Values.jobs.artifacts.accessMode }}
store_size: {{ .Values.jobs.store.size | quote }}
namespaces: {{ .Values.namespaces | toJson }}
pod_monitors: {{ .Values.jobs.podMonitors }}
dns_namespace: {{ .Values.jobs.dnsNamespace }}
{{- end -}}
