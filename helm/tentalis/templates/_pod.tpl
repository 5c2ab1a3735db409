{{/* The pod of a workload. */}}

{{/* The configuration file of a role, empty if it has none. Arguments: root, role. */}}
{{- define "tentalis.roleConfig" -}}
{{- $values := .root.Values -}}
{{- if eq .role "trainer" -}}
{{- $base := dict "run_id" (include "tentalis.runId" .root) "policy" $values.trainer.policy "base_model" $values.model.name "base_model_name" $values.model.servedName -}}
{{- $_ := set $base "loss" (dict "kl" (dict "coef" 0.02 "kind" "k2" "against" "base")) -}}
{{- if gt (int (dig "gpu" "count" $values.defaults.gpu.count ($values.roles.trainer | default dict))) 0 -}}{{- $_ := set $base "micro_batch_tokens" 16384 -}}{{- end -}}
{{- if and $values.kafka.embedded.enabled (include "tentalis.simulated" .root) -}}{{- $_ := set $base "steps" 1000 -}}{{- end -}}
{{- mergeOverwrite $base (deepCopy ($values.trainer.config | default dict)) | toYaml -}}
{{- else if eq .role "gateway" -}}
{{- with $values.gateway.config -}}{{- toYaml . -}}{{- end -}}
{{- else if eq .role "scoring" -}}
{{- with $values.scorers -}}{{- toYaml . -}}{{- end -}}
{{- else if has .role (list "hinting" "experience") -}}
{{- with $values.hinters -}}{{- toYaml . -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* The ConfigMap with the file of environments for a role, empty if it reads none. Arguments: root, role. */}}
{{- define "tentalis.environmentsConfigMap" -}}
{{- if has .role (list "worker" "scoring" "hinting" "aggregation" "gateway") -}}
{{- $file := .root.Values.environmentFile -}}
{{- if $file.configMap -}}{{- $file.configMap -}}
{{- else if $file.content -}}{{- include "tentalis.fullname" .root -}}-environments
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The name of the image of a workload. Arguments: root, workload. */}}
{{- define "tentalis.imageName" -}}
{{- $workload := .workload -}}
{{- if $workload.settings.image -}}{{- $workload.settings.image -}}
{{- else if eq $workload.role "model" -}}model
{{- else if and (eq $workload.role "trainer") (gt (int $workload.settings.gpu.count) 0) -}}trainer-gpu
{{- else if eq $workload.role "trainer" -}}trainer-cpu
{{- else -}}core
{{- end -}}
{{- end -}}

{{/* The arguments of a workload's process. Arguments: root, workload, config. */}}
{{- define "tentalis.args" -}}
{{- $values := .root.Values -}}
{{- $workload := .workload -}}
{{- $role := $workload.role -}}
{{- $options := $workload.topology.options -}}
{{- $args := $workload.topology.command -}}
{{- if has "--instance" $options -}}{{- $args = concat $args (list "--instance" "$(POD_NAMESPACE).$(POD_NAME)") -}}{{- end -}}
{{- if has "--metrics-port" $options -}}{{- $args = concat $args (list "--metrics-port" "9464") -}}{{- end -}}
{{- if has "--host" $options -}}{{- $args = concat $args (list "--host" "0.0.0.0") -}}{{- end -}}
{{- if has "--port" $options -}}{{- $args = concat $args (list "--port" (toString $workload.topology.port)) -}}{{- end -}}
{{- if has "--server-id" $options -}}{{- $args = concat $args (list "--server-id" $values.server.id) -}}{{- end -}}
{{- if eq $role "worker" -}}
{{- $args = concat $args (list "--environment" $workload.environment "--concurrency" (toString $values.worker.concurrency) "--logprobs-mode" $values.server.logprobsMode) -}}
{{- with $values.worker.tools -}}{{- $args = concat $args (list "--tools" .) -}}{{- end -}}
{{- with $values.worker.tasks -}}{{- $args = concat $args (list "--tasks" .) -}}{{- end -}}
{{- else if eq $role "gateway" -}}
{{- $args = concat $args (list "--gateway-id" "$(POD_NAME)") -}}
{{- if .config -}}{{- $args = concat $args (list "--config" "/etc/tentalis/config/config.yaml") -}}
{{- else -}}{{- $args = concat $args (list "--policy" $values.trainer.policy "--logprobs-mode" $values.server.logprobsMode) -}}{{- end -}}
{{- if $values.gateway.noKeys -}}{{- $args = append $args "--no-keys" -}}
{{- else -}}{{- $args = concat $args (list "--keys" "/etc/tentalis/keys/keys.json") -}}{{- end -}}
{{- else if eq $role "manager" -}}
{{- $args = concat $args (list "--run" (include "tentalis.runId" .root) "--scenario" $values.manager.scenario) -}}
{{- with $values.manager.samples -}}{{- $args = concat $args (list "--samples" (toString .)) -}}{{- end -}}
{{- with $values.manager.curriculum -}}{{- $args = concat $args (list "--curriculum" .) -}}{{- end -}}
{{- else if eq $role "trainer" -}}
{{- $args = concat $args (list "--config" "/etc/tentalis/config/config.yaml" "--ranks" (toString (max (int $values.trainer.ranks) (int $workload.settings.gpu.count)))) -}}
{{- if gt (int $values.trainer.nodes) 1 -}}
{{- $name := printf "%s-%s" (include "tentalis.fullname" .root) $workload.component -}}
{{- $args = concat $args (list "--nodes" (toString $values.trainer.nodes) "--rendezvous" (printf "%s-0.%s:%d" $name $name 29400)) -}}
{{- end -}}
{{- else if eq $role "model" -}}
{{- $args = concat $args (list "--policy-model" $values.model.name "--served-name" $values.model.servedName "--device" $values.model.device "--dtype" $values.model.dtype "--max-batch" (toString $values.model.maxBatch)) -}}
{{- with $values.model.threads -}}{{- $args = concat $args (list "--threads" (toString .)) -}}{{- end -}}
{{- with $values.model.maxLength -}}{{- $args = concat $args (list "--max-model-len" (toString .)) -}}{{- end -}}
{{- end -}}
{{- toJson (concat $args $workload.settings.args) -}}
{{- end -}}

