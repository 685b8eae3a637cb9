{{/* The pod that ends the run's other services: (dict "root" $ "job" "name of the trainer's" "name" ...). */}}
{{- define "sluice.endOfRunPod" -}}
{{- $fullname := include "sluice.fullname" .root -}}
metadata:
  labels:
    {{- include "sluice.selectorLabels" (dict "root" .root "kind" "end-of-run") | nindent 4 }}
  annotations:
    # An upgrade of a run that has ended gives replicas back their number: each has its own Job.
    sluice/revision: {{ .root.Release.Revision | quote }}
spec:
  restartPolicy: OnFailure
  serviceAccountName: {{ .name }}
  automountServiceAccountToken: true
  enableServiceLinks: false
  # It only waits and asks; nothing is lost with it.
  terminationGracePeriodSeconds: 1
  securityContext:
    {{- include "sluice.podSecurity" (dict "root" .root) | nindent 4 }}
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  containers:
    - name: end-of-run
      image: {{ include "sluice.image" (dict "root" .root "image" "reward") }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      command: [python, -c]
      args:
        - |
          {{- .root.Files.Get "files/end_of_run.py" | nindent 10 }}
        - {{ .root.Release.Namespace }}
        - {{ .job }}
        - deployments/{{ $fullname }}-rollout
        - statefulsets/{{ $fullname }}-reward
      resources: {{ toJson .root.Values.endOfRun.resources }}
      securityContext:
        {{- include "sluice.containerSecurity" (dict "readOnly" true) | nindent 8 }}
{{- end }}
