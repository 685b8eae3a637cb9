{{/* The run's configuration: what the chart sets in it, and what it refuses. */}}

{{/* A list in YAML of key=value that come last, so that nothing is set past the chart. */}}
{{- define "sluice.chartSettings" -}}
{{- $layout := include "sluice.layout" . | fromYaml }}
{{- $device := get (dict "cpu" "cpu" "gpu" "cuda" "npu" "npu") .Values.devices.kind }}
{{- range $kind, $_ := $layout.services }}
- sluice.{{ $kind }}.endpoint.advertise={{ include "sluice.fullname" $ }}-{{ $kind }}
{{- end }}
- trainer.nnodes=1
- trainer.n_gpus_per_node={{ .Values.trainer.ranks | int }}
- trainer.device={{ $device }}
- sluice.rollout.device={{ $device }}
- actor_rollout_ref.rollout.tensor_model_parallel_size={{ .Values.rollout.devicesPerReplica | int }}
- sluice.shutdown_grace_s={{ include "sluice.shutdownGrace" . }}
- sluice.rollout.drain_timeout_s={{ include "sluice.drain" . }}
- sluice.trainer.replica_wait_timeout_s={{ .Values.trainer.replicaWaitSeconds | int }}
{{- if .Values.metrics.enabled }}
{{- range $layout.metrics_settings }}
- {{ . }}
{{- end }}
{{- end }}
{{- if .Values.security.enabled }}
{{- $files := .Values.security.files }}
{{- $folder := (include "sluice.paths" . | fromYaml).secrets }}
- sluice.security.tls=mtls
- sluice.security.server_name={{ .Values.security.serverName }}
- sluice.security.ca_file={{ $folder }}/{{ $files.ca }}
- sluice.security.cert_file={{ $folder }}/{{ $files.certificate }}
- sluice.security.key_file={{ $folder }}/{{ $files.key }}
- sluice.security.token_file={{ $folder }}/{{ $files.tokens }}
{{- end }}
{{- end }}

{{/* The arguments of `sluice prepare`, as a list in YAML. */}}
{{- define "sluice.prepareArguments" -}}
{{- $paths := include "sluice.paths" . | fromYaml }}
{{- $layout := include "sluice.layout" . | fromYaml }}
{{- if .Values.run.quickstart }}
- --quickstart
{{- else if .Values.run.config }}
- {{ $paths.job }}/{{ $paths.jobFile }}
{{- else if .Values.run.configFile }}
- {{ .Values.run.configFile | quote }}
{{- end }}
{{- range .Values.run.settings }}
- {{ . | quote }}
{{- end }}
{{- range include "sluice.chartSettings" . | fromYamlArray }}
- {{ . | quote }}
{{- end }}
{{- range include "sluice.ownWords" (dict "root" . "words" $layout.prepared_folder) | fromJsonArray }}
- {{ . }}
{{- end }}
{{- end }}

{{/* Ends the rendering where values contradict each other; the schema sees each for itself. */}}
{{- define "sluice.check" -}}
{{- $layout := include "sluice.layout" . | fromYaml }}
{{- $jobFile := (include "sluice.paths" . | fromYaml).jobFile }}
{{- $run := .Values.run }}
{{- if and $run.quickstart (or $run.config $run.configFile) }}
{{- fail "run.quickstart: true with run.config or run.configFile; set it to false for a job of your own" }}
{{- end }}
{{- if and $run.config $run.configFile }}
{{- fail "run.config and run.configFile are both set; leave one empty" }}
{{- end }}
{{- if hasKey $run.files $jobFile }}
{{- fail (printf "run.files: %s is the name of run.config; give the file another one" $jobFile) }}
{{- end }}
{{- $own := list "sluice.run_dir" }}
{{- range concat $layout.network_settings $layout.metrics_settings (include "sluice.chartSettings" . | fromYamlArray) }}
{{- $own = append $own (regexReplaceAll "=.*$" . "") }}
{{- end }}
{{- range $run.settings }}
{{- $key := regexReplaceAll "=.*$" (regexReplaceAll "^[+~]*" . "") "" }}
{{- if has $key $own }}
{{- fail (printf "run.settings: %s is set by the chart; see its other values" $key) }}
{{- end }}
{{- end }}
{{- if and .Values.security.enabled (not .Values.security.secretName) }}
{{- fail "security.secretName is empty with security.enabled; name the secret with the files of `sluice certs`" }}
{{- end }}
{{- range list "podMonitor" "prometheusRule" "dashboards" }}
{{- if and (get $.Values.metrics .).enabled (not $.Values.metrics.enabled) }}
{{- fail (printf "metrics.%s.enabled without metrics.enabled: there would be nothing to scrape" .) }}
{{- end }}
{{- end }}
{{- if gt (include "sluice.drain" . | int) (include "sluice.shutdownGrace" . | int) }}
{{- fail (printf "rollout.drainSeconds: %s is more than a service may take to end (shutdownGraceSeconds: %s); raise the latter" (include "sluice.drain" .) (include "sluice.shutdownGrace" .)) }}
{{- end }}
{{- $scaling := .Values.rollout.autoscaling }}
{{- if and $scaling.enabled (not .Values.metrics.enabled) }}
{{- fail "rollout.autoscaling.enabled without metrics.enabled: nobody would publish what it follows, and no replica would come or go; set metrics.enabled=true, and have it scraped (metrics.podMonitor.enabled)" }}
{{- end }}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) }}
{{- fail (printf "rollout.autoscaling.minReplicas: %d is more than maxReplicas: %d" (int $scaling.minReplicas) (int $scaling.maxReplicas)) }}
{{- end }}
{{- $ports := .Values.networkPolicy.transferPorts }}
{{- if gt (int $ports.first) (int $ports.last) }}
{{- fail (printf "networkPolicy.transferPorts.first: %d is above last: %d" (int $ports.first) (int $ports.last)) }}
{{- end }}
{{- end }}
