"""docker-compose.yml: the services are the applications of the topology, and all that they name exists."""

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path, PurePosixPath
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import typer
import yaml

from schemas import topics
from tentalis.cli.main import app
from tentalis.gateway.settings import GatewaySettings
from tentalis.inference.vllm.command import VllmOptions, vllm_command
from tentalis.kafka import topology
from tentalis.kafka.topology import APPLICATIONS
from tentalis.service import variables
from tests.docker import profile_images, profiles, promtool
from tests.support import ROOT, apicurio, compose
from trainer.config.file import load_config

PROJECT = compose.project()
SERVICES: dict[str, Any] = PROJECT["services"]
OURS = {name: service for name, service in SERVICES.items() if compose.product_image(service)}
PROFILES = {"gpu", "registry", "ollama", "openclaw", "observability", "ui", "experience"}
CONFIGURED = {
    "KAFKA_PASSWORD_FILE": "./kafka-password",
    "KAFKA_CA_FILE": "./ca.pem",
    "KAFKA_KEY_FILE": "./key.pem",
    "GRAFANA_PASSWORD_FILE": "./grafana-password",
    "REGISTRY_PASSWORD_FILE": "./registry-password",
    "REGISTRY_CA_FILE": "./registry-ca.pem",
    "AWS_CREDENTIALS_FILE": "./aws-credentials",
    "TENTALIS_STORE": "s3://bucket/prefix",
    "TENTALIS_ATTACHMENTS": "s3://bucket/attachments",
    "TENTALIS_BOOTSTRAP": "elsewhere:9092",
    "TENTALIS_SCORERS": "./scorers.yaml",
    "TENTALIS_HINTERS": "./hinters.yaml",
    "TENTALIS_ENVIRONMENT_FILE": "./environments.yaml",
    "JUDGE_KEY_FILE": "./judge-key",
    "HINT_KEY_FILE": "./hint-key",
    "EPISODE_SECRET_FILE": "./episode-secret",
    "OPENCLAW_TOKEN_FILE": "./openclaw-token",
    "OPENCLAW_TENTALIS_KEY_FILE": "./openclaw-tentalis-key",
}
JOBS = {"topics", "keys"}  # they end, and others wait for that


def targets() -> set[str]:
    return set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE))


def test_every_application_of_the_topology_is_a_service() -> None:
    assert compose.deviations(SERVICES, APPLICATIONS) == []


def test_an_application_without_a_service_is_found() -> None:
    new = topology.stream("praising", "Praises.", consumes=(topics.SESSIONS,), produces=(), dead_letters=())
    assert compose.deviations(SERVICES, (*APPLICATIONS, new)) == ["praising has no service"]
    moved = SERVICES | {"join": SERVICES["join"] | {"command": ["serve", "scoring"], "depends_on": {}}}
    assert [each.partition(" ")[2][:4] for each in compose.deviations(moved, APPLICATIONS)] == ["runs", "does"]
    hidden = SERVICES | {"join": SERVICES["join"] | {"profiles": ["ui"]}}
    assert compose.deviations(hidden, APPLICATIONS) == ["join is in the profiles ['ui']"]


def test_there_are_no_services_of_ours_but_these() -> None:
    applications = {each.name for each in APPLICATIONS}
    assert OURS.keys() - applications == {"topics", "keys", "trainer-gpu"}
    assert compose.profiles(SERVICES) == PROFILES


@pytest.mark.parametrize("name", OURS)
def test_each_image_is_a_target_of_the_dockerfile(name: str) -> None:
    target = compose.product_image(OURS[name])
    assert target in targets()
    assert OURS[name]["image"].rpartition("/")[2].partition(":")[0] == target
    heavy = {"model": "model", "trainer": "trainer-cpu", "trainer-gpu": "trainer-gpu"}
    assert target == heavy.get(name, "core"), "torch stays out of what does not compute"


def on_host(service: dict[str, Any], argument: str) -> str:
    """An argument with the container's paths replaced by those of the files that are mounted there."""
    for volume in service["volumes"]:
        source, inside, *_ = volume.split(":")
        if source.startswith("."):
            argument = argument.replace(inside, str(ROOT / source))
    return argument


