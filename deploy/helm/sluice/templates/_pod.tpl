{{/* The pod of a service: (dict "root" $ "kind" "trainer"). One template, so that all are alike. */}}

{{/* What a pod may do: nothing but its work, as user and group of the images. */}}
{{- define "sluice.podSecurity" -}}
{{- $layout := include "sluice.layout" .root | fromYaml -}}
runAsNonRoot: true
runAsUser: {{ $layout.user_id }}
runAsGroup: {{ $layout.user_id }}
fsGroup: {{ $layout.user_id }}
# A large volume is not walked through at each start.
fsGroupChangePolicy: OnRootMismatch
{{- with .groups }}
supplementalGroups: {{ toJson . }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "sluice.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: {{ .readOnly }}
capabilities:
  drop: [ALL]
{{- end }}

{{/* Requests and limits of a service with its devices, in JSON. */}}
{{- define "sluice.resources" -}}
{{- $resources := deepCopy (get .root.Values .kind).resources -}}
{{- $device := include "sluice.deviceResource" .root -}}
{{- $service := get (include "sluice.layout" .root | fromYaml).services .kind -}}
{{- if and $device $service.takes_devices -}}
{{- $count := eq .kind "trainer" | ternary .root.Values.trainer.ranks .root.Values.rollout.devicesPerReplica -}}
{{- $_ := set $resources "limits" (merge (dict $device (int $count)) ($resources.limits | default dict)) -}}
{{- end -}}
{{ toJson $resources }}
{{- end }}

{{/* Variables of all containers of a service. */}}
{{- define "sluice.environment" -}}
{{- $values := get .root.Values .kind -}}
{{- $devices := .root.Values.devices -}}
{{- $service := get (include "sluice.layout" .root | fromYaml).services .kind -}}
# The root file system cannot be written; libraries keep caches below it.
- name: HOME
  value: {{ (include "sluice.paths" .root | fromYaml).home }}
{{- if and $service.takes_devices (ne $devices.kind "cpu") }}
{{- with $devices.interface }}
- name: GLOO_SOCKET_IFNAME
  value: {{ . | quote }}
{{- if eq $devices.kind "gpu" }}
- name: NCCL_SOCKET_IFNAME
  value: {{ . | quote }}
{{- else }}
# "=": this interface, not all that begin with its name.
- name: HCCL_SOCKET_IFNAME
  value: {{ printf "=%s" . | quote }}
{{- end }}
{{- end }}
{{- if eq $devices.kind "npu" }}
# torch must not load torch_npu by itself; sluice loads it and says what is wrong.
- name: TORCH_DEVICE_BACKEND_AUTOLOAD
  value: "0"
{{- end }}
{{- end }}
{{- with concat .root.Values.extraEnv $values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What all containers of a service see. */}}
{{- define "sluice.mounts" -}}
{{- $root := .root -}}
{{- $values := get $root.Values .kind -}}
{{- $layout := include "sluice.layout" $root | fromYaml -}}
{{- $paths := include "sluice.paths" $root | fromYaml -}}
- name: runs
  mountPath: {{ $layout.runs_mount }}
- name: scratch
  mountPath: /tmp
  subPath: tmp
- name: scratch
  mountPath: {{ $paths.home }}
  subPath: home
{{- if $root.Values.storage.jobs.existingClaim }}
- name: jobs
  mountPath: {{ $layout.jobs_mount }}
  readOnly: true
{{- end }}
{{- if or $root.Values.run.config $root.Values.run.files }}
- name: job
  mountPath: {{ $paths.job }}
  readOnly: true
{{- end }}
{{- if $root.Values.security.enabled }}
- name: secrets
  mountPath: {{ $paths.secrets }}
  readOnly: true
{{- end }}
{{- with $values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "sluice.volumes" -}}
{{- $root := .root -}}
{{- $values := get $root.Values .kind -}}
- name: runs
  persistentVolumeClaim:
    claimName: {{ include "sluice.runsClaim" $root }}
- name: scratch
  emptyDir: {}
{{- with $values.shmSize }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ . }}
{{- end }}
{{- with $root.Values.storage.jobs.existingClaim }}
- name: jobs
  persistentVolumeClaim:
    claimName: {{ . }}
    readOnly: true
{{- end }}
{{- if or $root.Values.run.config $root.Values.run.files }}
- name: job
  configMap:
    name: {{ include "sluice.fullname" $root }}-job
{{- end }}
{{- if $root.Values.security.enabled }}
- name: secrets
  secret:
    secretName: {{ $root.Values.security.secretName }}
    # For the pod's group: nobody else is to read keys and tokens.
    defaultMode: 0440
{{- end }}
{{- with $values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* An init container that waits: (dict ... "name" "wait-for-run" "what" "run" "subject" FOLDER). */}}
{{- define "sluice.waiting" -}}
{{- $values := get .root.Values .kind -}}
- name: {{ .name }}
  image: {{ include "sluice.image" (dict "root" .root "image" .image) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [python, -c]
  args:
    - |
      {{- .root.Files.Get "files/wait.py" | nindent 6 }}
    - {{ .what }}
    - {{ .subject | quote }}
    - {{ .root.Values.initWaitSeconds | int | quote }}
  env:
    - name: POD_IPS
      valueFrom:
        fieldRef:
          fieldPath: status.podIPs
    {{- include "sluice.environment" . | nindent 4 }}
  resources: {{ toJson $values.resources }}
  securityContext:
    {{- include "sluice.containerSecurity" (dict "readOnly" $values.readOnlyRootFilesystem) | nindent 4 }}
  volumeMounts:
    {{- include "sluice.mounts" . | nindent 4 }}
{{- end }}

{{/* Asks for health where nothing else answers, unencrypted. */}}
{{- define "sluice.probes" -}}
{{- $values := get .root.Values .kind -}}
{{- $period := 10 -}}
{{- $patience := divf (int $values.startupSeconds) $period | ceil | int -}}
startupProbe:
  grpc: {port: {{ .service.health_port }}}
  periodSeconds: {{ $period }}
  timeoutSeconds: 5
  failureThreshold: {{ $patience }}
# A replica is ready with its first weights, so that a rollout takes no next one away before.
readinessProbe:
  grpc: {port: {{ .service.health_port }}{{ with .service.readiness }}, service: {{ . }}{{ end }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 6
# The launcher in the container starts the process again, which loads its model once more: no pod
# is ended sooner than that may take. What hangs is ended by sluice's own watchdog.
livenessProbe:
  grpc: {port: {{ .service.health_port }}}
  periodSeconds: {{ $period }}
  timeoutSeconds: 5
  failureThreshold: {{ $patience }}
{{- end }}

{{/* Metadata and specification; (dict ... "initContainers" text "restartPolicy" "Always"). */}}
{{- define "sluice.pod" -}}
{{- $root := .root -}}
{{- $values := get $root.Values .kind -}}
{{- $layout := include "sluice.layout" $root | fromYaml -}}
{{- $service := get $layout.services .kind -}}
metadata:
  labels:
    {{- include "sluice.selectorLabels" . | nindent 4 }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # Pods begin anew with another job; the run itself keeps the configuration that it began with.
    sluice/job: {{ toJson $root.Values.run | sha256sum | trunc 16 | quote }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  restartPolicy: {{ .restartPolicy }}
  serviceAccountName: {{ include "sluice.fullname" $root }}
  automountServiceAccountToken: false
  # Variables of services would look like sluice's own.
  enableServiceLinks: false
  # What the launcher's children leave is reaped by the pod's first process.
  shareProcessNamespace: true
  terminationGracePeriodSeconds: {{ add (include "sluice.shutdownGrace" $root) $layout.engine_margin_s }}
  securityContext:
    {{- include "sluice.podSecurity" (dict "root" $root "groups" $values.supplementalGroups) | nindent 4 }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" }}
  {{- with get $values $key }}
  {{ $key }}: {{ toJson . }}
  {{- end }}
  {{- end }}
  initContainers:
    {{- .initContainers | nindent 4 }}
  containers:
    - name: {{ .kind }}
      image: {{ include "sluice.image" (dict "root" $root "image" (ternary "reward" "compute" (eq .kind "reward"))) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: {{ toJson $service.entrypoint }}
      args: {{ include "sluice.ownWords" (dict "root" $root "words" $service.arguments) }}
      ports:
        - name: grpc
          containerPort: {{ $service.port }}
        - name: health
          containerPort: {{ $service.health_port }}
        {{- if $root.Values.metrics.enabled }}
        - name: metrics
          containerPort: {{ $service.metrics_port }}
        {{- end }}
      {{- include "sluice.probes" (dict "root" $root "kind" .kind "service" $service) | nindent 6 }}
      env:
        {{- include "sluice.environment" . | nindent 8 }}
      resources: {{ include "sluice.resources" . }}
      securityContext:
        {{- include "sluice.containerSecurity" (dict "readOnly" $values.readOnlyRootFilesystem) | nindent 8 }}
      volumeMounts:
        {{- include "sluice.mounts" . | nindent 8 }}
        {{- if $values.shmSize }}
        - name: shm
          mountPath: /dev/shm
        {{- end }}
        {{- if and (eq .kind "reward") $values.ledger.ownVolume }}
        - name: ledger
          mountPath: {{ include "sluice.runFolder" $root }}/reward
          subPath: {{ $root.Values.run.name }}
        {{- end }}
  volumes:
    {{- include "sluice.volumes" . | nindent 4 }}
{{- end }}
