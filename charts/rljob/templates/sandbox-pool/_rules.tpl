{{- /* Equal to RULES and OWN_RULES of rljob_sandbox_pool/cluster_config.py; a test compares them. */ -}}
{{- define "rljob.sandboxPool.rules" -}}
- apiGroups: [rljob.dev]
  resources: [sandboxpools]
  verbs: [get, list, watch]
- apiGroups: [rljob.dev]
  resources: [sandboxpools/status]
  verbs: [get, patch, update]
- apiGroups: [rljob.dev]
  resources: [sandboxpools/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end -}}

{{- define "rljob.sandboxPool.ownRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, create, update, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, patch]
{{- end -}}
