"""
What engines cannot read in a drafter's folder, or read differently from how it was trained: one table, `LIMITS`.

Engines do not report a wrong drafter: vLLM never reports a missing tensor, SGLang skips an unknown tensor, and a key
that they interpret differently only lowers acceptance.

**To add a limit, add one record to `LIMITS`.** It names the engines, each with the range of versions that have the
limit; the condition; what happens; the source files that show it; and an example: changes to the `config.json` of a
valid drafter that `dflash check` must report. The record is checked when this file is imported. Its example is checked
by `tests/hub/test_limits.py`: it is reported in the newest version of the range, and not in the versions beside it.

**A limit that a new version lifts stays**, with `<VERSION` as the end of its range: people run old servers.

**`CHECKED_VERSIONS`** lists the versions whose source was read. Newer engines are checked as the newest of them, with
a warning. A limit of a newer version needs this version in the list. Add a version only after reading its source for
all records: each still holds in the version, or gets an end of its range.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from dflash_hf._io.errors import one_line
from dflash_hf.hub import conditions
from dflash_hf.hub.conditions import (
    Comparison,
    Condition,
    DiffersInTwoPlaces,
    HeadIsNotOneOf,
    IsNestedOnly,
    IsNotDefault,
)
from dflash_hf.hub.drafter_folder import UNKNOWN_LAYOUT, DrafterFolder
from dflash_hf.hub.findings import Finding
from dflash_hf.modeling.configuration_dflash import CONVOLUTION_KEYS
from dflash_hf.modeling.heads_dflash import PathSelector
from dflash_hf.modeling.modeling_dflash import MASK_EMBEDDING


# The versions of each engine whose source was read, oldest first.
CHECKED_VERSIONS = {
    "vllm": (
        "0.20.2",
        "0.22.0",
        "0.23.0",
        "0.24.0",
        "0.25.1",
        "0.26.0",
        "0.27.1",
        "0.28.0",
        "0.30.0",
        "0.31.0",
        "0.32.0",
        "0.33.0",
    ),
    "sglang": (
        "0.5.11",
        "0.5.12",
        "0.5.14",
        "0.5.15",
        "0.5.16",
        "0.5.17",
        "0.5.18",
        "0.5.19",
        "0.5.20",
        "0.5.23",
    ),
    "transformers": ("5.20.0", "5.24.0"),
}

# The layouts of drafters that a limit may apply to.
PUBLISHED_LAYOUTS = ("DFlash", "DFlash 2", "Muse", "DSpark", "Domino")
READABLE_LAYOUTS = (*PUBLISHED_LAYOUTS, "speculators")
ALL_LAYOUTS = (*READABLE_LAYOUTS, UNKNOWN_LAYOUT)


def layouts_except(excluded: str) -> tuple[str, ...]:
    """The published layouts but one."""
    return tuple(layout for layout in PUBLISHED_LAYOUTS if layout != excluded)


# Heads that vLLM or SGLang has.
SERVED_HEADS = ("path selector", "Markov head", "Domino head")

# All versions of an engine that have DFlash drafters.
ANY_VLLM = {"vllm": ">=0.20"}
ANY_SGLANG = {"sglang": ">=0.5.11"}
ANY_SERVER = {**ANY_VLLM, **ANY_SGLANG}
ANY_TRANSFORMERS = {"transformers": ">=5.20"}
ANY_ENGINE = {**ANY_SERVER, **ANY_TRANSFORMERS}
# All versions of an engine, also those before it had DFlash drafters.
EVERY_SERVER = {"vllm": ">=0", "sglang": ">=0"}
EVERY_ENGINE = {**EVERY_SERVER, "transformers": ">=0"}
# The oldest versions of vLLM and SGLang that the model card names for a layout.
RECOMMENDED_SINCE = {
    "DFlash": {"vllm": "0.21", "sglang": "0.5.12"},
    "DFlash, with sliding layers": {"vllm": "0.26", "sglang": "0.5.14"},
    "Muse": {"vllm": "0.28", "sglang": "0.5.18"},
    "DFlash 2": {"vllm": "0.30", "sglang": "0.5.20"},
    "DSpark": {"vllm": "0.33", "sglang": "0.5.23"},
    "Domino": {"vllm": "0.33", "sglang": "0.5.23"},
}


@dataclass(frozen=True)
class Limit:
    """
    One limit of one or more engines.

    Args:
        engines (`Mapping[str, str]`): The engines that have it, each with its range of versions, as pip writes it:
            `{"vllm": ">=0.25,<0.28"}`.
        field (`str`): The field of `config.json`, or the file; may name a detail of the condition in braces.
        condition (`Condition`): To which drafters it applies: a [`~dflash_hf.hub.conditions.Comparison`] of a field,
            or a function of the [`~dflash_hf.hub.drafter_folder.DrafterFolder`].
        reason (`str`): What happens, as a sentence about the field. Names in braces are the condition's details, and
            `value` (the field's value), `architecture`.
        remedy (`str`): What the user can do; empty if there is nothing.
        sources (`tuple[str, ...]`): The files of the engines' source that show it, at least one for each engine, with
            the package's name first: `"vllm/config/speculative.py"`.
        severity (`str`): `"error"`: the drafter will not load, or not draft as trained. `"warning"`: check before
            serving.
        layouts (`tuple[str, ...]`): The layouts that it applies to, of `ALL_LAYOUTS`.
        example (`Mapping`, *optional*): Changes to the `config.json` of a valid drafter of the first layout, after
            which the limit applies to this drafter. `None` removes a key; changes to `dflash_config` are a mapping of
            their own. Default: the condition needs more than `config.json`, such as weights or the target, and has a
            test of its own.

    Raises:
        `ValueError`: a part of the record is wrong; names it, and what to write.
    """

    engines: Mapping[str, str]
    field: str
    condition: Condition
    reason: str
    remedy: str = ""
    sources: tuple[str, ...] = ()
    severity: str = "error"
    layouts: tuple[str, ...] = PUBLISHED_LAYOUTS
    example: Mapping | None = None

    def __post_init__(self):
        record = f"The limit of {self.field!r} ({self.reason!r})"
        for engine, specifier in self.engines.items():
            if engine not in CHECKED_VERSIONS:
                raise ValueError(f"{record} is of {engine!r}; choose from {', '.join(CHECKED_VERSIONS)}.")
            self._check_range(record, engine, specifier)
            if not any(source.startswith(f"{engine}/") for source in self.sources):
                raise ValueError(
                    f"{record} has no source in {engine}: write the file of its source that shows the limit into "
                    f"`sources`, as '{engine}/folder/file.py'."
                )
        if self.severity not in ("error", "warning"):
            raise ValueError(f"{record} has severity={self.severity!r}; choose 'error' or 'warning'.")
        unknown_layouts = {*self.layouts} - {*ALL_LAYOUTS}
        if unknown_layouts:
            raise ValueError(f"{record} has layouts={self.layouts!r}; choose from {', '.join(ALL_LAYOUTS)}.")
        for sentence in (self.reason, self.remedy):
            if sentence and not sentence.endswith("."):
                raise ValueError(f"{record} has the sentence {sentence!r}; end it with a full stop.")

    def _check_range(self, record: str, engine: str, specifier: str) -> None:
        """A range that holds for no checked version would never be reported."""
        versions = CHECKED_VERSIONS[engine]
        try:
            holds = any(holds_for(version, specifier) for version in versions)
        except InvalidSpecifier as error:
            raise ValueError(f"{record} has the range {specifier!r}; write it as pip does: '>=0.25,<0.28'.") from error
        if not holds:
            raise ValueError(
                f"{record} is of {engine} {specifier}, but no version of {engine} in CHECKED_VERSIONS is in this "
                f"range, so it would never be reported. Add the version whose source you read; there are "
                f"{', '.join(versions)}."
            )

    def affected_engines(self, versions: Mapping[str, str]) -> tuple[str, ...]:
        """The engines that have the limit, in their `versions` by engine."""
        affected = []
        for engine, specifier in self.engines.items():
            if engine in versions and holds_for(versions[engine], specifier):
                affected.append(engine)
        return tuple(affected)

    def details_for(self, drafter: DrafterFolder) -> dict | None:
        """The details of the message about a drafter, by name; `None` if the limit does not apply to it."""
        if drafter.layout not in self.layouts:
            return None
        result = self.condition(drafter)
        if not result:
            return None
        details = {"value": drafter.get(self.field), "architecture": drafter.architecture}
        return details | result if isinstance(result, dict) else details

    def finding(self, drafter: DrafterFolder, versions: Mapping[str, str]) -> Finding | None:
        """
        The finding to report; `None` if the limit does not apply to the drafter, or no engine has it in its version.

        Args:
            drafter (`DrafterFolder`): The folder.
            versions (`Mapping[str, str]`): Versions, by engine.
        """
        engines = self.affected_engines(versions)
        if not engines:
            return None
        details = self.details_for(drafter)
        if details is None:
            return None
        message = f"{self.reason} {self.remedy}".strip().format(**details)
        return Finding(self.severity, engines, self.field.format(**details), one_line(message))


def holds_for(version: str, specifier: str) -> bool:
    """Whether a version is in a range such as `">=0.25,<0.28"`; release candidates and nightly builds count."""
    return SpecifierSet(specifier).contains(version, prereleases=True)


def first_version(engine: str, drafter: DrafterFolder, since: str) -> str | None:
    """
    The oldest version of an engine that serves a drafter without an error; `None` if none of `CHECKED_VERSIONS` does.

    Args:
        engine (`str`): `"vllm"` or `"sglang"`.
        drafter (`DrafterFolder`): The folder.
        since (`str`): The oldest version to consider.
    """
    newer = [version for version in CHECKED_VERSIONS[engine] if holds_for(version, f">{since}")]
    for version in (since, *newer):
        findings = [limit.finding(drafter, {engine: version}) for limit in LIMITS if limit.severity == "error"]
        if not any(findings):
            return version
    return None


# ----------------------------------------------------------------------------------------------------------- the table

# Files of the engines.
VLLM_MODEL = "vllm/model_executor/models/qwen3_dflash.py"
VLLM_DFLASH2 = "vllm/model_executor/models/qwen3_dflash2.py"
VLLM_DSPARK = "vllm/model_executor/models/qwen3_dspark.py"
VLLM_REGISTRY = "vllm/model_executor/models/registry.py"
VLLM_CONFIG = "vllm/config/vllm.py"
VLLM_SPECULATIVE = "vllm/config/speculative.py"
VLLM_LAYER_IDS = "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"
VLLM_SPECULATORS = "vllm/transformers_utils/configs/speculators/algos.py"
VLLM_READER = "vllm/transformers_utils/config.py"
SGLANG_MODEL = "sglang/srt/models/dflash.py"
SGLANG_DSPARK = "sglang/srt/models/dspark.py"
SGLANG_FIELDS = "sglang/srt/speculative/dflash_utils.py"
SGLANG_WORKER = "sglang/srt/speculative/dflash_worker_v2.py"
SGLANG_DOMINO = "sglang/srt/speculative/domino_utils.py"
SGLANG_READER = "sglang/srt/utils/hf_transformers_utils.py"
TRANSFORMERS_DFLASH = "transformers/generation/candidate_generator.py"
TRANSFORMERS_CODE = "transformers/dynamic_module_utils.py"
TRANSFORMERS_QUANTIZERS = "transformers/quantizers/auto.py"

# Fields that are read in dflash_config and at the top level, with a value for examples.
_FIELDS_IN_BOTH = {"block_size": 16, "mask_token_id": 94, "target_layer_ids": [0, 1, 3]}
# Fields of a drafter that engines know only with a plain drafter's value.
_PLAIN_FIELDS = ("target_hidden_size", "v_head_dim", "backbone_rotary_base")
# Parts of examples.
_SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "use_sliding_window": True}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 50_000.0}
_V2_RUNNER = "for which vLLM needs its V2 model runner."
_KEEP_V2_RUNNER = "Do not set VLLM_USE_V2_MODEL_RUNNER=0."
# Findings with the same message are merged into one for several engines.
_REDUCED_VOCABULARY = "{value} is a reduced vocabulary, which is not supported."
_WITHOUT_OWN_HEAD = "`dflash convert DRAFT OUTPUT --share-head` writes a drafter without it."
_NOT_READ = "{value!r} is not read; it drafts as with {default!r}, or not at all."


def _at_top_level(field: str, value) -> dict:
    """An example: a field at the top level and not in dflash_config."""
    return {field: value, "dflash_config": {field: None}}


LIMITS: tuple[Limit, ...] = (
    # ---- Which drafters an engine knows at all.
    Limit(
        EVERY_ENGINE,
        "architectures",
        conditions.architecture_is_unknown,
        "{architectures} is not one of {known}; {remedy}.",
        sources=(VLLM_REGISTRY, SGLANG_MODEL, TRANSFORMERS_DFLASH),
        layouts=(*PUBLISHED_LAYOUTS, UNKNOWN_LAYOUT),
        example={"architectures": ["DFlashForCausalLM"]},
    ),
    Limit(
        {engine: EVERY_ENGINE[engine] for engine in ("sglang", "transformers")},
        "transformer_layer_config",
        conditions.is_in_other_layout,
        "is speculators' layout, which only vLLM reads; {remedy}.",
        sources=(SGLANG_MODEL, TRANSFORMERS_DFLASH),
        layouts=("speculators",),
        example={},
    ),
    Limit(
        EVERY_SERVER,
        "{head_field}",
        HeadIsNotOneOf(SERVED_HEADS),
        "{value}: no engine has a {head}; decode with transformers' generate().",
        sources=(VLLM_REGISTRY, SGLANG_MODEL),
    ),
    # Engines do not notice weights that this package's reader rejects; but vLLM loads an own embedding or head.
    Limit(
        EVERY_SERVER,
        "weights",
        conditions.weights_without_own_embeddings_do_not_load,
        "{load_error}.",
        sources=(VLLM_MODEL, SGLANG_MODEL),
        layouts=READABLE_LAYOUTS,
    ),
    Limit(
        {"transformers": EVERY_ENGINE["transformers"]},
        "weights",
        conditions.weights_do_not_load,
        "{load_error}.",
        sources=(TRANSFORMERS_DFLASH,),
        layouts=READABLE_LAYOUTS,
    ),
    Limit(
        {"vllm": "<0.28", "sglang": "<0.5.18"},
        "architectures",
        conditions.always,
        "{architecture} is unknown before vLLM 0.28 and SGLang 0.5.18.",
        "Install a newer version.",
        sources=(VLLM_REGISTRY, SGLANG_MODEL),
        layouts=("Muse",),
        example={},
    ),
    Limit(
        {"vllm": "<0.28", "sglang": "<0.5.19"},
        "architectures",
        conditions.always,
        "{architecture} is unknown before vLLM 0.28 and SGLang 0.5.19.",
        "Install a newer version.",
        sources=(VLLM_REGISTRY, SGLANG_MODEL),
        layouts=("DFlash 2",),
        example={},
    ),
    Limit(
        {"vllm": "<0.25", "sglang": "<0.5.16"},
        "architectures",
        conditions.always,
        "{architecture} is unknown before vLLM 0.25 and SGLang 0.5.16.",
        "Install a newer version.",
        sources=(VLLM_REGISTRY, SGLANG_DSPARK),
        layouts=("DSpark",),
        example={},
    ),
    Limit(
        {"sglang": "<0.5.20"},
        "gru_hidden_dim",
        conditions.always,
        "SGLang has no Domino head before 0.5.20.",
        "Install a newer version.",
        sources=(SGLANG_DOMINO,),
        layouts=("Domino",),
        example={},
    ),
    # ---- What it is.
    Limit(
        ANY_SERVER,
        "model_type",
        conditions.model_type_is_unknown,
        "{value!r} is unknown to the engines' AutoConfig.",
        "Write 'qwen3'.",
        sources=(VLLM_READER, SGLANG_READER),
        example={"model_type": "dflash"},
    ),
    Limit(
        ANY_ENGINE,
        "model_type",
        conditions.model_type_is_of_another_layout,
        "{value!r} does not match {architecture}.",
        "Save or convert the drafter again.",
        sources=(VLLM_REGISTRY, SGLANG_MODEL, TRANSFORMERS_DFLASH),
        example={"model_type": "muse_glimmer_assistant"},
    ),
    Limit(
        ANY_SERVER,
        "vocab_size",
        Comparison("vocab_size", "absent", location="top level"),
        "is missing: engines use their default instead of the target's.",
        "Write the target's vocab_size.",
        sources=(VLLM_MODEL, SGLANG_MODEL),
        layouts=layouts_except("Muse"),
        example={"vocab_size": None},
    ),
    Limit(
        ANY_SERVER,
        "max_position_embeddings",
        Comparison("max_position_embeddings", "absent", location="top level"),
        "is missing: engines use their default.",
        "Write at least the length that will be served.",
        sources=(VLLM_MODEL, SGLANG_MODEL),
        example={"max_position_embeddings": None},
    ),
    # ---- What it reads of the target, and its blocks.
    Limit(
        ANY_SERVER,
        "target_layer_ids",
        conditions.layer_ids_are_unsorted,
        "{value} must increase: engines concatenate features in the order of the target's layers.",
        sources=(VLLM_LAYER_IDS, SGLANG_FIELDS),
        example={"target_layer_ids": [2, 1, 0], "dflash_config": {"target_layer_ids": [2, 1, 0]}},
    ),
    Limit(
        ANY_VLLM,
        "eagle_aux_hidden_state_layer_ids",
        conditions.eagle_layer_ids_differ,
        "{value} is what vLLM reads first, and is not target_layer_ids + 1.",
        "Remove it.",
        sources=(VLLM_LAYER_IDS,),
        example={"eagle_aux_hidden_state_layer_ids": [0, 1]},
    ),
    Limit(
        ANY_SERVER,
        "target_layer_ids",
        conditions.reads_last_layer,
        "{value} has the target's last layer: engines read it before the final norm.",
        "Compare the acceptance length.",
        sources=(VLLM_LAYER_IDS, SGLANG_FIELDS),
        severity="warning",
        example={"target_layer_ids": [0, 1, 3], "dflash_config": {"target_layer_ids": [0, 1, 3]}},
    ),
    *(
        Limit(
            ANY_ENGINE,
            field,
            DiffersInTwoPlaces(field),
            "is {nested} in dflash_config and {top} at the top level; readers differ in which they use.",
            "Write one value in both.",
            sources=(VLLM_SPECULATIVE, SGLANG_FIELDS, TRANSFORMERS_DFLASH),
            example={field: other_value},
        )
        for field, other_value in _FIELDS_IN_BOTH.items()
    ),
    *(
        Limit(
            ANY_ENGINE,
            field,
            Comparison(field, "absent"),
            "is missing, so every reader uses its own default.",
            "Write it in dflash_config.",
            sources=(VLLM_SPECULATIVE, SGLANG_FIELDS, TRANSFORMERS_DFLASH),
            example={field: None, "dflash_config": {field: None}, "num_target_layers": 36},
        )
        for field in ("block_size", "target_layer_ids")  # without a mask token, the file is rejected before
    ),
    *(
        Limit(
            ANY_TRANSFORMERS,
            field,
            IsNestedOnly(field),
            "is in dflash_config only; transformers' own DFlash decoding reads the top level.",
            sources=(TRANSFORMERS_DFLASH,),
            severity="warning",
            example={field: None},
        )
        for field in _FIELDS_IN_BOTH
    ),
    # ---- Attention: windows, and causality inside the block.
    Limit(
        {"vllm": "<0.25", "sglang": "<0.5.14"},
        "layer_types",
        conditions.has_sliding_layers,
        "has sliding windows, which are not read before vLLM 0.25 and SGLang 0.5.14.",
        "Install a newer version.",
        sources=(VLLM_MODEL, SGLANG_MODEL),
        example=_SLIDING,
    ),
    Limit(
        {"vllm": ">=0.25,<0.28"},
        "is_causal",
        conditions.causality_is_not_nested,
        "{value} is not read before vLLM 0.28: sliding layers are causal in the block, full layers are not.",
        "Write causal into dflash_config, or install a newer version.",
        sources=(VLLM_MODEL,),
        example={**_SLIDING, "is_causal": False},
    ),
    Limit(
        {"sglang": ">=0.5.14,<0.5.18"},
        "is_causal",
        conditions.causality_is_not_the_default,
        "{value} is read for all layers only since SGLang 0.5.18.",
        "Install a newer version.",
        sources=(SGLANG_MODEL,),
        example={**_SLIDING, "is_causal": False},
    ),
    Limit(
        ANY_SERVER,
        "use_sliding_window",
        conditions.windows_are_switched_off,
        "is not true, so Qwen3Config drops the windows.",
        "Write true.",
        sources=(VLLM_READER, SGLANG_READER),
        layouts=layouts_except("Muse"),
        example={**_SLIDING, "use_sliding_window": False},
    ),
    Limit(
        {"vllm": ">=0.25"},
        "layer_types",
        conditions.layers_are_of_two_kinds,
        f"mixes full and sliding layers, {_V2_RUNNER}",
        _KEEP_V2_RUNNER,
        sources=(VLLM_CONFIG,),
        severity="warning",
        example={**_SLIDING, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    Limit(
        {"vllm": ">=0.28", "sglang": ">=0.5.18", **ANY_TRANSFORMERS},
        "causal",
        conditions.causal_contradicts_is_causal,
        "{value} in dflash_config contradicts is_causal={is_causal}, which engines use.",
        "Compare the acceptance length.",
        sources=(VLLM_MODEL, SGLANG_MODEL, TRANSFORMERS_DFLASH),
        severity="warning",
        example={"is_causal": False, "dflash_config": {"causal": True}},
    ),
    Limit(
        ANY_SERVER,
        "causal_head",
        conditions.causal_head_is_read_as_bidirectional,
        "is JetSpec's key, which engines do not read: they draft bidirectionally.",
        "Save the drafter again.",
        sources=(VLLM_MODEL, SGLANG_MODEL),
        example={"dflash_config": {"causal_head": True}},
    ),
    Limit(
        ANY_SERVER,
        "is_causal",
        conditions.layer_is_read_differently,
        "layer {layer}: vLLM reads (window, causal) = {vllm}, and SGLang reads {sglang}.",
        "Write layer_types, sliding_window and is_causal at the top level.",
        sources=(VLLM_MODEL, SGLANG_MODEL),
        example={"dflash_config": {"causal": True}},
    ),
    Limit(
        ANY_ENGINE,
        "sliding_window",
        conditions.speculators_layers_slide,
        "was counted from the anchor in training, for every slot, and not in the block; engines and this package "
        "count it from each slot.",
        "Compare the acceptance length.",
        sources=(VLLM_SPECULATORS, SGLANG_MODEL, TRANSFORMERS_DFLASH),
        severity="warning",
        layouts=("speculators",),
        example={},
    ),
    Limit(
        ANY_VLLM,
        "sliding_window_non_causal",
        conditions.speculators_full_layers_become_causal,
        "is false, which vLLM applies to full layers too: they were trained bidirectionally in the block.",
        "`dflash convert` keeps them so.",
        sources=(VLLM_SPECULATORS,),
        severity="warning",
        layouts=("speculators",),
        example={"sliding_window_non_causal": False},
    ),
    # ---- Rotary embedding.
    Limit(
        ANY_SERVER,
        "rope_parameters",
        conditions.rope_differs_by_layer_type,
        "differs by layer type; vLLM rotates the context of all layers with one table.",
        "Write one.",
        sources=(VLLM_MODEL, SGLANG_MODEL),
        example={"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    ),
    Limit(
        ANY_SERVER,
        "rope_theta",
        conditions.theta_is_missing,
        "is missing: vLLM uses 1000000, others 10000.",
        "Write it.",
        sources=(VLLM_MODEL, SGLANG_MODEL),
        example={"rope_theta": None, "rope_parameters": None},
    ),
    Limit(
        ANY_ENGINE,
        "rope_theta",
        conditions.thetas_differ,
        "is {thetas} in rope_parameters, top level and rope_scaling.",
        "Write one value.",
        sources=(VLLM_MODEL, SGLANG_MODEL, TRANSFORMERS_DFLASH),
        example={"rope_theta": 5000.0},
    ),
    Limit(
        ANY_SERVER,
        "rope_theta",
        conditions.theta_is_in_rope_parameters_only,
        "is in rope_parameters only; readers before transformers 5 fall back to 10000.",
        "Write both.",
        sources=(VLLM_READER, SGLANG_READER),
        severity="warning",
        example={"rope_theta": None},
    ),
    Limit(
        ANY_ENGINE,
        "rope_scaling",
        conditions.rope_types_differ,
        "{value} and rope_parameters={rope_parameters} are of two types.",
        "Write one in both.",
        sources=(VLLM_READER, SGLANG_READER, TRANSFORMERS_DFLASH),
        example={"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    Limit(
        ANY_SERVER,
        "rope_scaling",
        conditions.yarn_is_in_rope_parameters_only,
        "is missing next to rope_parameters; readers before transformers 5 lose YaRN.",
        "Write both.",
        sources=(VLLM_READER, SGLANG_READER),
        severity="warning",
        example={"rope_parameters": _YARN, "rope_theta": 50_000.0},
    ),
    Limit(
        ANY_SERVER,
        "rope_parameters",
        conditions.has_mscale,
        "has mscale, which engines turn into an attention factor in different ways.",
        "Compare the acceptance length.",
        sources=(VLLM_MODEL, SGLANG_MODEL),
        severity="warning",
        example={"rope_parameters": {**_YARN, "mscale": 1.0}, "rope_theta": 50_000.0, "rope_scaling": _YARN},
    ),
    Limit(
        ANY_SERVER,
        "rope_is_neox_style",
        conditions.rotary_pairs_are_interleaved,
        "is false, which few readers support.",
        "`dflash convert` writes the same drafter in the usual order.",
        sources=(VLLM_MODEL, SGLANG_MODEL),
        severity="warning",
        example={"rope_is_neox_style": False},
    ),
    # ---- Activation, vocabulary and embedding.
    Limit(
        ANY_SERVER,
        "hidden_act",
        Comparison("hidden_act", "not in", (None, "silu")),
        "{value!r} is not supported; engines only have silu.",
        sources=(VLLM_MODEL, SGLANG_MODEL),
        example={"hidden_act": "gelu"},
    ),
    Limit(
        {"vllm": ">=0.28"},
        "draft_vocab_size",
        conditions.vocabulary_is_reduced,
        _REDUCED_VOCABULARY,  # whose ids this model takes for the target's
        _WITHOUT_OWN_HEAD,
        sources=(VLLM_DFLASH2,),
        layouts=("DFlash 2",),
    ),
    Limit(
        ANY_SGLANG,
        "draft_vocab_size",
        conditions.vocabulary_is_reduced,
        _REDUCED_VOCABULARY,
        _WITHOUT_OWN_HEAD,
        sources=(SGLANG_WORKER,),
    ),
    Limit(
        ANY_VLLM,
        "vocab_size",
        conditions.target_looks_like_gemma,
        "looks like Gemma, whose embeddings are scaled: vLLM feeds raw values.",
        "Compare the acceptance length before serving.",
        sources=(VLLM_MODEL,),
        severity="warning",
    ),
    # ---- Heads: DFlash 2's path selector with its convolution, DSpark's Markov head, Domino's.
    Limit(
        {"vllm": ">=0.28"},
        "architectures",
        conditions.always,
        f"DFlash2DraftModel drafts through a path selector, {_V2_RUNNER}",
        _KEEP_V2_RUNNER,
        sources=(VLLM_CONFIG,),
        severity="warning",
        layouts=("DFlash 2",),
        example={},
    ),
    Limit(
        ANY_SERVER,
        "architectures",
        conditions.has_dflash2_field,
        "{architecture} has no {dflash2_field}; engines need DFlash2DraftModel to build it.",
        sources=(VLLM_REGISTRY, SGLANG_MODEL),
        layouts=layouts_except("DFlash 2"),
        example={"dflash_config": {"conv_kernel_size": 2, "conv_group_size": 4}},
    ),
    *(
        Limit(
            {"vllm": ">=0.28"},
            field,
            Comparison(field, "not set", location="dflash_config"),
            "must be a positive integer in dflash_config, the only place where it is read; it is {value} there.",
            sources=(VLLM_DFLASH2,),
            layouts=("DFlash 2",),
            example=_at_top_level(field, 2),
        )
        for field in CONVOLUTION_KEYS
    ),
    *(
        Limit(
            {"vllm": ">=0.28", "sglang": ">=0.5.19"},
            field,
            Comparison(field, "not set", location="dflash_config"),
            "must be a positive integer in dflash_config, the only place where it is read; it is {value} there.",
            sources=(VLLM_DFLASH2, SGLANG_MODEL),
            layouts=("DFlash 2",),
            example=_at_top_level(field, 5),
        )
        for field in PathSelector.sizes
    ),
    Limit(
        ANY_VLLM,
        "architectures",
        Comparison("markov_rank", "set"),
        "{architecture} has no Markov head in vLLM; it needs Qwen3DSparkModel.",
        sources=(VLLM_REGISTRY,),
        layouts=layouts_except("DSpark"),
        example={"dflash_config": {"markov_rank": 6, "sample_from_anchor": False}},
    ),
    Limit(
        {"vllm": ">=0.25"},
        "markov_rank",
        Comparison("markov_rank", "not set"),
        "0: vLLM needs a Markov head for anchor-first drafters, SGLang none.",
        sources=(VLLM_DSPARK,),
        layouts=("DSpark",),
        example={"markov_rank": 0},
    ),
    Limit(
        {"vllm": ">=0.25"},
        "markov_head_type",
        conditions.markov_head_is_not_vanilla,
        "{value!r}: vLLM has only the vanilla Markov head, SGLang all.",
        sources=(VLLM_DSPARK,),
        layouts=("DSpark",),
        example={"markov_head_type": "gated"},
    ),
    Limit(
        ANY_VLLM,
        "gru_hidden_dim",
        conditions.always,
        "vLLM has no Domino head; SGLang serves it.",
        sources=(VLLM_REGISTRY,),
        layouts=("Domino",),
        example={},
    ),
    Limit(
        {"sglang": ">=0.5.20"},
        "pure_draft_prefix_len",
        Comparison("pure_draft_prefix_len", "not in", (1,)),
        "{value} is not 1, the only value that SGLang supports.",
        sources=(SGLANG_DOMINO,),
        layouts=("Domino",),
        example={"dflash_config": {"pure_draft_prefix_len": 0}},
    ),
    Limit(
        {"sglang": ">=0.5.20"},
        "projector_type",
        Comparison("projector_type", "not in", ("domino",)),
        "{value!r}: SGLang needs 'domino'.",
        "Save the drafter again.",
        sources=(SGLANG_DOMINO,),
        layouts=("Domino",),
        example={"dflash_config": {"projector_type": None}},
    ),
    Limit(
        {"sglang": ">=0.5.20"},
        "projector_type",
        conditions.always,
        "is drafted greedily by SGLang, on one GPU, in bfloat16.",
        sources=(SGLANG_WORKER,),
        severity="warning",
        layouts=("Domino",),
        example={},
    ),
    # ---- Files beside the weights.
    Limit(
        {"vllm": "<0.25", "sglang": "<0.5.20"},
        MASK_EMBEDDING,
        conditions.has_own_mask_embedding,
        "is not read before vLLM 0.25 and SGLang 0.5.20: they feed the target's embedding of the mask token.",
        "Install a newer version.",
        sources=(VLLM_MODEL, SGLANG_WORKER),
        example={"dflash_config": {"own_mask_embedding": True}},
    ),
    Limit(
        {"vllm": ">=0.25", "sglang": ">=0.5.20"},
        MASK_EMBEDDING,
        conditions.mask_file_is_missing,
        "is missing: engines skip the tensor mask_embedding and feed the target's.",
        "Save the drafter again.",
        sources=(VLLM_MODEL, SGLANG_WORKER),
        example={"dflash_config": {"own_mask_embedding": True}},
    ),
    Limit(
        {"sglang": ">=0.5.20"},
        MASK_EMBEDDING,
        conditions.has_mask_file,
        "is read from a local folder only: SGLang ignores it if the drafter is named by repository.",
        sources=(SGLANG_WORKER,),
        severity="warning",
    ),
    Limit(
        ANY_TRANSFORMERS,
        "auto_map",
        conditions.auto_map_names_no_model,
        "names no AutoModel: without this package the folder loads as a Qwen3 model with random weights.",
        sources=(TRANSFORMERS_CODE,),
        severity="warning",
        layouts=layouts_except("Muse"),
        example={"auto_map": None},
    ),
    Limit(
        ANY_TRANSFORMERS,
        "{file}",
        conditions.code_file_is_missing,
        "is not in the folder, which does not load without this package.",
        "Publish it, or save it again.",
        sources=(TRANSFORMERS_CODE,),
        severity="warning",
        layouts=layouts_except("Muse"),
        example={"auto_map": {"AutoModel": "elsewhere.Model"}},
    ),
    Limit(
        ANY_TRANSFORMERS,
        "dflash_hf_version",
        conditions.code_has_known_defects,
        "the code beside the weights is older than this package's: {defects}.",
        "`dflash publish --code-only REPO` replaces it; a folder is saved again.",
        sources=(TRANSFORMERS_CODE,),
        severity="warning",
        layouts=layouts_except("Muse"),
    ),
    Limit(
        ANY_TRANSFORMERS,
        "auto_map",
        conditions.code_is_foreign,
        "{code} is not a file beside the weights and its class: others may change their code.",
        "Save it again.",
        sources=(TRANSFORMERS_CODE,),
        example={"auto_map": {"AutoModel": "someone/code--modeling.Model"}},
    ),
    Limit(
        ANY_ENGINE,
        "quantization_config",
        conditions.quantization_is_unknown,
        "quant_method {method} is unknown.",
        sources=(VLLM_READER, SGLANG_READER, TRANSFORMERS_QUANTIZERS),
        example={"quantization_config": {"quant_method": "magic"}},
    ),
    Limit(
        ANY_VLLM,
        "quantization_config",
        conditions.is_quantized,
        "{method}: vLLM multiplies the context by slices of the codes themselves (vllm-project/vllm#51581).",
        "Compare the acceptance length, or serve the drafter as it was before it was quantised.",
        sources=(VLLM_MODEL,),
        severity="warning",
        example={"quantization_config": {"quant_method": "magic"}},
    ),
    # ---- The target, with which `incompatibilities` compares the rest.
    Limit(
        {"vllm": ">=0.20,<0.33"},
        "max_position_embeddings",
        conditions.is_shorter_than_target,
        "{value} is below the target's {target_length}; vLLM before 0.33 reads past its rotary table.",
        "Raise it.",
        sources=(VLLM_SPECULATIVE,),
        severity="warning",
    ),
    # ---- Fields beyond a plain drafter's, which engines do not read.
    *(
        Limit(
            ANY_SERVER,
            field,
            IsNotDefault(field),
            _NOT_READ,
            sources=(VLLM_MODEL, SGLANG_MODEL),
            example={field: 64},
        )
        for field in _PLAIN_FIELDS
    ),
    Limit(
        ANY_VLLM,
        "input_embedding_scale",
        IsNotDefault("input_embedding_scale"),
        _NOT_READ,
        sources=(VLLM_MODEL,),
        layouts=layouts_except("DFlash 2"),
        example={"dflash_config": {"input_embedding_scale": 2.0}},
    ),
    Limit(
        ANY_SGLANG,
        "input_embedding_scale",
        IsNotDefault("input_embedding_scale"),
        _NOT_READ,
        sources=(SGLANG_MODEL,),
        example={"dflash_config": {"input_embedding_scale": 2.0}},
    ),
)
