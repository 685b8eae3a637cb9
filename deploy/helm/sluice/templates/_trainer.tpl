{{/* The trainer's pod: it begins the run, and waits for the reward service before it trains. */}}
{{- define "sluice.trainerPod" -}}
{{- include "sluice.pod" (dict "root" . "kind" "trainer" "restartPolicy" "Never" "initContainers" (include "sluice.trainerInit" .)) }}
{{- end }}

{{/* The Job's name, which also ends with what is in its pod. */}}
{{- define "sluice.trainerJob" -}}
{{ include "sluice.fullname" . }}-trainer-{{ include "sluice.trainerPod" . | sha256sum | trunc 8 }}
{{- end }}

{{- define "sluice.trainerInit" -}}
{{- $context := dict "root" . "kind" "trainer" "image" "compute" -}}
{{- $layout := include "sluice.layout" . | fromYaml -}}
{{- $fullname := include "sluice.fullname" . -}}
{{- $reward := printf "%s-reward:%d" $fullname (int $layout.services.reward.port) -}}
# An upgrade starts the new Job before it deletes the old one.
{{ include "sluice.waiting" (merge (dict "name" "wait-until-alone" "what" "alone" "subject" (printf "%s-trainer" $fullname)) $context) }}
- name: prepare
  image: {{ include "sluice.image" $context }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [sh, -c]
  args:
    - |
      {{- .Files.Get "files/prepare.sh" | nindent 6 }}
    - prepare.sh
    - {{ include "sluice.runFolder" . }}
    - $(JOB_UID)
    {{- range $layout.prepare }}
    - {{ . }}
    {{- end }}
    {{- include "sluice.prepareArguments" . | nindent 4 }}
  env:
    - name: JOB_UID
      valueFrom:
        fieldRef:
          fieldPath: metadata.labels['batch.kubernetes.io/controller-uid']
    {{- include "sluice.environment" $context | nindent 4 }}
  resources: {{ toJson .Values.trainer.resources }}
  securityContext:
    {{- include "sluice.containerSecurity" (dict "readOnly" .Values.trainer.readOnlyRootFilesystem) | nindent 4 }}
  volumeMounts:
    {{- include "sluice.mounts" $context | nindent 4 }}
# The trainer gives the reward service two minutes only; a cluster may need longer for its pod.
{{ include "sluice.waiting" (merge (dict "name" "wait-for-reward" "what" "port" "subject" $reward) $context) }}
{{- end }}
