{{/* Name of every object: the release's, with the chart's unless it is part of it. Helm takes dots in the name of a
release and a digit in front, and capitals and underscores in an alias, which is the chart's name then; a Service takes
none of them (RFC 1035), but for a digit from Kubernetes 1.36 on. */}}
{{- define "ddpjob.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := .Release.Name | replace "." "-" -}}
{{- if not (contains $name $full) -}}
{{- $full = printf "%s-%s" $full $name -}}
{{- end -}}
{{- $full = $full | lower | replace "_" "-" -}}
{{- if regexMatch "^[0-9]" $full -}}
{{- $full = printf "r-%s" $full -}}
{{- end -}}
{{- $full | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels by which the pods of one release are found: (list $ NAME). A parent may have this chart several times, each
under an alias of its own, which is the chart's name then. */}}
{{- define "ddpjob.selectorOf" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ index . 1 }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
{{- if ne $root.Chart.Name "ddpjob-operator" }}
training.ddpjob.io/installation: {{ include "ddpjob.fullname" $root | quote }}
{{- end }}
{{- end -}}

{{/* That of a Deployment, from another one: it cannot be changed, and a Deployment knows its pods by their owners. */}}
{{- define "ddpjob.deploymentSelector" -}}
{{- omit (fromYaml .) "training.ddpjob.io/installation" | toYaml -}}
{{- end -}}

{{- define "ddpjob.selector" -}}
{{- include "ddpjob.selectorOf" (list . "ddpjob-operator") -}}
{{- end -}}

{{- define "ddpjob.labels" -}}
{{- include "ddpjob.labelsWith" (list . dict) -}}
{{- end -}}

{{/* Labels of an object that has some of its own: (list $ OWN). Earlier ones win; each key appears once. */}}
{{- define "ddpjob.labelsWith" -}}
{{- $root := index . 0 -}}
{{- $own := index . 1 -}}
{{- $chart := dict
  "app.kubernetes.io/version" $root.Chart.AppVersion
  "app.kubernetes.io/managed-by" $root.Release.Service
  "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_")
-}}
{{- merge (include "ddpjob.selector" $root | fromYaml) (default dict $own) (default dict $root.Values.commonLabels) $chart | toYaml -}}
{{- end -}}

{{/* Name of what there is once for each shard: (list $ NUMBER). The release's own where there is one shard. */}}
{{- define "ddpjob.shardName" -}}
{{- $root := index . 0 -}}
{{- include "ddpjob.fullname" $root -}}
{{- if gt (int $root.Values.shards) 1 -}}{{- printf "-shard-%d" (index . 1) -}}{{- end -}}
{{- end -}}

{{- define "ddpjob.shardSelector" -}}
{{- $root := index . 0 -}}
{{- include "ddpjob.selector" $root -}}
{{- if gt (int $root.Values.shards) 1 }}
training.ddpjob.io/shard: {{ index . 1 | quote }}
{{- end -}}
{{- end -}}

{{/* Labels of the pods of a shard: (list $ NUMBER). The selector's win, or the Deployment would not find its pods. */}}
{{- define "ddpjob.podLabels" -}}
{{- $values := (index . 0).Values -}}
{{- merge (include "ddpjob.shardSelector" . | fromYaml) (default dict $values.podLabels) (default dict $values.commonLabels) | toYaml -}}
{{- end -}}

{{/* Annotations of what runs after `helm uninstall`. */}}
{{- define "ddpjob.afterUninstall" -}}
helm.sh/hook: post-delete
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{/* Rules of egress to the API server and to DNS, by the values of `operatorNetworkPolicy`. */}}
{{- define "ddpjob.egressToCluster" -}}
- ports:
    {{- range .apiServer.ports }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
  {{- with .apiServer.cidrs }}
  to:
    {{- range . }}
    - ipBlock: {cidr: {{ . | quote }}}
    {{- end }}
  {{- end }}
{{- with .dns }}
# a policy goes by the ports of the servers' pods: 5353 on OpenShift
- ports:
    {{- range $port := list 53 5353 }}
    - {port: {{ $port }}, protocol: UDP}
    - {port: {{ $port }}, protocol: TCP}
    {{- end }}
  to: {{- toYaml . | nindent 4 }}
{{- end }}
{{- end -}}

{{- define "ddpjob.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "ddpjob.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Prefix of image names: the registry and a slash, or nothing. */}}
{{- define "ddpjob.registry" -}}
{{- with default .Values.image.registry .Values.global.imageRegistry -}}
{{- printf "%s/" (trimSuffix "/" .) -}}
{{- end -}}
{{- end -}}

{{- define "ddpjob.image" -}}
{{- $name := printf "%s%s" (include "ddpjob.registry" .) .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" $name .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "ddpjob.trainerImage" -}}
{{- default (printf "%sddpjob-trainer:%s-cpu" (include "ddpjob.registry" .) .Chart.AppVersion) .Values.trainer.image -}}
{{- end -}}

{{- define "ddpjob.imagePullSecrets" -}}
{{- $secrets := list -}}
{{- range concat (default list .Values.global.imagePullSecrets) (default list .Values.imagePullSecrets) -}}
{{- $secrets = append $secrets (ternary (dict "name" .) . (kindIs "string" .)) -}}
{{- end -}}
{{- with uniq $secrets -}}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* Of the pods of a shard, (list $ NUMBER): constraints of the user, each with the Deployment's selector where it has none; for two or more replicas without
constraints, a preference for different nodes. */}}
{{- define "ddpjob.topologySpreadConstraints" -}}
{{- $values := (index . 0).Values -}}
{{- $selector := dict "matchLabels" (include "ddpjob.shardSelector" . | fromYaml) -}}
{{- $constraints := list -}}
{{- range $values.topologySpreadConstraints -}}
{{- $constraints = append $constraints (merge (deepCopy .) (dict "labelSelector" $selector)) -}}
{{- end -}}
{{- if and (not $constraints) (gt (int $values.replicaCount) 1) -}}
{{- $constraints = list (dict "maxSkew" 1 "topologyKey" "kubernetes.io/hostname" "whenUnsatisfiable" "ScheduleAnyway" "labelSelector" $selector) -}}
{{- end -}}
{{- with $constraints -}}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
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

{{/* "true" where ValidatingAdmissionPolicies are wanted and served. `helm template` without a cluster knows no kinds, only
a version: they are served since 1.30. */}}
{{- define "ddpjob.admissionPolicies" -}}
{{- $versions := .Capabilities.APIVersions -}}
{{- $listed := $versions.Has "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy" -}}
{{- $unknown := not ($versions.Has "v1/Pod") -}}
{{- $since := semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version -}}
{{- if and .Values.admissionPolicies.enabled (or $listed (and $unknown $since)) -}}true{{- end -}}
{{- end -}}

{{/* Namespaces that are never served, as a list in CEL: those of `tenancy.OF_THE_CLUSTER` and the operator's own. */}}
{{- define "ddpjob.neverServed" -}}
{{- list "kube-system" "kube-public" "kube-node-lease" .Release.Namespace | uniq | toJson -}}
{{- end -}}

{{/* A bound of the request's namespace in CEL: (list $ SETTING DEFAULT), DEFAULT being CEL too. A namespace's own value wins. */}}
{{- define "ddpjob.bound" -}}
{{- $tenancy := default dict (index . 0).Values.tenancy -}}
{{- $setting := index . 1 -}}
{{- $general := index . 2 -}}
{{- $bounds := default dict $tenancy.bounds -}}
{{- if hasKey $bounds $setting -}}{{- $general = index $bounds $setting | toJson -}}{{- end -}}
{{- $own := dict -}}
{{- range $name, $grant := default dict $tenancy.namespaces -}}
{{- $bounds := default dict $grant.bounds -}}
{{- if hasKey $bounds $setting -}}{{- $_ := set $own $name (index $bounds $setting) -}}{{- end -}}
{{- end -}}
{{- if $own -}}
{{- printf "dyn(%s)[?request.namespace].orValue(dyn(%s))" (toJson $own) $general -}}
{{- else -}}
{{- printf "dyn(%s)" $general -}}
{{- end -}}
{{- end -}}

{{/* The bounds on resources in CEL, each as text. A namespace's own are added to those of all, and win. */}}
{{- define "ddpjob.boundResources" -}}
{{- $tenancy := default dict .Values.tenancy -}}
{{- $general := dict -}}
{{- range $name, $most := (default dict $tenancy.bounds).resources -}}{{- $_ := set $general $name (toString $most) -}}{{- end -}}
{{- $own := dict -}}
{{- range $namespace, $grant := default dict $tenancy.namespaces -}}
{{- $resources := (default dict $grant.bounds).resources -}}
{{- if $resources -}}
{{- $both := deepCopy $general -}}
{{- range $name, $most := $resources -}}{{- $_ := set $both $name (toString $most) -}}{{- end -}}
{{- $_ := set $own $namespace $both -}}
{{- end -}}
{{- end -}}
{{- if $own -}}
{{- printf "dyn(%s)[?request.namespace].orValue(dyn(%s))" (toJson $own) (toJson $general) -}}
{{- else -}}
{{- printf "dyn(%s)" (toJson $general) -}}
{{- end -}}
{{- end -}}

{{/* Of extraEnv, where the API server is. The rest is the operator's alone: it may be a Secret, a setting that another
program refuses, or the path of a file in extraVolumes. */}}
{{- define "ddpjob.apiServerEnv" -}}
{{- range .Values.extraEnv }}
{{- if hasPrefix "KUBERNETES_SERVICE_" .name }}
- {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Of the Pod of `helm test`. The operator's own labels would make it a pod of the Service that it asks. */}}
{{- define "ddpjob.testSelector" -}}
{{- include "ddpjob.selectorOf" (list . "ddpjob-operator-test") -}}
{{- end -}}

{{/* The dashboard is none of the operator's pods: Service, NetworkPolicy and Deployment of each have their own selector. */}}
{{- define "ddpjob.dashboardName" -}}
{{- include "ddpjob.fullname" . }}-dashboard
{{- end -}}

{{- define "ddpjob.dashboardSelector" -}}
{{- include "ddpjob.selectorOf" (list . "ddpjob-dashboard") -}}
{{- end -}}