{{/* A probe. Arguments: path, port, with (the fields that override). */}}
{{- define "tentalis.probe" -}}
{{- $probe := dict "httpGet" (dict "path" .path "port" .port) "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" 6 -}}
{{- toYaml (mergeOverwrite $probe (deepCopy .with)) -}}
{{- end -}}

{{/* The container that waits for the topics of a role. It asks for no more than the process after it. Arguments: root, role, resources. */}}
{{- define "tentalis.waitForTopics" -}}
- name: wait-for-topics
  image: {{ include "tentalis.image" (dict "root" .root "image" "core") }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args: {{ list "topics" "wait" "--role" .role "--timeout" (toString .root.Values.topics.waitSeconds) | toJson }}
  env: {{- include "tentalis.env" . | nindent 4 }}
  resources: {{- toYaml .resources | nindent 4 }}
  securityContext: {{- toYaml .root.Values.securityContext | nindent 4 }}
  volumeMounts: {{- include "tentalis.mounts" . | nindent 4 }}
{{- end -}}

{{/* The affinity of a workload: its own, and for the users of one ReadWriteOnce volume the node that they share. Arguments: root, workload, storage. */}}
{{- define "tentalis.affinity" -}}
{{- $affinity := deepCopy (.workload.settings.affinity | default dict) -}}
{{- if and .storage (eq .root.Values.storage.accessMode "ReadWriteOnce") -}}
{{- $labels := include "tentalis.selectorLabels" .root | fromYaml -}}
{{- $labels = merge (dict "tentalis.io/storage" "shared") $labels -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" $labels) -}}
{{- $pod := get $affinity "podAffinity" | default dict -}}
{{- $required := get $pod "requiredDuringSchedulingIgnoredDuringExecution" | default list -}}
{{- $_ := set $pod "requiredDuringSchedulingIgnoredDuringExecution" (append $required $term) -}}
{{- $_ := set $affinity "podAffinity" $pod -}}
{{- end -}}
{{- with $affinity -}}{{- toYaml . -}}{{- end -}}
{{- end -}}

{{/* The spread of a workload's pods. Arguments: root, workload. */}}
{{- define "tentalis.spread" -}}
{{- $settings := .workload.settings -}}
{{- if kindIs "slice" $settings.topologySpreadConstraints -}}
{{- with $settings.topologySpreadConstraints -}}{{- toYaml . -}}{{- end -}}
{{- else if or (not .workload.topology.single) (and (eq .workload.role "trainer") (gt (int .root.Values.trainer.nodes) 1)) -}}
{{- /* With one replica too: constraints that came with the second one would replace the first. */}}
{{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- maxSkew: 1
  topologyKey: {{ $key }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "tentalis.selectorLabels" $.root | nindent 6 }}
      app.kubernetes.io/component: {{ $.workload.component }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* The pod template of a workload. Arguments: root, workload. */}}
{{- define "tentalis.podTemplate" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $workload := .workload -}}
{{- $role := $workload.role -}}
{{- $settings := $workload.settings -}}
{{- $options := $workload.topology.options -}}
{{- $arguments := dict "root" $root "role" $role -}}
{{- $config := include "tentalis.roleConfig" $arguments -}}
{{- $scorers := and (eq $role "gateway") (not (empty $values.scorers)) -}}
{{- $environments := include "tentalis.environmentsConfigMap" $arguments -}}
{{- $keys := include "tentalis.keysSecret" $root -}}
{{- $episodes := ternary (include "tentalis.episodesSecret" $root) "" (has $role (list "worker" "gateway")) -}}
{{- $stores := has $role (list "trainer" "policies" "model") -}}
{{- /* They share a claim, or an object store. The policies process keeps adapters for vLLM where it fetched them. */}}
{{- $storage := and $stores (not $values.storage.url) -}}
{{- $models := or (has $role (list "trainer" "model")) (and $stores (not $storage)) -}}
{{- $claimed := and $settings.persistence.enabled (eq $workload.kind "StatefulSet") (not $storage) -}}
{{- $port := ternary "http" "metrics" (not (empty $workload.topology.port)) -}}
metadata:
  labels:
    {{- $labels := merge (dict "tentalis.io/role" $role) (ternary (dict "tentalis.io/storage" "shared") dict $storage) ($settings.podLabels | default dict) }}
    {{- include "tentalis.labels" (dict "root" $root "component" $workload.component "labels" $labels) | nindent 4 }}
  annotations:
    {{- /* Of the files that the process reads at its start. */}}
    checksum/config: {{ print $config (ternary (toYaml $values.scorers) "" $scorers) (ternary (toYaml $values.environmentFile) "" (not (empty $environments))) | sha256sum }}
    {{- with $settings.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "tentalis.serviceAccountName" $root | quote }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  {{- if eq $workload.kind "Job" }}
  restartPolicy: OnFailure
  {{- end }}
  securityContext: {{- toYaml $values.podSecurityContext | nindent 4 }}
  terminationGracePeriodSeconds: {{ $settings.terminationGracePeriodSeconds }}
  {{- with $settings.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with $settings.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with $settings.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $settings.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "tentalis.affinity" (dict "root" $root "workload" $workload "storage" $storage) }}
  affinity: {{- . | nindent 4 }}
  {{- end }}
  {{- with include "tentalis.spread" . | trim }}
  topologySpreadConstraints: {{- . | nindent 4 }}
  {{- end }}
  {{- if and $workload.topology.onLog (gt (int $values.topics.waitSeconds) 0) }}
  initContainers:
    {{- include "tentalis.waitForTopics" (merge (dict "resources" $settings.resources) $arguments) | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ $role }}
      image: {{ include "tentalis.image" (dict "root" $root "image" (include "tentalis.imageName" .)) }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args: {{ include "tentalis.args" (dict "root" $root "workload" $workload "config" $config) }}
      env:
        {{- include "tentalis.env" $arguments | nindent 8 }}
        {{- if has "--server" $options }}
        {{- if not (and (eq $role "gateway") $config) }}
        - {name: TENTALIS_SERVER, value: {{ include "tentalis.serverUrl" $root | quote }}}
        {{- end }}
        {{- end }}
        {{- if and (has "--metrics-port" $options) (not $workload.topology.port) }}
        # A restart does not repair what these exit codes stand for; a trainer with 0 has finished its run.
        - {name: TENTALIS_HOLD, value: {{ ternary "0,5,7" "5,7" (eq $role "trainer") | quote }}}
        {{- end }}
        {{- if and (eq $role "trainer") (gt (int $values.trainer.nodes) 1) }}
        - {name: TENTALIS_TRAINER_NODE, valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}}
        {{- end }}
        {{- if has "--state" $options }}
        - {name: TENTALIS_STATE, value: {{ $values.state.store }}}
        {{- end }}
        {{- if and $config (has "--hinters" $options) }}
        - {name: TENTALIS_HINTERS, value: /etc/tentalis/config/config.yaml}
        {{- end }}
        {{- if and $config (eq $role "scoring") }}
        - {name: TENTALIS_SCORERS, value: /etc/tentalis/config/config.yaml}
        {{- end }}
        {{- if $scorers }}
        - {name: TENTALIS_SCORERS, value: /etc/tentalis/scorers/config.yaml}
        {{- end }}
        {{- if $environments }}
        - {name: TENTALIS_ENVIRONMENT_FILE, value: /etc/tentalis/environments/environments.yaml}
        {{- end }}
        {{- if $episodes }}
        - {name: TENTALIS_EPISODE_SECRET_FILE, value: /etc/tentalis/episodes/secret}
        {{- if eq $role "worker" }}
        - {name: TENTALIS_URL, value: {{ printf "http://%s-gateway:%d" (include "tentalis.fullname" $root) (int $values.gateway.service.port) }}}
        {{- end }}
        {{- end }}
        {{- with $settings.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- $from := $settings.envFrom }}
      {{- if and $values.model.hubSecret (has $role (list "trainer" "model")) }}
      {{- $from = append $from (dict "secretRef" (dict "name" $values.model.hubSecret)) }}
      {{- end }}
      {{- $reaches := or (and $values.storage.url $stores) (and $values.storage.attachments (eq $role "worker")) }}
      {{- if and $values.storage.credentialsSecret $reaches }}
      {{- $from = append $from (dict "secretRef" (dict "name" $values.storage.credentialsSecret)) }}
      {{- end }}
      {{- with $from }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        {{- if $workload.topology.port }}
        - {name: http, containerPort: {{ $workload.topology.port }}, protocol: TCP}
        {{- end }}
        {{- if has "--metrics-port" $options }}
        - {name: metrics, containerPort: 9464, protocol: TCP}
        {{- end }}
      {{- if eq $role "gateway" }}
      # Endpoints learn of the end of a pod later than the pod does.
      lifecycle: {preStop: {exec: {command: [sleep, "5"]}}}
      {{- end }}
      startupProbe:
        httpGet: {path: /healthz, port: {{ $port }}}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add (int $settings.startupSeconds) 4) 5 }}
      livenessProbe: {{- include "tentalis.probe" (dict "path" "/healthz" "port" $port "with" $settings.livenessProbe) | nindent 8 }}
      readinessProbe: {{- include "tentalis.probe" (dict "path" "/readyz" "port" $port "with" (merge (deepCopy $settings.readinessProbe) (dict "periodSeconds" 5 "failureThreshold" 2))) | nindent 8 }}
      {{- $resources := deepCopy $settings.resources }}
      {{- if gt (int $settings.gpu.count) 0 }}
      {{- $_ := set $resources "limits" (mergeOverwrite (dict $settings.gpu.resource (int $settings.gpu.count)) ($resources.limits | default dict)) }}
      {{- end }}
      resources: {{- toYaml $resources | nindent 8 }}
      securityContext: {{- toYaml $values.securityContext | nindent 8 }}
      volumeMounts:
        {{- include "tentalis.mounts" $arguments | nindent 8 }}
        - {name: state, mountPath: /var/lib/tentalis{{ if and $storage (ne $role "trainer") }}, readOnly: true{{ end }}}
        {{- if $models }}
        - {{ if $values.cache.existingClaim }}{name: cache, mountPath: /var/cache/tentalis}{{ else }}{name: state, mountPath: /var/cache/tentalis, subPath: cache}{{ end }}
        {{- end }}
        {{- if $config }}
        - {name: config, mountPath: /etc/tentalis/config, readOnly: true}
        {{- end }}
        {{- if $scorers }}
        - {name: scorers, mountPath: /etc/tentalis/scorers, readOnly: true}
        {{- end }}
        {{- if $environments }}
        - {name: environments, mountPath: /etc/tentalis/environments, readOnly: true}
        {{- end }}
        {{- if and $keys (eq $role "gateway") }}
        - {name: keys, mountPath: /etc/tentalis/keys, readOnly: true}
        {{- end }}
        {{- if $episodes }}
        - {name: episodes, mountPath: /etc/tentalis/episodes, readOnly: true}
        {{- end }}
        {{- if eq $role "trainer" }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- with $settings.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "tentalis.volumes" $arguments | nindent 4 }}
    {{- if $storage }}
    - {name: state, persistentVolumeClaim: {claimName: {{ include "tentalis.storageClaim" $root | quote }}}}
    {{- else if not $claimed }}
    - {name: state, emptyDir: {}}
    {{- end }}
    {{- if and $models $values.cache.existingClaim }}
    - {name: cache, persistentVolumeClaim: {claimName: {{ $values.cache.existingClaim | quote }}}}
    {{- end }}
    {{- if $config }}
    - {name: config, configMap: {name: {{ include "tentalis.fullname" $root }}-{{ $role }}}}
    {{- end }}
    {{- if $scorers }}
    - {name: scorers, configMap: {name: {{ include "tentalis.fullname" $root }}-scoring}}
    {{- end }}
    {{- if $environments }}
    - {name: environments, configMap: {name: {{ $environments | quote }}}}
    {{- end }}
    {{- if and $keys (eq $role "gateway") }}
    - name: keys
      secret:
        secretName: {{ $keys | quote }}
        items: [{key: {{ ternary $values.gateway.keysKey "keys.json" (not (empty $values.gateway.keysSecret)) | quote }}, path: keys.json}]
    {{- end }}
    {{- if $episodes }}
    - name: episodes
      secret:
        secretName: {{ $episodes | quote }}
        items: [{key: {{ ternary $values.episodes.secretKey "secret" (not (empty $values.episodes.existingSecret)) | quote }}, path: secret}]
    {{- end }}
    {{- if eq $role "trainer" }}
    - {name: shm, emptyDir: {medium: Memory}}
    {{- end }}
    {{- with $settings.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
