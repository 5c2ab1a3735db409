"""The variables that no process of the product reads: those of docker-compose.yml, and those of the tests.

`tentalis.service.variables.LISTED` joins them to the others. Docker Compose replaces its variables in the text of
docker-compose.yml, with values of the environment or of the file `.env` beside it.
"""

from __future__ import annotations

from typing import Any

from tentalis.service.variable import PATH, PORT, TEXT, ValueKind, Variable, one_of, whole

_COMPOSE = "docker-compose.yml"
_TESTS = "the tests"


def _compose(
    name: str,
    default: object,
    meaning: str,
    kind: ValueKind[Any] = TEXT,
    default_text: str = "",
) -> Variable[Any]:
    return Variable(name, kind, default, meaning, _COMPOSE, default_text=default_text)


def _port(name: str, port: int, server: str) -> Variable[Any]:
    return _compose(name, port, f"Port of {server} on this machine.", PORT)


def _image(name: str, image: str, server: str) -> Variable[Any]:
    return _compose(name, image, f"Image of {server}.")


def _secret_file(name: str, content: str) -> Variable[Any]:
    return _compose(name, None, f"File with {content}; it is mounted as a secret.", PATH)


def _tests(name: str, meaning: str, kind: ValueKind[Any] = TEXT, default_text: str = "") -> Variable[Any]:
    return Variable(name, kind, None, meaning, _TESTS, default_text=default_text)


COMPOSE: tuple[Variable[Any], ...] = (
    _compose("TENTALIS_REGISTRY", "tentalis", "Registry and folder of the images of Tentalis."),
    _compose("TENTALIS_VERSION", "0.1.0", "Tag of the images of Tentalis."),
    _compose(
        "TORCH_CPU_INDEX",
        None,
        "Package index with torch for CPUs, from which the images of model and trainer are built.",
        default_text="torch with CUDA, as locked",
    ),
    _compose(
        "TENTALIS_POLICY_MODEL",
        "smollm2",
        "Base model: a hub id, a folder of the volume `state`, or smollm2, which comes from the package index.",
        default_text="smollm2; of vLLM Qwen/Qwen2.5-0.5B-Instruct",
    ),
    _compose(
        "TENTALIS_TRAINER_CONFIG",
        "./deploy/compose/trainer.yaml",
        "Configuration file of the trainer, which names the same model.",
        PATH,
        default_text="./deploy/compose/trainer.yaml; with the profile gpu ./deploy/compose/trainer-gpu.yaml",
    ),
    _compose(
        "TENTALIS_SERVER_DTYPE",
        "auto",
        "Precision of the model server, as in `serve policies --dtype`: bfloat16 or float16 with the profile gpu.",
        one_of("auto", "float32", "bfloat16", "float16"),
        default_text="auto; of vLLM bfloat16",
    ),
    _compose("TENTALIS_RANKS", 1, "Number of ranks and of GPUs of the trainer on GPUs.", whole(1)),
    _compose("TENTALIS_CPU_MODELS", 1, "Number of model servers on the CPU: 0 with the profile gpu.", whole(0, 1)),
    _compose("TENTALIS_CPU_TRAINERS", 1, "Number of trainers on the CPU: 0 with the profile gpu.", whole(0, 1)),
    _compose("TENTALIS_RUN", "compose", "Run of the simulated users, as in the trainer's configuration."),
    _compose("TENTALIS_SCENARIO", "assistant", "Scenario of the simulated users."),
    _compose("TENTALIS_ENVIRONMENT", "chat", "Environment of the worker: that of the scenario (chat, echo, math)."),
    _compose(
        "TENTALIS_WORKER",
        "core",
        "Image of the worker: worker-gui has what the environment gui needs.",
        one_of("core", "worker-gui"),
    ),
    _compose("TENTALIS_MANAGERS", 1, "Number of managers; with 0 there are no simulated users.", whole(0)),
    _compose("TENTALIS_GATEWAY_CONFIG", "./deploy/compose/gateway.yaml", "Configuration file of the gateway.", PATH),
    _port("TENTALIS_GATEWAY_PORT", 8200, "the gateway"),
    _port("TENTALIS_BRIDGE_PORT", 8100, "the gateway's bridge for clients of the first system"),
    _port("KAFKA_PORT", 9092, "Kafka"),
    _port("REGISTRY_PORT", 8081, "Apicurio Registry"),
    _port("PROMETHEUS_PORT", 9090, "Prometheus"),
    _port("GRAFANA_PORT", 3000, "Grafana"),
    _port("UI_PORT", 8080, "Kafka UI"),
    _compose("KAFKA_REPLICAS", 1, "Number of brokers: 0 with a Kafka of yours (TENTALIS_BOOTSTRAP).", whole(0, 1)),
    _compose("KAFKA_CLUSTER_ID", "WxqM3pRaTGWbGYRfl4DOTA", "Id of the Kafka cluster of a new volume."),
    _compose("KAFKA_HEAP_OPTS", "-Xms512m -Xmx512m", "Options of Java for the size of Kafka's memory."),
    _secret_file("KAFKA_PASSWORD_FILE", "the password of the login to your Kafka"),
    _secret_file("KAFKA_CA_FILE", "the authorities that sign the certificates of your brokers, as PEM"),
    _secret_file("KAFKA_CERTIFICATE_FILE", "the client's certificate for your Kafka, as PEM"),
    _secret_file("KAFKA_KEY_FILE", "the key of the client's certificate, as PEM, without a password"),
    _secret_file("REGISTRY_PASSWORD_FILE", "the password of your schema registry"),
    _secret_file("REGISTRY_CA_FILE", "the authorities that sign the certificate of your schema registry, as PEM"),
    _secret_file("AWS_CREDENTIALS_FILE", "the section [default] of the AWS tools, for the object store"),
    _compose("AWS_DEFAULT_REGION", "us-east-1", "Region of the object store."),
    _compose("AWS_ENDPOINT_URL_S3", None, "URL of the object store.", default_text="that of AWS"),
    _secret_file("HF_TOKEN_FILE", "the token for private models of the hub"),
    _secret_file("GRAFANA_PASSWORD_FILE", "the password of Grafana's user admin"),
    _compose(
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        None,
        "Collector of the traces, for the profile observability http://otel-collector:4318.",
        default_text="no traces",
    ),
    _secret_file("EPISODE_SECRET_FILE", "the secret of the keys of programs that play episodes"),
    _secret_file("JUDGE_KEY_FILE", "the API key that `api_key_env: JUDGE_KEY` in the file of TENTALIS_SCORERS names"),
    _secret_file("HINT_KEY_FILE", "the API key that `api_key_env: HINT_KEY` in the file of TENTALIS_HINTERS names"),
    _secret_file("OPENCLAW_TOKEN_FILE", "the token for the page of OpenClaw"),
    _secret_file("OPENCLAW_TENTALIS_KEY_FILE", "the API key of OpenClaw for the gateway"),
    _image("KAFKA_IMAGE", "apache/kafka:4.1.0", "Kafka"),
    _image("VLLM_IMAGE", "vllm/vllm-openai:v0.32.0", "vLLM"),
    _image("REGISTRY_IMAGE", "apicurio/apicurio-registry:3.0.9", "the schema registry"),
    _image("OLLAMA_IMAGE", "ollama/ollama:0.11.4", "Ollama"),
    _image("OPENCLAW_IMAGE", "ghcr.io/openclaw/openclaw:2026.6.8", "OpenClaw"),
    _image("PROMETHEUS_IMAGE", "prom/prometheus:v3.5.0", "Prometheus"),
    _image("GRAFANA_IMAGE", "grafana/grafana:12.1.0", "Grafana"),
    _image("OTEL_COLLECTOR_IMAGE", "otel/opentelemetry-collector-contrib:0.130.0", "the OpenTelemetry collector"),
    _image("UI_IMAGE", "kafbat/kafka-ui:v1.3.0", "Kafka UI"),
)
"""The variables that docker-compose.yml reads and no process does, in the order of .env.example."""

