{{/* Names, labels and settings that the templates share. */}}

{{- define "tentalis.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "tentalis.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "tentalis.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "tentalis.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "tentalis.selectorLabels" -}}
app.kubernetes.io/name: {{ include "tentalis.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* Labels of a resource. Arguments: root, component (may be empty), labels (may be absent; they come before commonLabels). */}}
{{- define "tentalis.labels" -}}
{{- $own := include "tentalis.selectorLabels" .root | fromYaml -}}
{{- with .component }}{{- $_ := set $own "app.kubernetes.io/component" . -}}{{- end -}}
{{- $_ := set $own "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $_ := set $own "app.kubernetes.io/part-of" "tentalis" -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") -}}
{{- toYaml (merge (dict) (.labels | default dict) $own (.root.Values.commonLabels | default dict)) -}}
{{- end -}}

{{/* Metadata of a resource. Arguments: root, name, component, annotations and labels (may be absent). */}}
{{- define "tentalis.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .namespace | default .root.Release.Namespace | quote }}
labels:
  {{- include "tentalis.labels" . | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) (.root.Values.commonAnnotations | default dict) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "tentalis.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "tentalis.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* An image of the product. Arguments: root, image. */}}
{{- define "tentalis.image" -}}
{{- $values := .root.Values.image -}}
{{- $path := printf "%s/%s/%s" $values.registry $values.repository .image | trimPrefix "/" -}}
{{- with get $values.digests .image -}}
{{- printf "%s@%s" $path . -}}
{{- else -}}
{{- printf "%s:%s" $path ($values.tag | default $.root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "tentalis.bootstrap" -}}
{{- if .Values.kafka.embedded.enabled -}}
{{- printf "%s-kafka.%s.svc:9092" (include "tentalis.fullname" .) .Release.Namespace -}}
{{- else -}}
{{- .Values.kafka.bootstrap -}}
{{- end -}}
{{- end -}}

{{/* A name on the log (a topic, a group, a resource of an ACL), with the prefix of the namespace. Arguments: root, name. */}}
{{- define "tentalis.kafkaName" -}}
{{- $prefix := .root.Values.kafka.namespacePrefix -}}
{{- if and $prefix (hasPrefix "tentalis" .name) -}}{{- printf "%s.%s" $prefix .name -}}{{- else -}}{{- .name -}}{{- end -}}
{{- end -}}

{{/* The port of a URL. */}}
{{- define "tentalis.urlPort" -}}
{{- $url := urlParse . -}}
{{- ternary (splitList ":" $url.host | last) (ternary "443" "80" (eq $url.scheme "https")) (contains ":" $url.host) -}}
{{- end -}}

{{- define "tentalis.serverUrl" -}}
{{- .Values.server.url | default (printf "http://%s-model:8000" (include "tentalis.fullname" .)) -}}
{{- end -}}

{{- define "tentalis.runId" -}}
{{- .Values.trainer.runId | default .Release.Name -}}
{{- end -}}

{{/* Annotations of a Job: Argo CD calls every revision 1, and must make the Job anew for another image. */}}
{{- define "tentalis.replaced" -}}
argocd.argoproj.io/sync-options: Force=true,Replace=true
{{- end -}}

{{/* What becomes of the claims of a StatefulSet: the log, the spools and the checkpoints stay together or go together. */}}
{{- define "tentalis.claimRetention" -}}
{whenDeleted: {{ ternary "Retain" "Delete" .Values.storage.keep }}, whenScaled: Retain}
{{- end -}}

{{- define "tentalis.storageClaim" -}}
{{- .Values.storage.existingClaim | default (printf "%s-storage" (include "tentalis.fullname" .)) -}}
{{- end -}}

{{/*
The enabled workloads as a YAML list: one per role, and of a role with a group per environment one per environment. Each has the
role's name, its entry in files/topology.yaml, its settings (`defaults` under `roles`), its component and its kind.
*/}}
{{- define "tentalis.workloads" -}}
{{- $topology := .Files.Get "files/topology.yaml" | fromYaml -}}
{{- $list := list -}}
{{- range $name := keys $topology.roles | sortAlpha -}}
{{- $role := get $topology.roles $name -}}
{{- $given := get $.Values.roles $name | default dict -}}
{{- $settings := mergeOverwrite (deepCopy $.Values.defaults) (deepCopy $given) -}}
{{- $enabled := or $role.default (and (eq $name "manager") $.Values.kafka.embedded.enabled) -}}
{{- if kindIs "bool" $given.enabled -}}{{- $enabled = $given.enabled -}}{{- end -}}
{{- if $enabled -}}
{{- $kind := "Deployment" -}}
{{- if or $role.stream (eq $name "trainer") (and $settings.persistence.enabled (eq $name "gateway")) -}}{{- $kind = "StatefulSet" -}}{{- end -}}
{{- if and $role.ends (eq $name "manager") -}}{{- $kind = "Job" -}}{{- end -}}
{{- if eq (toString $role.groupBy) "environment" -}}
{{- range $environment := $.Values.worker.environments -}}
{{- $list = append $list (dict "role" $name "component" (printf "%s-%s" $name $environment) "environment" $environment "kind" $kind "topology" $role "settings" $settings) -}}
{{- end -}}
{{- else -}}
{{- $list = append $list (dict "role" $name "component" $name "environment" "" "kind" $kind "topology" $role "settings" $settings) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml (dict "workloads" $list "topics" $topology.topics "users" $topology.users "recordLimitBytes" $topology.recordLimitBytes) -}}
{{- end -}}

{{/* True if the release has simulated users. */}}
{{- define "tentalis.simulated" -}}
{{- range (include "tentalis.workloads" . | fromYaml).workloads }}{{ if eq .role "manager" }}true{{ end }}{{ end -}}
{{- end -}}

{{/* The Secret with the gateway's keys: the given one, or that of templates/keys.yaml. Empty: the gateway asks for no key. */}}
{{- define "tentalis.keysSecret" -}}
{{- if .Values.gateway.keysSecret -}}{{- .Values.gateway.keysSecret -}}
{{- else if and .Values.kafka.embedded.enabled (not .Values.gateway.noKeys) (dig "gateway" "enabled" true .Values.roles) -}}{{- printf "%s-keys" (include "tentalis.fullname" .) -}}
{{- end -}}
{{- end -}}

{{/* The Secret with the secret of the keys of episodes: the given one, or that of templates/episodes.yaml. Empty: no program plays. */}}
{{- define "tentalis.episodesSecret" -}}
{{- $files := .Values.environmentFile -}}
{{- /* The content of a ConfigMap of yours is not known here. */}}
{{- $plays := not (empty $files.configMap) -}}
{{- range (get ($files.content | default dict) "environments" | default list) }}{{- if eq (toString .base) "agent" }}{{- $plays = true }}{{- end }}{{- end -}}
{{- if not (dig "gateway" "enabled" true .Values.roles) -}}
{{- else if .Values.episodes.existingSecret -}}{{- .Values.episodes.existingSecret -}}
{{- else if $plays -}}{{- printf "%s-episodes" (include "tentalis.fullname" .) -}}
{{- end -}}
{{- end -}}

{{/* The name of the user of a role. Arguments: root, role. */}}
{{- define "tentalis.user" -}}
{{- $name := .root.Values.kafka.sasl.username | default (include "tentalis.kafkaName" (dict "root" .root "name" "tentalis")) -}}
{{- if .root.Values.kafka.perRoleUsers -}}{{- printf "%s-%s" $name .role -}}{{- else -}}{{- $name -}}{{- end -}}
{{- end -}}

{{/* The Secret of a role. Arguments: root, role, secret. */}}
{{- define "tentalis.userSecret" -}}
{{- if .root.Values.kafka.perRoleUsers -}}{{- printf "%s-%s" .secret .role -}}{{- else -}}{{- .secret -}}{{- end -}}
{{- end -}}

{{/* Variables of every process. Arguments: root, role. */}}
{{- define "tentalis.env" -}}
{{- $values := .root.Values -}}
{{- $kafka := $values.kafka -}}
{{- $protocol := $kafka.securityProtocol -}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
- {name: TENTALIS_BOOTSTRAP, value: {{ include "tentalis.bootstrap" .root | quote }}}
{{- with $kafka.namespacePrefix }}
- {name: TENTALIS_NAMESPACE, value: {{ . | quote }}}
{{- end }}
- {name: TENTALIS_HOME, value: /var/lib/tentalis}
- {name: TENTALIS_METRICS_HOST, value: "0.0.0.0"}
- {name: HOME, value: /tmp}
- {name: PYTHONUNBUFFERED, value: "1"}
- {name: TOKENIZERS_PARALLELISM, value: "false"}
{{- with $values.storage.url }}
- {name: TENTALIS_STORE, value: {{ . | quote }}}
{{- end }}
{{- if and $values.storage.attachments (eq .role "worker") }}
- {name: TENTALIS_ATTACHMENTS, value: {{ $values.storage.attachments | quote }}}
{{- end }}
{{- if or (has .role (list "trainer" "model")) (and $values.storage.url (eq .role "policies")) }}
- {name: TENTALIS_CACHE, value: /var/cache/tentalis}
- {name: HF_HOME, value: /var/cache/tentalis/huggingface}
{{- end }}
{{- if $values.model.offline }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- if ne $protocol "PLAINTEXT" }}
- {name: TENTALIS_SECURITY_PROTOCOL, value: {{ $protocol }}}
{{- end }}
{{- if hasPrefix "SASL" $protocol }}
- {name: TENTALIS_SASL_MECHANISM, value: {{ $kafka.sasl.mechanism }}}
- {name: TENTALIS_SASL_USERNAME, value: {{ include "tentalis.user" . | quote }}}
- {name: TENTALIS_SASL_PASSWORD_FILE, value: /etc/tentalis/sasl/password}
{{- end }}
{{- if hasSuffix "SSL" $protocol }}
- {name: TENTALIS_SSL_VERIFY_HOSTNAME, value: {{ $kafka.tls.verifyHostname | quote }}}
{{- if $kafka.tls.caSecret }}
- {name: TENTALIS_SSL_CA, value: /etc/tentalis/ca/ca.crt}
{{- end }}
{{- if $kafka.tls.clientSecret }}
- {name: TENTALIS_SSL_CERTIFICATE, value: /etc/tentalis/client/tls.crt}
- {name: TENTALIS_SSL_KEY, value: /etc/tentalis/client/tls.key}
{{- if $kafka.tls.keyPasswordKey }}
- {name: TENTALIS_SSL_KEY_PASSWORD_FILE, value: /etc/tentalis/client/password}
{{- end }}
{{- end }}
{{- end }}
{{- with $values.registry.url }}
- {name: SCHEMA_REGISTRY_URL, value: {{ . | quote }}}
{{- end }}
{{- if $values.registry.username }}
- {name: SCHEMA_REGISTRY_USER, value: {{ $values.registry.username | quote }}}
- {name: SCHEMA_REGISTRY_PASSWORD_FILE, value: /etc/tentalis/registry/password}
{{- end }}
{{- if $values.registry.caSecret }}
- {name: SCHEMA_REGISTRY_CA, value: /etc/tentalis/registry-ca/ca.crt}
{{- end }}
{{- range $name := keys ($values.telemetry | default dict) | sortAlpha }}
- {name: {{ $name }}, value: {{ get $values.telemetry $name | toString | quote }}}
{{- end }}
{{- end -}}

{{/* Mounts of every process. Arguments: root. */}}
{{- define "tentalis.mounts" -}}
{{- $values := .root.Values -}}
{{- $kafka := $values.kafka -}}
- {name: tmp, mountPath: /tmp}
{{- if hasPrefix "SASL" $kafka.securityProtocol }}
- {name: sasl, mountPath: /etc/tentalis/sasl, readOnly: true}
{{- end }}
{{- if and (hasSuffix "SSL" $kafka.securityProtocol) $kafka.tls.caSecret }}
- {name: ca, mountPath: /etc/tentalis/ca, readOnly: true}
{{- end }}
{{- if and (hasSuffix "SSL" $kafka.securityProtocol) $kafka.tls.clientSecret }}
- {name: client, mountPath: /etc/tentalis/client, readOnly: true}
{{- end }}
{{- if $values.registry.username }}
- {name: registry, mountPath: /etc/tentalis/registry, readOnly: true}
{{- end }}
{{- if $values.registry.caSecret }}
- {name: registry-ca, mountPath: /etc/tentalis/registry-ca, readOnly: true}
{{- end }}
{{- end -}}

{{/* Volumes of every process. Arguments: root, role. */}}
{{- define "tentalis.volumes" -}}
{{- $values := .root.Values -}}
{{- $kafka := $values.kafka -}}
- {name: tmp, emptyDir: {}}
{{- if hasPrefix "SASL" $kafka.securityProtocol }}
- name: sasl
  secret:
    secretName: {{ include "tentalis.userSecret" (merge (dict "secret" $kafka.sasl.existingSecret) .) | quote }}
    items: [{key: {{ $kafka.sasl.passwordKey | quote }}, path: password}]
{{- end }}
{{- if and (hasSuffix "SSL" $kafka.securityProtocol) $kafka.tls.caSecret }}
- name: ca
  secret:
    secretName: {{ $kafka.tls.caSecret | quote }}
    items: [{key: {{ $kafka.tls.caKey | quote }}, path: ca.crt}]
{{- end }}
{{- if and (hasSuffix "SSL" $kafka.securityProtocol) $kafka.tls.clientSecret }}
- name: client
  secret:
    secretName: {{ include "tentalis.userSecret" (merge (dict "secret" $kafka.tls.clientSecret) .) | quote }}
    items:
      - {key: {{ $kafka.tls.certificateKey | quote }}, path: tls.crt}
      - {key: {{ $kafka.tls.keyKey | quote }}, path: tls.key}
      {{- with $kafka.tls.keyPasswordKey }}
      - {key: {{ . | quote }}, path: password}
      {{- end }}
{{- end }}
{{- if $values.registry.username }}
- name: registry
  secret:
    secretName: {{ $values.registry.existingSecret | quote }}
    items: [{key: {{ $values.registry.passwordKey | quote }}, path: password}]
{{- end }}
{{- if $values.registry.caSecret }}
- name: registry-ca
  secret:
    secretName: {{ $values.registry.caSecret | quote }}
    items: [{key: {{ $values.registry.caKey | quote }}, path: ca.crt}]
{{- end }}
{{- end -}}

{{/* Fails for values that cannot work together. The schema has checked each value alone. */}}
{{- define "tentalis.check" -}}
{{- $values := .Values -}}
{{- $kafka := $values.kafka -}}
{{- if and $kafka.embedded.enabled $kafka.bootstrap -}}
{{- fail "kafka.bootstrap and kafka.embedded.enabled are both set: the embedded Kafka is for trying without your own" -}}
{{- end -}}
{{- if not (or $kafka.embedded.enabled $kafka.bootstrap) -}}
{{- fail "no Kafka is given: set kafka.bootstrap to your brokers (host:port,...), or, to try it, kafka.embedded.enabled=true" -}}
{{- end -}}
{{- if and $kafka.embedded.enabled (ne $kafka.securityProtocol "PLAINTEXT") -}}
{{- fail "the embedded Kafka has neither logins nor TLS: leave kafka.securityProtocol at PLAINTEXT, or use your own Kafka" -}}
{{- end -}}
{{- if and (hasPrefix "SASL" $kafka.securityProtocol) (not $kafka.sasl.existingSecret) -}}
{{- fail (printf "kafka.securityProtocol %s needs kafka.sasl.existingSecret: the Secret that holds the password" $kafka.securityProtocol) -}}
{{- end -}}
{{- if and $values.registry.username (not (and $values.registry.existingSecret (hasPrefix "https://" $values.registry.url))) -}}
{{- fail "registry.username needs registry.existingSecret, and a registry.url that begins with https://" -}}
{{- end -}}
{{- if and (or $values.strimzi.users.enabled (eq $values.topics.provision "strimzi")) (not $values.strimzi.cluster) -}}
{{- fail "strimzi.cluster is missing: the name of the Kafka resource to which topics and users belong" -}}
{{- end -}}
{{- if and $values.strimzi.users.enabled (not $kafka.perRoleUsers) -}}
{{- fail "strimzi.users.enabled makes one user per role: set kafka.perRoleUsers=true so that the roles use them" -}}
{{- end -}}
{{- if and (eq $values.topics.provision "strimzi") (eq $values.topics.onRisk "skip") -}}
{{- fail "topics.onRisk is skip, but with topics.provision strimzi the operator leaves no change out: choose stop or apply" -}}
{{- end -}}
{{- if and $values.storage.url $values.storage.existingClaim -}}
{{- fail "storage.url and storage.existingClaim are both set: checkpoints and adapters are in the one or in the other" -}}
{{- end -}}
{{- if and $values.environmentFile.content $values.environmentFile.configMap -}}
{{- fail "environmentFile.content and environmentFile.configMap are both set: the file of environments is the one or the other" -}}
{{- end -}}
{{- if and $values.storage.credentialsSecret (not (or $values.storage.url $values.storage.attachments)) -}}
{{- fail "storage.credentialsSecret needs storage.url or storage.attachments: a place in the object store" -}}
{{- end -}}
{{- $fullname := include "tentalis.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $fullname) -}}
{{- fail (printf "resources would be named %s-gateway and so on, but names of Services begin with a letter and have only a-z, 0-9 and hyphens: set fullnameOverride, or give the release another name" $fullname) -}}
{{- end -}}
{{- if and $kafka.embedded.enabled (gt (int $values.topics.replicationFactor) 1) -}}
{{- fail (printf "topics.replicationFactor is %d, but the embedded Kafka is one broker: leave it out" (int $values.topics.replicationFactor)) -}}
{{- end -}}
{{- $reserved := "^(app\\.kubernetes\\.io/(name|instance|component|version|managed-by|part-of)|helm\\.sh/chart|tentalis\\.io/.*)$" -}}
{{- range $key, $_ := $values.commonLabels -}}
{{- if regexMatch $reserved $key -}}
{{- fail (printf "commonLabels has %s, which the chart sets itself: leave it out" $key) -}}
{{- end -}}
{{- end -}}
{{- $workloads := (include "tentalis.workloads" . | fromYaml).workloads -}}
{{- $enabled := list -}}
{{- range $workloads -}}
{{- $settings := .settings -}}
{{- $enabled = append $enabled .role -}}
{{- $most := .topology.mostReplicas -}}
{{- $asked := dict "replicas" .settings.replicas -}}
{{- if .settings.autoscaling.enabled -}}{{- $_ := set $asked "autoscaling.maxReplicas" .settings.autoscaling.maxReplicas -}}{{- end -}}
{{- if .settings.keda.enabled -}}{{- $_ := set $asked "keda.maxReplicas" .settings.keda.maxReplicas -}}{{- end -}}
{{- $role := .role -}}
{{- range $key, $_ := .settings.podLabels -}}
{{- if regexMatch $reserved $key -}}
{{- fail (printf "the podLabels of roles.%s have %s, which the chart sets itself: leave it out" $role $key) -}}
{{- end -}}
{{- end -}}
{{- range $scaler := list "autoscaling" "keda" -}}
{{- $range := get $settings $scaler -}}
{{- if and $range.enabled (gt (int $range.minReplicas) (int $range.maxReplicas)) -}}
{{- fail (printf "roles.%s.%s: minReplicas is %d and maxReplicas is %d" $role $scaler (int $range.minReplicas) (int $range.maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- $name := printf "%s-%s" $fullname .component -}}
{{- if and (gt (len $name) 63) (or .topology.port (eq .kind "StatefulSet") $values.monitoring.serviceMonitor.enabled) -}}
{{- fail (printf "the Service %s has a name of more than 63 characters: set a shorter fullnameOverride" $name) -}}
{{- end -}}
{{- range $name, $number := $asked -}}
{{- if and $most (gt (int $number) (int $most)) -}}
{{- fail (printf "roles.%s.%s is %d, but its topics have %d partitions: further processes would have nothing to do" $role $name (int $number) (int $most)) -}}
{{- end -}}
{{- end -}}
{{- if and .settings.autoscaling.enabled .settings.keda.enabled -}}
{{- fail (printf "roles.%s has both autoscaling and keda enabled: choose one, they would work against each other" .role) -}}
{{- end -}}
{{- if and .settings.autoscaling.enabled (not (has .role (list "gateway" "worker"))) -}}
{{- fail (printf "roles.%s.autoscaling.enabled: only gateway and worker scale by themselves. A stream application moves state when it scales: set replicas" .role) -}}
{{- end -}}
{{- if and .settings.keda.enabled (ne .role "worker") -}}
{{- fail (printf "roles.%s.keda.enabled: only the worker scales by lag. A stream application moves state when it scales: set replicas" .role) -}}
{{- end -}}
{{- end -}}
{{- if and (has "model" $enabled) $values.server.url -}}
{{- fail "server.url names a model server outside the release: set roles.model.enabled=false" -}}
{{- end -}}
{{- if not (or (has "model" $enabled) $values.server.url) -}}
{{- fail "roles.model is disabled: name the model server in server.url" -}}
{{- end -}}
{{- if and (has "gateway" $enabled) (not (or (include "tentalis.keysSecret" .) $values.gateway.noKeys)) -}}
{{- fail "the gateway has no API keys: put a file of keys into a Secret and name it in gateway.keysSecret (`tentalis keys create --keys keys.json`, `kubectl create secret generic NAME --from-file keys.json`), or set gateway.noKeys=true" -}}
{{- end -}}
{{- if and $values.gateway.keysSecret $values.gateway.noKeys -}}
{{- fail "gateway.keysSecret and gateway.noKeys are both set: choose one" -}}
{{- end -}}
{{- if and $values.gateway.ingress.enabled (not (has "gateway" $enabled)) -}}
{{- fail "gateway.ingress.enabled leads to the gateway, but roles.gateway.enabled is false" -}}
{{- end -}}
{{- if and $values.gateway.ingress.enabled (not $values.gateway.ingress.host) -}}
{{- fail "gateway.ingress.host is missing" -}}
{{- end -}}
{{- if and (has "experience" $enabled) (not $values.hinters) -}}
{{- fail "roles.experience needs hinters: the model that extracts lessons (docs/concepts/hints.md)" -}}
{{- end -}}
{{- if and (has "manager" $enabled) (not (or (dig "steps" nil ($values.trainer.config | default dict)) $kafka.embedded.enabled)) -}}
{{- fail "roles.manager needs trainer.config.steps: simulated users pace their tasks by the steps of the run" -}}
{{- end -}}
{{- if and (gt (int $values.trainer.nodes) 1) (not $values.storage.url) (ne $values.storage.accessMode "ReadWriteMany") -}}
{{- fail "trainer.nodes: several pods of the trainer need an object store (storage.url) or a volume for all of them (storage.accessMode=ReadWriteMany)" -}}
{{- end -}}
{{- range $key := list "run_id" "policy" "base_model" "base_model_name" -}}
{{- if hasKey ($values.trainer.config | default dict) $key -}}
{{- fail (printf "trainer.config.%s: set trainer.runId, trainer.policy, model.name and model.servedName instead; other parts of the chart use them too" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
