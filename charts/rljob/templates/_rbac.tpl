{{- /*
Rights of one component: dict root, component, rules (YAML, in every namespace that is served), ownRules (in the release's).

    namespaces: []      ClusterRole + ClusterRoleBinding
    namespaces: [a, b]  Role + RoleBinding in a and in b
    always              Role + RoleBinding <component>-own in the release's namespace: Lease and what it publishes there
*/ -}}
{{- define "rljob.rbac" -}}
{{- $root := .root -}}
{{- $name := printf "rljob-%s" .component -}}
{{- $labels := include "rljob.labels" . -}}
{{- $grants := list (dict "name" (printf "%s-own" $name) "namespace" $root.Release.Namespace "rules" .ownRules) -}}
{{- range $root.Values.namespaces -}}
{{- $grants = append $grants (dict "name" $name "namespace" . "rules" $.rules) -}}
{{- end -}}
{{- if not $root.Values.namespaces -}}
{{- $grants = append $grants (dict "name" $name "namespace" "" "rules" .rules) -}}
{{- end -}}
{{- range $grants }}
{{- $prefix := ternary "" "Cluster" (ne .namespace "") }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $prefix }}Role
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . | quote }}
  {{- end }}
  labels:
    {{- $labels | nindent 4 }}
rules:
  {{- .rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $prefix }}RoleBinding
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . | quote }}
  {{- end }}
  labels:
    {{- $labels | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ $prefix }}Role
  name: {{ .name }}
subjects:
  - kind: ServiceAccount
    name: {{ $name }}
    namespace: {{ $root.Release.Namespace | quote }}
{{- end }}
{{- end -}}
