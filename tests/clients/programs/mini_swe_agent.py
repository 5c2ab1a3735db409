"""mini-swe-agent with its own configuration in a folder."""

import os

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

config = yaml.safe_load((builtin_config_dir / "default.yaml").read_text())
model = LitellmModel(model_name="openai/gpt-4o-mini", cost_tracking="ignore_errors", **config.get("model", {}))
agent = DefaultAgent(model, LocalEnvironment(**config.get("environment", {})), **config["agent"])
print(agent.run("How is the weather in Oslo?"))