def command_of(arguments: list[str]) -> Any:
    """Returns the command of the product that these begin with, and takes its words from them."""
    found = cast(Any, typer.main.get_command(app))
    while hasattr(found, "commands"):
        found = found.commands[arguments.pop(0)]
    return found


@pytest.mark.parametrize("name", sorted(OURS.keys() - {"keys"}))
def test_each_command_is_one_of_the_product_with_options_that_it_has(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    service = OURS[name]
    hinters = tmp_path / "hinters.yaml"
    hinters.write_text("")
    required = {"TENTALIS_HINTERS": str(hinters)} if name == "experience" else {}
    for variable, value in (service["environment"] | required).items():
        monkeypatch.setenv(variable, value)
    arguments = [on_host(service, argument) for argument in service["command"]]
    found = command_of(arguments)
    found.make_context(name, arguments)  # raises for what the command does not have or lacks


@pytest.mark.parametrize("variable", [variables.SCORERS.name, variables.HINTERS.name])
def test_every_command_that_reads_a_file_of_judges_is_given_it(variable: str) -> None:
    given = compose.project(**CONFIGURED)
    readers = {
        name
        for name in OURS.keys() - {"keys"}
        if variable in {option.envvar for option in command_of([*OURS[name]["command"]]).params}
    }
    assert readers and readers == {name for name, each in OURS.items() if variable in each["environment"]}
    for name in readers:
        assert OURS[name]["environment"][variable] == "", "none is chosen by default"
        inside = given["services"][name]["environment"][variable]
        (source,) = (each["source"] for each in given["services"][name]["configs"] if each["target"] == inside)
        assert given["configs"][source]["file"] == CONFIGURED[variable]
        assert PROJECT["configs"][source]["file"] == "/dev/null"


def test_every_process_that_checks_environments_is_given_their_file() -> None:
    given, variable = compose.project(**CONFIGURED), variables.ENVIRONMENT_FILE.name
    readers = {name for name, each in OURS.items() if variable in each["environment"]}
    assert readers == {"worker", "scoring", "hinting", "experience", "aggregation", "gateway"}
    for name in readers:
        assert OURS[name]["environment"][variable] == "", "none is chosen by default"
        inside = given["services"][name]["environment"][variable]
        (source,) = (each["source"] for each in given["services"][name]["configs"] if each["target"] == inside)
        assert given["configs"][source]["file"] == CONFIGURED[variable]


JUDGES = {"JUDGE_KEY": {"scoring"}, "HINT_KEY": {"hinting", "experience"}}


@pytest.mark.parametrize("key", JUDGES)
def test_the_keys_of_judges_are_files_of_those_that_ask_them(key: str) -> None:
    given, secret = compose.project(**CONFIGURED), key.lower()
    holders = {name for name, service in SERVICES.items() if secret in service.get("secrets", ())}
    assert holders == JUDGES[key]
    for name in holders:
        assert OURS[name]["environment"][f"{key}_FILE"] == ""
        assert given["services"][name]["environment"][f"{key}_FILE"] == f"/run/secrets/{secret}"
        assert set(SERVICES[name]["secrets"]) - {secret} == set(SERVICES["join"]["secrets"])
    assert given["secrets"][secret]["file"] == CONFIGURED[f"{key}_FILE"]
    pages = [(ROOT / "docs" / "concepts" / page).read_text("utf-8") for page in ("judges.md", "hints.md")]
    assert any(f"api_key_env: {key}" in page for page in pages), "the pages name the keys that compose gives"


def test_worker_and_gateway_have_the_same_secret_for_programs_that_play_episodes() -> None:
    given, variable = compose.project(**CONFIGURED), variables.EPISODE_SECRET_FILE.name
    holders = {name for name, service in SERVICES.items() if "episode_secret" in service.get("secrets", ())}
    assert holders == {name for name, each in OURS.items() if variable in each["environment"]} == {"worker", "gateway"}
    homes = set()
    for name in holders:
        assert OURS[name]["environment"][variable] == "", "the default is the file in the folder that both share"
        homes |= {each for each in OURS[name]["volumes"] if each.endswith(":/var/lib/tentalis")}
        assert given["services"][name]["environment"][variable] == "/run/secrets/episode_secret"
        assert {*OURS[name]["secrets"]} - {"episode_secret"} == {*OURS["join"]["secrets"]}
    assert len(homes) == 1 and given["secrets"]["episode_secret"]["file"] == CONFIGURED["EPISODE_SECRET_FILE"]


def test_the_worker_names_the_gateway_that_programs_call() -> None:
    url = urlsplit(OURS["worker"]["environment"][variables.URL.name])
    assert url.hostname == "gateway" and url.port == topology.named("gateway").port
    assert "gateway" not in OURS["worker"]["depends_on"], "other environments need none"


def test_the_page_of_unchanged_agents_mounts_what_its_file_names_beside_the_file() -> None:
    page = (ROOT / "docs" / "how-to" / "unchanged-agents.md").read_text("utf-8")
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    (program,) = [each["environments"]["writer"]["program"] for each in blocks if "environments" in each]
    (override,) = [each["services"] for each in blocks if "services" in each]
    assert override.keys() == {"worker"}
    mounted = [volume.split(":")[1] for volume in override["worker"]["volumes"]]
    folder = PurePosixPath(OURS["worker"]["configs"][0]["target"]).parent
    for word in (*program["command"], *program["check"]):
        if (path := word.replace("{folder}", str(folder))) != word:
            assert any(PurePosixPath(path).is_relative_to(each) for each in mounted), path


def test_the_first_key_is_made_by_a_command_of_the_product() -> None:
    (script,) = OURS["keys"]["command"]
    arguments = re.search(r"tentalis (keys create .*) > api-key", script)
    assert arguments is not None
    found = cast(Any, typer.main.get_command(app)).commands["keys"].commands["create"]
    found.make_context("create", arguments[1].split()[2:])


@pytest.mark.parametrize("chosen", [c for n in range(3) for c in combinations(sorted(PROFILES), n)], ids="+".join)
def test_every_profile_starts_with_all_that_it_waits_for(chosen: tuple[str, ...]) -> None:
    services = compose.active(compose.project(**CONFIGURED)["services"], *chosen)
    volumes, secrets = PROJECT["volumes"], PROJECT["secrets"]
    published = [port.split(":") for service in services.values() for port in service.get("ports", ())]
    assert all(address == "127.0.0.1" for address, _, _ in published), "other machines need a decision of the operator"
    assert len({port for _, port, _ in published}) == len(published)
    for name, service in services.items():
        assert ":" in service["image"].rpartition("/")[2], f"{name} has no tag"
        for other, how in service.get("depends_on", {}).items():
            assert other in services or how.get("required") is False, f"{name} waits for {other}"
            ends = other in JOBS
            assert how["condition"] == ("service_completed_successfully" if ends else "service_healthy")
            assert ends or other not in services or "test" in services[other]["healthcheck"]
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in volumes, f"{name}: {source}"
        assert set(service.get("secrets", ())) <= secrets.keys()


def names_on_the_network() -> set[str]:
    aliases = (service.get("networks", {}).get("default", {}).get("aliases", ()) for service in SERVICES.values())
    return set(SERVICES) | {alias for each in aliases for alias in each}


def mounted_files(service: dict[str, Any]) -> Iterator[Path]:
    for volume in service.get("volumes", ()):
        if volume.startswith("./") and (ROOT / volume.partition(":")[0]).is_file():
            yield ROOT / volume.partition(":")[0]


def test_every_address_is_that_of_a_service() -> None:
    example = re.sub(r"(?m)^#(?=[A-Z0-9_]+=)", "", (ROOT / ".env.example").read_text("utf-8"))
    texts = [json.dumps(service) for service in SERVICES.values()]
    texts += [file.read_text("utf-8") for service in SERVICES.values() for file in mounted_files(service)]
    texts += [page.read_text("utf-8") for page in (ROOT / "deploy" / "grafana").rglob("*.yaml")]
    hosts = {host for text in [example, *texts] for host in re.findall(r"https?://([\w.-]+)", text)}
    brokers = re.findall(r"\w+:9092", json.dumps([service.get("environment") for service in SERVICES.values()]))
    hosts |= {broker.partition(":")[0] for broker in brokers}
    assert {"model", "gateway", "kafka", "registry", "otel-collector", "prometheus"} <= hosts
    elsewhere = {"localhost", "127.0.0.1", "minio.example", "registry.example"}
    assert hosts - elsewhere <= names_on_the_network()


KEPT = {
    "kafka": "kafka:/var/lib/kafka/data",
    "vllm": "huggingface:/root/.cache/huggingface",
    "ollama": "ollama:/root/.ollama",
    "openclaw": "openclaw:/home/node/.openclaw",
    "prometheus": "prometheus:/prometheus",
    "grafana": "grafana:/var/lib/grafana",
    "otel-collector": "traces:/var/lib/otel",
}


def test_what_a_service_writes_is_on_a_volume() -> None:
    for name, volume in KEPT.items():
        assert volume in SERVICES[name]["volumes"], name
    assert SERVICES["kafka"]["environment"]["KAFKA_LOG_DIRS"] == KEPT["kafka"].partition(":")[2]
    traces = yaml.safe_load((ROOT / "deploy" / "otel" / "collector.yaml").read_text("utf-8"))["exporters"]["file"]
    assert traces["path"].startswith(KEPT["otel-collector"].partition(":")[2])
    assert PROJECT["volumes"].keys() == {volume.partition(":")[0] for volume in KEPT.values()} | {"state"}


def seconds(text: str) -> int:
    assert text.endswith("s")
    return int(text.removesuffix("s"))


def test_the_health_of_every_service_is_asked_for() -> None:
    without = compose.unchecked(SERVICES)
    assert without == {*JOBS, "otel-collector"}
    for name in JOBS:
        assert SERVICES[name]["healthcheck"] == {"disable": True}, "a check of the image itself would not be seen here"
    # The image of the collector has no check and no client. `up --wait` refuses what runs on with a disabled check.
    assert "healthcheck" not in SERVICES["otel-collector"]


def test_a_service_without_a_check_is_found() -> None:
    assert compose.unchecked({"a": {}, "b": {"healthcheck": {"disable": True}}, "c": SERVICES["kafka"]}) == {"a", "b"}


@pytest.mark.parametrize("name", sorted(SERVICES.keys() - compose.unchecked(SERVICES)))
def test_a_service_is_not_given_up_while_it_starts(name: str) -> None:
    health = SERVICES[name]["healthcheck"]
    least = 900 if name in ("model", "vllm") else 120 if name in OURS else 60 if name in ("kafka", "registry") else 0
    assert seconds(health.get("start_period", "0s")) >= least, "models are fetched, brokers elect, states recover"
    assert seconds(health["timeout"]) <= seconds(health["interval"]) and health["retries"] >= 6


PORTS = {  # the port on which the software listens, and the one that is published
    "kafka": ("19092", "9092"),
    "gateway": ("8200", "8200"),
    "registry": ("8080", "8081"),
    "openclaw": ("18789", "18789"),
    "prometheus": ("9090", "9090"),
    "grafana": ("3000", "3000"),
    "ui": ("8080", "8080"),
}


def test_published_ports_are_those_on_which_the_services_listen() -> None:
    found = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert found.keys() == PORTS.keys()
    for name, (inside, outside) in PORTS.items():
        assert found[name][0] == f"127.0.0.1:{outside}:{inside}", name
        assert {port.rpartition(":")[2] for port in found[name]} == {inside}
    command = SERVICES["openclaw"]["command"]
    assert command[command.index("--port") + 1] == PORTS["openclaw"][0]
    assert f"on port {PORTS['openclaw'][1]}" in (ROOT / ".env.example").read_text("utf-8")
    assert topology.named("gateway").port == int(PORTS["gateway"][0])
    assert ":19092" in SERVICES["kafka"]["environment"]["KAFKA_LISTENERS"]
    assert "HOST://localhost:9092" in SERVICES["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]


def test_secrets_come_from_files() -> None:
    plain, given = PROJECT, compose.project(**CONFIGURED)
    for name, service in OURS.items():
        assert not any(service["environment"][key] for key in ("TENTALIS_SASL_PASSWORD_FILE", "TENTALIS_SSL_CA"))
        environment = given["services"][name]["environment"]
        assert environment["TENTALIS_SASL_PASSWORD_FILE"] == "/run/secrets/kafka_password"
        assert environment["TENTALIS_SSL_KEY"] == "/run/secrets/kafka_key" and "kafka_key" in service["secrets"]
        assert environment["SCHEMA_REGISTRY_PASSWORD_FILE"] == "/run/secrets/registry_password"
        assert environment["SCHEMA_REGISTRY_CA"] == "/run/secrets/registry_ca"
        assert {"registry_password", "registry_ca"} <= {*service["secrets"]}
        assert environment["AWS_SHARED_CREDENTIALS_FILE"] == "/run/secrets/aws_credentials"
        assert "aws_credentials" in service["secrets"] and environment["TENTALIS_STORE"] == "s3://bucket/prefix"
        assert environment["TENTALIS_ATTACHMENTS"] == "s3://bucket/attachments"
        assert not any(key.endswith(("PASSWORD", "SECRET_ACCESS_KEY")) for key in environment)
    hub = {name for name, service in SERVICES.items() if "hf_token" in service.get("secrets", ())}
    assert hub == {name for name, each in SERVICES.items() if "HF_TOKEN_PATH" in each.get("environment", ())}
    assert {"model", "trainer", "trainer-gpu", "vllm"} <= hub and "HF_TOKEN:" not in compose.text()
    assert {SERVICES[name]["environment"]["HF_TOKEN_PATH"] for name in hub} == {"/run/secrets/hf_token"}
    assert {secret["file"] for secret in plain["secrets"].values()} == {"/dev/null"}
    for name, service in SERVICES.items():
        secret = {key for key in service.get("environment", ()) if key.endswith(("TOKEN", "KEY", "PASSWORD", "SECRET"))}
        assert secret <= {"TENTALIS_SSL_KEY"}, f"{name} has a secret in its environment"  # that one is a path
    assert given["secrets"]["kafka_ca"]["file"] == "./ca.pem"


def test_openclaw_reads_its_secrets_from_the_files_that_are_mounted() -> None:
    service, given = SERVICES["openclaw"], compose.project(**CONFIGURED)
    config = json.loads((ROOT / "deploy" / "compose" / "openclaw.json").read_text("utf-8"))
    providers = config["secrets"]["providers"]
    assert {each["path"] for each in providers.values()} == {f"/run/secrets/{name}" for name in service["secrets"]}
    assert {(each["source"], each["mode"]) for each in providers.values()} == {("file", "singleValue")}
    token, key = config["gateway"]["auth"]["token"], config["models"]["providers"]["tentalis"]["apiKey"]
    for reference, variable in ((token, "OPENCLAW_TOKEN_FILE"), (key, "OPENCLAW_TENTALIS_KEY_FILE")):
        assert (reference["source"], reference["id"]) == ("file", "value")
        secret = providers[reference["provider"]]["path"].removeprefix("/run/secrets/")
        assert given["secrets"][secret]["file"] == CONFIGURED[variable]


@pytest.mark.parametrize("name", OURS)
def test_our_containers_are_locked_down(name: str) -> None:
    service = OURS[name]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"] and service["tmpfs"] == ["/tmp"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "state:/var/lib/tentalis" in service["volumes"]


def test_every_variable_is_in_the_example_and_no_other() -> None:
    example = (ROOT / ".env.example").read_text("utf-8")
    named = set(re.findall(r"^#?([A-Z0-9_]+)=", example, re.MULTILINE)) - {"COMPOSE_PROFILES"}
    # Further images, ports and settings can be changed without being advertised.
    quiet = {name for name in compose.variables_of(compose.text()) if name.endswith(("_IMAGE", "_PORT"))}
    read = compose.variables_of(compose.text()) - {"KAFKA_CLUSTER_ID", "KAFKA_HEAP_OPTS"}
    assert named <= read and read - named <= quiet


def test_the_example_shows_the_defaults() -> None:
    defaults = set(re.findall(r"\$\{(\w+):?-([^}]*)\}", compose.text()))
    first_part = (ROOT / ".env.example").read_text("utf-8").partition("# --- a Kafka of yours")[0]
    shown = set(re.findall(r"^#([A-Z0-9_]+)=(.*)$", first_part, re.MULTILINE))
    assert len(shown) > 10 and shown - defaults == set()


def test_the_broker_takes_the_records_that_the_topics_allow() -> None:
    environment, limit = SERVICES["kafka"]["environment"], topics.table().record_limit_bytes
    assert int(environment["KAFKA_MESSAGE_MAX_BYTES"]) == int(environment["KAFKA_REPLICA_FETCH_MAX_BYTES"]) == limit
    assert environment["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"


def options(service: str) -> dict[str, str]:
    return dict(argument.split("=", 1) for argument in SERVICES[service]["command"] if "=" in argument)


@pytest.mark.parametrize("file", ["trainer.yaml", "trainer-gpu.yaml"])
def test_the_runs_fit_the_servers_and_the_simulated_users(file: str) -> None:
    config = load_config(ROOT / "deploy" / "compose" / file, {})
    command = SERVICES["manager"]["command"]
    assert config.run_id == command[command.index("--run") + 1]
    assert config.steps is not None, "the simulated users take their pace from the steps of the run"
    server = options("vllm")["--served-model-name"] if config.device == "cuda" else options("model")["--served-name"]
    assert config.base_model_name == server
    model = options("vllm")["--model"] if config.device == "cuda" else options("model")["--policy-model"]
    assert config.base_model == model


def flags(command: list[str]) -> dict[str, str]:
    """The options of a command by name, with the value that follows the name or an equals sign, or none."""
    words = [word for argument in command for word in argument.split("=", 1)]
    pairs = zip(words, [*words[1:], ""], strict=True)
    return {word: "" if after.startswith("--") else after for word, after in pairs if word.startswith("--")}


def test_vllm_has_the_flags_that_training_needs() -> None:
    needed = flags(vllm_command(Path("vllm"), VllmOptions(Path("/m"), "base", dtype="bfloat16", gpu=True)))
    of_the_machine = {"--host", "--port", "--max-model-len", "--max-loras"}  # the image has its own address
    found = flags(SERVICES["vllm"]["command"])
    assert needed.keys() - found.keys() <= {"--host", "--port"}
    assert {name: found[name] for name in needed.keys() - of_the_machine} == {
        name: value for name, value in needed.items() if name not in of_the_machine
    }
    assert int(found["--max-cpu-loras"]) >= int(found["--max-loras"])
    assert SERVICES["vllm"]["environment"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"


def test_the_canary_has_the_tolerance_of_the_precision_in_which_the_server_serves() -> None:
    example = (ROOT / ".env.example").read_text("utf-8")
    block = example.partition("# gpu: ")[2].partition("\n\n")[0]
    gpu = compose.project(**dict(re.findall(r"(?m)^#([A-Z0-9_]+)=(.*)$", block)))["services"]
    assert flags(gpu["policies"]["command"])["--dtype"] == flags(gpu["vllm"]["command"])["--dtype"] == "bfloat16"
    assert flags(SERVICES["policies"]["command"])["--dtype"] == "auto", "our own server declares its precision"
    assert flags(SERVICES["vllm"]["command"])["--dtype"] == "bfloat16", "the GPU trainer computes in it"


@pytest.mark.parametrize("file", ["gateway.yaml", "gateway-ollama.yaml"])
def test_the_gateways_answer_with_the_policy_that_is_trained(file: str) -> None:
    settings = GatewaySettings.from_file(ROOT / "deploy" / "compose" / file, gateway_id="gateway")
    assert [policy.name for policy in settings.policies] == ["assistant"]
    hosts = {backend.url.split("/")[2] for backend in settings.backends}
    assert hosts <= {"model:8000", "ollama:11434"}
    assert SERVICES["vllm"]["networks"]["default"]["aliases"] == ["model"]


def test_vllm_is_the_version_of_the_lock() -> None:
    lock = (ROOT / "requirements-vllm.lock").read_text("utf-8")
    version = re.search(r"^vllm==(\S+)", lock, re.MULTILINE)
    assert version is not None and SERVICES["vllm"]["image"].endswith(f":v{version[1]}")


def test_the_images_that_the_docker_test_makes_stand_for_those_of_the_profiles() -> None:
    for service, (variable, dockerfile, _) in profile_images.MADE.items():
        image, version = profile_images.stock(service)
        assert f"image: ${{{variable}:-{image}}}" in compose.text() and version[0].isdigit()
        asks = SERVICES[service].get("healthcheck", {}).get("test", [""])
        client = next((each for each in ("wget", "curl") if each in " ".join(asks)), None)
        assert client is None or f"install --yes --no-install-recommends {client} " in dockerfile
    assert profile_images.stock("registry")[1] == apicurio.VERSION
    major, minor, patch = profile_images.stock("prometheus")[1].split(".")
    assert f"v0.{major}{int(minor):02}.{patch}" == promtool.VERSION
    config = yaml.safe_load((ROOT / "deploy" / "otel" / "collector.yaml").read_text("utf-8"))
    for kind in ("receiver", "processor", "exporter"):
        found = set(re.findall(rf'/{kind}/(\w+){kind}"', profile_images.MAIN))
        assert found == set(config[f"{kind}s"]), kind


def test_the_docker_test_asks_prometheus_for_every_process_of_the_stack() -> None:
    assert profiles.scraped(compose.active(SERVICES)) == {each for each in compose.active(OURS) if each not in JOBS}
    assert urlsplit(profiles.example("SCHEMA_REGISTRY_URL")).hostname == "registry"
    assert urlsplit(profiles.example("OTEL_EXPORTER_OTLP_ENDPOINT")).hostname == "otel-collector"
    assert set(profiles.SERVICES) == profile_images.MADE.keys()


def scraped(path: Path) -> dict[str, int]:
    jobs = yaml.safe_load(path.read_text("utf-8"))["scrape_configs"]
    return {name: each["port"] for job in jobs for each in job["dns_sd_configs"] for name in each["names"]}


def test_prometheus_asks_every_process() -> None:
    found = scraped(ROOT / "deploy" / "prometheus" / "prometheus.yml")
    assert found.keys() == OURS.keys() - JOBS
    assert {port for name, port in found.items() if name != "model"} == {compose.METRICS_PORT}
    assert found["model"] == topology.named("model").port


def test_prometheus_reads_the_alerts_that_are_mounted() -> None:
    mounted = {inside: source for source, inside, *_ in (v.split(":") for v in SERVICES["prometheus"]["volumes"])}
    config = PurePosixPath("/etc/prometheus/prometheus.yml")
    page = yaml.safe_load((ROOT / mounted[str(config)]).read_text("utf-8"))
    rules = [(ROOT / mounted[str(config.parent / name)]).read_text("utf-8") for name in page["rule_files"]]
    found = [rule["alert"] for text in rules for group in json.loads(text)["groups"] for rule in group["rules"]]
    chart = yaml.safe_load((ROOT / "helm/tentalis/files/alerts.yaml").read_text("utf-8"))
    assert found == [rule["alert"] for group in chart["groups"] for rule in group["rules"]]


def test_the_dashboards_are_those_of_the_chart_with_the_services_of_compose() -> None:
    pages = {page.name: page.read_text("utf-8") for page in (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")}
    assert pages.keys() == {page.name for page in (ROOT / "helm/tentalis/files/dashboards").glob("*.json")}
    assert "{{service}}" in pages["loop.json"] and not [name for name, text in pages.items() if "{{pod}}" in text]


def test_processes_that_a_restart_does_not_repair_are_held() -> None:
    for name in OURS.keys() - JOBS:
        assert SERVICES[name]["environment"]["TENTALIS_HOLD"] == "5,7", name
