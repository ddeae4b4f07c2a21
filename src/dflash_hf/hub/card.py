"""
The model card of a drafter, rendered from facts only: what is not known is left out.

Facts come from the drafter's own files (`config.json`, the weights' headers, `eval_report.json`, `eval_report.png`)
and from `card_facts.json` next to them, which holds the fields of [`CardFacts`].
"""

import json
import math
import shlex
from dataclasses import dataclass, field, fields
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from dflash_hf import hub_cards
from dflash_hf._io.errors import requires_extra
from dflash_hf._io.files import digest_of, read_json, write_json
from dflash_hf._io.names import ENGINES, FACTS_FILE, LLAMA_CPP, PLOT_FILE, REPORT_FILE
from dflash_hf._io.repositories import REPOSITORY_ID, is_repository_id
from dflash_hf.conversion.gguf_names import gguf_in
from dflash_hf.evaluation.methods import LABELS
from dflash_hf.evaluation.report import EvalReport
from dflash_hf.hub.check import check, drafter_folder, read_shapes
from dflash_hf.hub.code_version import uses_package_code
from dflash_hf.hub.drafter_folder import DrafterFolder
from dflash_hf.hub.findings import Finding, can_read_by_engine
from dflash_hf.hub.launch import launch_command
from dflash_hf.hub.limits import CHECKED_VERSIONS, PUBLISHED_LAYOUTS, RECOMMENDED_SINCE, first_version
from dflash_hf.layouts.configuration import DFlashDraftConfig
from dflash_hf.modeling.modeling_dflash import code_files


TEMPLATE = Path(hub_cards.__file__).parent / "model_card_template.md"
# The beginning of the last line of a rendered card. The digest of the text above follows, by which an edited card is
# recognised, and kept.
_RENDERED_MARK = "\n\n<!-- Rendered card: `dflash publish` keeps it once it is edited; digest "
# Types of the facts that are not text.
_TYPES_OF_FACTS: dict[str, type] = {"datasets": list, "training": dict, "report": dict}
# Facts that training and evaluation write.
_MEASURED_FACTS = ("training", "report", "plot")
_TAGS = ("dflash", "speculative-decoding", "block-diffusion", "draft-model")


