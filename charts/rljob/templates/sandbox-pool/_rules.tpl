{{- /* Equal to RULES and OWN_RULES of rljob_sandbox_pool/cluster_config.py; a test compares them. */ -}}
{{- define "rljob.sandboxPool.rules" -}}
- apiGroups: [rljob.dev]
  resources: [sandboxpools]
  verbs: [list, watch]
- apiGroups: [rljob.dev]
  resources: [sandboxpools/status]
  verbs: [patch]
- apiGroups: [rljob.dev]
  resources: [sandboxpools/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, create, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create, patch]
{{- end -}}

{{- define "rljob.sandboxPool.ownRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, create, update]
- apiGroups: [""]
  resources: [pods]
  verbs: [patch]
{{- end -}}
