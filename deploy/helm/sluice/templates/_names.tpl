{{/* Names, labels and what sluice/launch says; of the templates below them. */}}

{{/* files/services.yaml, as text in YAML. */}}
{{- define "sluice.layout" -}}
{{ .Files.Get "files/services.yaml" }}
{{- end }}

{{/* Where the chart mounts what is not in sluice/launch, as YAML. */}}
{{- define "sluice.paths" -}}
secrets: /etc/sluice/secrets
job: /etc/sluice/job
jobFile: run.yaml
home: /home/sluice
{{- end }}

{{/* The beginning of all names; short enough for what follows it in the name of a pod. */}}
{{- define "sluice.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Labels by which selectors find what (dict "root" $ "kind" "trainer") names. */}}
{{- define "sluice.selectorLabels" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .kind }}
{{- end }}

{{/* Labels of an object. */}}
{{- define "sluice.labels" -}}
{{ include "sluice.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* The folder of the run, in every pod. */}}
{{- define "sluice.runFolder" -}}
{{- $layout := include "sluice.layout" . | fromYaml -}}
{{ $layout.runs_mount }}/{{ .Values.run.name }}
{{- end }}

{{/* Words of a command in JSON, with the folder of this run: (dict "root" $ "words" list). */}}
{{- define "sluice.ownWords" -}}
{{- $layout := include "sluice.layout" .root | fromYaml -}}
{{- $folder := include "sluice.runFolder" .root -}}
{{- $words := list -}}
{{- range .words -}}
{{- $words = append $words (replace $layout.run_folder $folder .) -}}
{{- end -}}
{{ toJson $words }}
{{- end }}

{{/* What tells the run from all others that a Prometheus watches: the label `run` of its series. */}}
{{- define "sluice.runLabel" -}}
{{ .Values.metrics.podMonitor.runLabel | default (printf "%s/%s/%s" .Release.Namespace .Release.Name .Values.run.name) }}
{{- end }}

{{/* The claim of the run's volume. */}}
{{- define "sluice.runsClaim" -}}
{{ .Values.storage.runs.existingClaim | default (printf "%s-runs" (include "sluice.fullname" .)) }}
{{- end }}

{{/* The image of (dict "root" $ "image" "compute"). */}}
{{- define "sluice.image" -}}
{{- $image := get .root.Values.image .image -}}
{{- $tag := $image.tag -}}
{{- if kindIs "float64" $tag -}}
{{/* A number of a file of values, which would be printed as 2.0261122e+07. */}}
{{- $tag = int64 $tag -}}
{{- end -}}
{{- $tag = kindIs "invalid" $tag | ternary "" (toString $tag) -}}
{{ $image.repository }}:{{ $tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* Seconds a service may take to end. */}}
{{- define "sluice.shutdownGrace" -}}
{{- $layout := include "sluice.layout" . | fromYaml -}}
{{ .Values.shutdownGraceSeconds | default $layout.shutdown_grace_s | int }}
{{- end }}

{{/* Seconds a replica's samples are given. */}}
{{- define "sluice.drain" -}}
{{- $layout := include "sluice.layout" . | fromYaml -}}
{{ .Values.rollout.drainSeconds | default $layout.drain_timeout_s | int }}
{{- end }}

{{/* What a device plugin calls a device; empty for the CPU. */}}
{{- define "sluice.deviceResource" -}}
{{- $names := dict "cpu" "" "gpu" "nvidia.com/gpu" "npu" "huawei.com/Ascend910" -}}
{{- if ne .Values.devices.kind "cpu" -}}
{{ .Values.devices.resource | default (get $names .Values.devices.kind) }}
{{- end }}
{{- end }}