@dataclass
class CardFacts:
    """
    Facts of a card beyond the drafter's own files.

    Args:
        base_model (`str`): Repository of the target.
        base_model_revision (`str`, *optional*): Its commit.
        license (`str`, *optional*): The Hub's identifier, e.g. `"mit"`; `"other"` with `license_name`.
        datasets (`list[str]`): Repositories of the training data.
        data (`str`, *optional*): A sentence about the data: how many samples, whose responses.
        hardware (`str`, *optional*): Hardware of the evaluation.
        training (`dict`): Training arguments.
        evaluated_on (`str`, *optional*): The evaluation's dataset; without it there is no model-index.
        report (`dict`, *optional*): An `EvalReport` as JSON.
        plot (`str`, *optional*): File name of its plot in the folder.
        license_name (`str`, *optional*): Of another license, e.g. `"my-license-1.0"`.
        license_link (`str`, *optional*): To its text: a URL, or a file in the folder.

    Raises:
        `ValueError`: names field, value and remedy.
    """

    base_model: str
    base_model_revision: str | None = None
    license: str | None = None
    datasets: list[str] = field(default_factory=list)
    data: str | None = None
    hardware: str | None = None
    training: dict = field(default_factory=dict)
    evaluated_on: str | None = None
    report: dict | None = None
    plot: str | None = None
    license_name: str | None = None
    license_link: str | None = None

    def __post_init__(self):
        for repo in (self.base_model, *self.datasets):
            if not is_repository_id(repo):
                raise ValueError(f"{repo!r} is not {REPOSITORY_ID}.")

    @classmethod
    def from_folder(cls, folder: str | Path, **facts) -> "CardFacts":
        """
        The facts in a drafter's folder; `facts` that are not `None` override them.

        Raises:
            `ValueError`: a damaged file, an unknown field, or no base model.
        """
        folder = Path(folder)
        values = {name: value for name, value in _read_json(folder / FACTS_FILE).items() if value is not None}
        unknown = {*values, *facts} - {fact.name for fact in fields(cls)}
        if unknown:
            raise ValueError(f"{FACTS_FILE} has unknown fields {sorted(unknown)}; see CardFacts for the known fields.")
        for name, value in values.items():
            kind = _TYPES_OF_FACTS.get(name, str)
            if not isinstance(value, kind):
                raise ValueError(f"{folder / FACTS_FILE}: {name}={value!r} must be of type {kind.__name__}.")
        if (folder / REPORT_FILE).is_file():
            values["report"] = json.loads(EvalReport.load(folder / REPORT_FILE).to_json())
            dataset = _dataset_of(values["report"])
            if dataset is not None:
                values.setdefault("evaluated_on", dataset)
        if (folder / PLOT_FILE).is_file():
            values.setdefault("plot", PLOT_FILE)
        values |= {name: value for name, value in facts.items() if value}
        if not values.get("base_model"):
            raise ValueError(
                f"A card names the target: write base_model into {folder / FACTS_FILE}, or pass `base_model` "
                "(--base-model)."
            )
        return cls(**values)

    @classmethod
    def check(cls, facts: dict, argument: str) -> None:
        """
        Check facts that a user gives, before a drafter is there that they could be saved with.

        Args:
            facts (`dict`): Some fields of this class.
            argument (`str`): What errors call them.

        Raises:
            `ValueError`: an unknown fact, or a wrong value.
        """
        settable = [fact.name for fact in fields(cls) if fact.name not in _MEASURED_FACTS]
        for name, value in facts.items():
            if name not in settable:
                raise ValueError(f"{argument} has an unknown fact {name!r}; a card has {', '.join(settable)}.")
            kind = _TYPES_OF_FACTS.get(name, str)
            if not isinstance(value, kind):
                raise ValueError(f"{argument}: {name}={value!r} must be of type {kind.__name__}.")
        try:
            cls(**{"base_model": "any/target", **facts})
        except ValueError as error:
            raise ValueError(f"{argument}: {error}") from error

    def save(self, folder: str | Path) -> None:
        """Write the facts into `card_facts.json`, except for the report and what follows from it."""
        values = {name: value for name, value in vars(self).items() if value and name not in ("report", "plot")}
        if self.report and values.get("evaluated_on") == _dataset_of(self.report):
            values.pop("evaluated_on", None)
        write_json(Path(folder) / FACTS_FILE, values)


def _dataset_of(report: dict) -> str | None:
    """The name of a report's dataset, if it is on the Hub."""
    dataset = report.get("setting", {}).get("dataset")
    return dataset if dataset and "/" in dataset else None


def render_card(folder: str | Path, facts: CardFacts, repo: str) -> ModelCard:
    """
    Render the card of the drafter in `folder` as it will be published under `repo`.

    Raises:
        `ImportError`: jinja2 is not installed.
        `ValueError`: the folder is not a drafter's or not in a layout that is published, or the facts contradict each
            other.
    """
    with requires_extra("A model card needs jinja2", "hub"):
        import jinja2  # noqa: F401
    folder = Path(folder)
    config = DFlashDraftConfig.from_pretrained(folder)
    # Whoever reads the card has other versions than this machine, so it is about the newest known ones.
    findings = check(folder, [f"{engine}=={CHECKED_VERSIONS[engine][-1]}" for engine in ENGINES])
    shapes = read_shapes(folder)
    drafter = drafter_folder(folder, read_json(folder / "config.json"), config, shapes)
    if drafter.layout not in PUBLISHED_LAYOUTS:
        raise ValueError(f"{folder} is in a layout that is not published; write it in z-lab's with `dflash convert`.")
    trained_with = (config.dflash_config or {}).get("trained_with") or {}
    variables = {
        **vars(facts),
        "title": repo.split("/")[-1],
        "repo": repo,
        "config": config,
        "has_chat_template": trained_with.get("template") != digest_of(""),
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "loading": "native" if drafter.layout == "Muse" else _loading(folder, findings),
        "engines": _launch_lines(drafter, findings, config, facts, repo),
        "training": list(facts.training.items()),
    }
    card = ModelCard.from_template(metadata(facts, repo), template_path=str(TEMPLATE), **variables)
    card.text += _rendered_mark(str(card))
    return card


