{{/* Parts of network policies. */}}

{{/* Peer: pods of (dict "root" $ "kind" "trainer") in this namespace. */}}
{{- define "sluice.podPeer" -}}
- podSelector:
    matchLabels:
      {{- include "sluice.selectorLabels" . | nindent 6 }}
{{- end }}

{{/* The port at which (dict "root" $ "kind" "trainer") is called. */}}
{{- define "sluice.servicePort" -}}
- protocol: TCP
  port: {{ (get (include "sluice.layout" .root | fromYaml).services .kind).port }}
{{- end }}

{{/* The ports at which weights are exchanged. */}}
{{- define "sluice.transferPorts" -}}
- protocol: TCP
  port: {{ .Values.networkPolicy.transferPorts.first | int }}
  endPort: {{ .Values.networkPolicy.transferPorts.last | int }}
{{- end }}

{{/* Who calls each service beside the other two: clients, and Prometheus if metrics are on. */}}
{{- define "sluice.outsideIngress" -}}
{{- with .root.Values.networkPolicy.clients }}
- from:
    {{- toYaml . | nindent 4 }}
  ports:
    {{- include "sluice.servicePort" $ | nindent 4 }}
{{- end }}
{{- if .root.Values.metrics.enabled }}
- from:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ .root.Values.networkPolicy.monitoringNamespace }}
  ports:
    - protocol: TCP
      port: {{ (get (include "sluice.layout" .root | fromYaml).services .kind).metrics_port }}
{{- end }}
{{- end }}

{{/* Names, wherever the cluster resolves them. */}}
{{- define "sluice.dnsEgress" -}}
- ports:
    {{- range .Values.networkPolicy.dnsPorts }}
    - protocol: UDP
      port: {{ int . }}
    - protocol: TCP
      port: {{ int . }}
    {{- end }}
{{- end }}

{{/* What every service may call beside the others. */}}
{{- define "sluice.outsideEgress" -}}
{{ include "sluice.dnsEgress" . }}
{{- with .Values.networkPolicy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- end }}