TESTS: tuple[Variable[Any], ...] = (
    _tests(
        "TENTALIS_TEST_KAFKA",
        "Kafka of the tests: embedded, container, or the bootstrap servers of a broker that runs.",
        default_text="a container if a Docker engine has the image, else the embedded one",
    ),
    _tests(
        "TENTALIS_TEST_KAFKA_IMAGE",
        "Image of the Kafka of the tests.",
        default_text="apache/kafka, else the image that `make test-docker` builds",
    ),
    _tests(
        "TENTALIS_TEST_REGISTRY",
        "Schema registry of the tests: container, process, own (a small one of the tests), or the URL of one.",
        default_text="a container if a Docker engine has the image, else a process",
    ),
    _tests(
        "TENTALIS_TEST_REGISTRY_IMAGE", "Image of the schema registry of the tests.", default_text="Apicurio Registry"
    ),
    _tests(
        "TENTALIS_TEST_EXAMPLES",
        "Number of examples of each property test of the streams.",
        whole(1),
        default_text="50",
    ),
    _tests("TENTALIS_API_EXAMPLES", "Number of examples of each operation of the bridge.", whole(1), default_text="5"),
    _tests(
        "TENTALIS_CLIENTS",
        "Interpreter of the environment with the client libraries; `make test-clients` sets it.",
        PATH,
        default_text="`make test-clients` sets it",
    ),
    _tests(
        "TENTALIS_OPENENV",
        "Interpreter of the environment with the package of OpenEnv; `make test-openenv` sets it.",
        PATH,
        default_text="`make test-openenv` sets it",
    ),
    _tests("TENTALIS_CHAOS_SEED", "Seed of a chaos test, to repeat it.", whole(0), default_text="a random one"),
)
"""The variables that the tests read."""
