{{/* Name of every object: the release's, with the chart's unless it is part of it. */}}
{{- define "ddpjob.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "ddpjob.selector" -}}
app.kubernetes.io/name: ddpjob-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "ddpjob.labels" -}}
{{ include "ddpjob.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "ddpjob.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "ddpjob.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "ddpjob.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Labels as the operator reads them: name=value, separated by commas. */}}
{{- define "ddpjob.scrapers" -}}
{{- $pairs := list -}}
{{- range $name, $value := .Values.networkPolicy.scrapers -}}
{{- $pairs = append $pairs (printf "%s=%s" $name $value) -}}
{{- end -}}
{{- join "," $pairs -}}
{{- end -}}

{{/* What the operator may do in a namespace that it serves; nothing on secrets, exec or wildcards. */}}
{{- define "ddpjob.rules" -}}
# delete: ttlSecondsAfterFinished
- apiGroups: [training.ddpjob.io]
  resources: [ddpjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [training.ddpjob.io]
  resources: [ddpjobs/status]
  verbs: [patch]
# patch: a pod that outlives an attempt is told its place in the next one by its labels
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
# the end of a failed pod's log, kept in the job's status
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
# patch: its selector moves on to node rank 0 of a new attempt
- apiGroups: [""]
  resources: [services]
  verbs: [get, create, patch]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, create]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create]
# only for jobs whose scheduler reads a PodGroup
- apiGroups: [scheduling.x-k8s.io, scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [get, create]
# list: of a pod that does not start and does not say why
- apiGroups: [""]
  resources: [events]
  verbs: [list, create, patch]
{{- end -}}