def is_rendered(card: str) -> bool:
    """Whether [`render_card`] made a card, and nobody has edited it since."""
    body = card.rpartition(_RENDERED_MARK)[0]
    return card == body + _rendered_mark(body)


def has_own_card(folder: str | Path) -> bool:
    """Whether a folder's README.md was written or edited by hand."""
    readme = Path(folder) / "README.md"
    return readme.is_file() and not is_rendered(readme.read_text(encoding="utf-8", errors="replace"))


def _rendered_mark(body: str) -> str:
    """The last line of a rendered card, by which an edited card is recognised."""
    return f"{_RENDERED_MARK}{digest_of(body)} -->\n"


def metadata(facts: CardFacts, repo: str) -> ModelCardData:
    """The card's YAML, which the Hub indexes."""
    measured = (facts.report or {}).get("summary", {}) if facts.evaluated_on else {}
    metric_names = {"tau": "tau: tokens committed per verification"}
    if "speedup_over" in measured:
        method = LABELS[measured["speedup_of"]]
        baseline = LABELS[measured["speedup_over"]]
        metric_names["speedup"] = f"speedup, {method} over {baseline}"
    task = {"task_type": "text-generation", "task_name": "Speculative decoding"}
    data = {"dataset_type": facts.evaluated_on, "dataset_name": facts.evaluated_on}
    results = [
        EvalResult(**task, **data, metric_type=key, metric_name=name, metric_value=round(measured[key], 3))
        for key, name in metric_names.items()
        if measured.get(key) is not None
    ]
    metadata_fields = ("base_model", "license", "license_name", "license_link", "datasets")
    return ModelCardData(
        eval_results=results or None,
        model_name=repo.split("/")[-1] if results else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=list(_TAGS),
        **{name: getattr(facts, name) or None for name in metadata_fields},
    )


def code_of(folder: str | Path) -> dict[str, Path]:
    """The code that is published with a drafter, by name: this package's, if the drafter's `config.json` names it."""
    return code_files() if uses_package_code(_read_json(Path(folder) / "config.json")) else {}


def _loading(folder: Path, findings: list[Finding]) -> str:
    """How transformers loads the folder: `"code"`, with the code beside the weights, or `"package"`."""
    code = code_of(folder)
    for finding in findings:
        if "transformers" not in finding.engines or finding.key in code:
            continue
        if finding.severity == "error" or finding.key == "auto_map" or finding.key.endswith(".py"):
            return "package"
    return "code"


def _launch_lines(drafter: DrafterFolder, findings: list[Finding], config, facts: CardFacts, repo: str) -> list[dict]:
    """
    `name`, oldest serving `version` and `command` of each engine without preflight errors, if a version whose source
    was read serves the drafter.
    """
    layout = drafter.layout
    if layout == "DFlash" and "sliding_attention" in config.layer_types:
        layout = "DFlash, with sliding layers"
    lines = []
    for engine, name in (("vllm", "vLLM"), ("sglang", "SGLang")):
        if not can_read_by_engine(findings, [engine])[engine]:
            continue
        environment, command = launch_command(engine, facts.base_model, repo, config)
        settings = "".join(f"{key}={value} " for key, value in environment.items())
        option = " --speculative-draft-model-path"  # on a line of its own
        line = shlex.join(command).replace(option, f" \\\n {option}")
        version = first_version(engine, drafter, since=RECOMMENDED_SINCE[layout][engine])
        if version is None:
            continue
        lines.append({"name": name, "version": version, "command": settings + line})
    if gguf_in(drafter.folder) is not None:
        _, command = launch_command(LLAMA_CPP, "target.gguf", repo, config)
        lines.append({"name": "llama.cpp", "version": "b11549", "command": shlex.join(command)})
    return lines


def _read_json(path: Path) -> dict:
    """The JSON object in a file; empty if there is no file."""
    return read_json(path) if path.is_file() else {}
