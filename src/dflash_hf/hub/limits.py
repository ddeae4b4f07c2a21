"""
What engines cannot read of a drafter's folder, or read otherwise than it was trained: one table, `LIMITS`.

Engines do not report a wrong drafter: vLLM never reports a missing tensor, SGLang skips an unknown tensor, and a key
that they read differently only costs acceptance. Each limit holds for a range of versions and was read in the source
that it names: in the newest version of `READ` in `engines`, and, where it begins or ends, in those on both sides.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dflash_hf._io.terminal import one_line
from dflash_hf.hub import conditions
from dflash_hf.hub.conditions import Comparison, Condition, DiffersInTwoPlaces, IsNestedOnly, IsNotDefault
from dflash_hf.hub.drafter import CONVOLUTION, MASK_EMBEDDING, SELECTOR, Drafter, Finding
from dflash_hf.hub.engines import READ, holds_for


# The layouts of drafters that a limit may concern; speculators' own is not among the published ones.
PUBLISHED = ("DFlash", "DFlash 2", "Muse", "DSpark", "Domino")
ALL_BUT_MUSE = ("DFlash", "DFlash 2", "DSpark", "Domino")
ALL_BUT_DFLASH2 = ("DFlash", "Muse", "DSpark", "Domino")
ALL_BUT_DSPARK = ("DFlash", "DFlash 2", "Muse", "Domino")
SERVED_HEADS = ("path selector", "Markov head", "Domino head")  # that engines have

# The versions of each engine with DFlash drafters that the limits were read in, unless a limit says otherwise.
VLLM = {"vllm": ">=0.20"}
SGLANG = {"sglang": ">=0.5.11"}
SERVERS = {**VLLM, **SGLANG}
TRANSFORMERS = {"transformers": ">=5.20"}
ENGINES = {**SERVERS, **TRANSFORMERS}
# The oldest versions that the card names for a layout, of vLLM and of SGLang.
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
        engines (`Mapping[str, str]`): The engines that have it, each with the range of versions, as pip writes it:
            `{"vllm": ">=0.25,<0.28"}`.
        field (`str`): The field of `config.json` or the file concerned; may name a detail of the condition in braces.
        condition (`Condition`): When a drafter meets it: a [`~dflash_hf.hub.conditions.Comparison`] of a field, or a
            function of the [`~dflash_hf.hub.drafter.Drafter`].
        reason (`str`): What happens, as a sentence about the field. Names in braces are the condition's details, and
            `value` (the field's value), `architecture`.
        remedy (`str`): What the user can do; empty if there is nothing.
        sources (`tuple[str, ...]`): The files of the engines that it was read in.
        severity (`str`): `"error"`: the drafter will not load, or not draft as trained. `"warning"`: check before
            serving.
        layouts (`tuple[str, ...]`): The layouts that it concerns, of `PUBLISHED` or `"speculators"`.
    """

    engines: Mapping[str, str]
    field: str
    condition: Condition
    reason: str
    remedy: str = ""
    sources: tuple[str, ...] = ()
    severity: str = "error"
    layouts: tuple[str, ...] = PUBLISHED

    def concerned_engines(self, versions: Mapping[str, str]) -> tuple[str, ...]:
        """The engines that have it in the given `versions`, by engine."""
        concerned = []
        for engine, specifier in self.engines.items():
            if engine in versions and holds_for(versions[engine], specifier):
                concerned.append(engine)
        return tuple(concerned)

    def finding(self, drafter: Drafter, versions: Mapping[str, str]) -> Finding | None:
        """
        What it says of a drafter; `None` if the drafter does not meet it, or no engine has it in these versions.

        Args:
            drafter (`Drafter`): The folder.
            versions (`Mapping[str, str]`): Versions, by engine.
        """
        concerned = self.concerned_engines(versions)
        if not concerned or drafter.layout not in self.layouts:
            return None
        result = self.condition(drafter)
        if not result:
            return None
        details = {"value": drafter.get(self.field), "architecture": drafter.architecture}
        if isinstance(result, dict):
            details |= result
        message = f"{self.reason} {self.remedy}".strip().format(**details)
        return Finding(self.severity, concerned, self.field.format(**details), one_line(message))


def first_version(engine: str, drafter: Drafter, since: str) -> str:
    """
    The oldest version of an engine without a limit that is an error for a drafter.

    Args:
        engine (`str`): `"vllm"` or `"sglang"`.
        drafter (`Drafter`): The folder.
        since (`str`): The oldest version to consider.
    """
    newer = [version for version in READ[engine] if holds_for(version, f">{since}")]
    for version in (since, *newer):
        findings = [limit.finding(drafter, {engine: version}) for limit in LIMITS if limit.severity == "error"]
        if not any(findings):
            return version
    return newer[-1] if newer else since


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

# Fields that are read in dflash_config and at the top level.
_FIELDS_IN_BOTH = ("block_size", "mask_token_id", "target_layer_ids")
# Fields of a drafter that engines know only with a plain drafter's value.
_PLAIN_FIELDS = ("target_hidden_size", "v_head_dim", "backbone_rotary_base")
_V2_RUNNER = "for which vLLM needs its V2 model runner."
_KEEP_V2_RUNNER = "Do not set VLLM_USE_V2_MODEL_RUNNER=0."
# Findings of the same words are one, of several engines.
_REDUCED_VOCABULARY = "{value} is a reduced vocabulary, which is not supported."
_WITHOUT_OWN_HEAD = "`dflash convert DRAFT OUTPUT --share-head` writes a drafter without it."
_NOT_READ = "{value!r} is not read; it drafts as with {default!r}, or not at all."

LIMITS: tuple[Limit, ...] = (
    # ---- Which drafters an engine knows at all.
    Limit(
        {"vllm": "<0.28", "sglang": "<0.5.18"},
        "architectures",
        conditions.always,
        "{architecture} is unknown before vLLM 0.28 and SGLang 0.5.18.",
        "Install a newer version.",
        sources=(VLLM_REGISTRY, SGLANG_MODEL),
        layouts=("Muse",),
    ),
    Limit(
        {"vllm": "<0.28", "sglang": "<0.5.19"},
        "architectures",
        conditions.always,
        "{architecture} is unknown before vLLM 0.28 and SGLang 0.5.19.",
        "Install a newer version.",
        sources=(VLLM_REGISTRY, SGLANG_MODEL),
        layouts=("DFlash 2",),
    ),
    Limit(
        {"vllm": "<0.25", "sglang": "<0.5.16"},
        "architectures",
        conditions.always,
        "{architecture} is unknown before vLLM 0.25 and SGLang 0.5.16.",
        "Install a newer version.",
        sources=(VLLM_REGISTRY, SGLANG_DSPARK),
        layouts=("DSpark",),
    ),
    Limit(
        {"sglang": "<0.5.20"},
        "gru_hidden_dim",
        conditions.always,
        "SGLang has no Domino head before 0.5.20.",
        "Install a newer version.",
        sources=(SGLANG_DOMINO,),
        layouts=("Domino",),
    ),
    # ---- What it is.
    Limit(
        SERVERS,
        "model_type",
        conditions.model_type_is_unknown,
        "{value!r} is unknown to the engines' AutoConfig.",
        "Write 'qwen3'.",
        sources=(VLLM_READER, SGLANG_READER),
    ),
    Limit(
        ENGINES,
        "model_type",
        conditions.model_type_is_of_another_layout,
        "{value!r} does not match {architecture}.",
        "Save or convert the drafter again.",
        sources=(VLLM_REGISTRY, SGLANG_MODEL, TRANSFORMERS_DFLASH),
    ),
    Limit(
        SERVERS,
        "vocab_size",
        Comparison("vocab_size", "absent", place="top level"),
        "is missing: engines use their default instead of the target's.",
        "Write the target's vocab_size.",
        sources=(VLLM_MODEL, SGLANG_MODEL),
        layouts=ALL_BUT_MUSE,
    ),
    Limit(
        SERVERS,
        "max_position_embeddings",
        Comparison("max_position_embeddings", "absent", place="top level"),
        "is missing: engines use their default.",
        "Write at least the length that will be served.",
        sources=(VLLM_MODEL, SGLANG_MODEL),
    ),
    # ---- What it reads of the target, and its blocks.
    Limit(
        SERVERS,
        "target_layer_ids",
        conditions.layer_ids_are_unsorted,
        "{value} must increase: engines concatenate features in the order of the target's layers.",
        sources=(VLLM_LAYER_IDS, SGLANG_FIELDS),
    ),
    Limit(
        VLLM,
        "eagle_aux_hidden_state_layer_ids",
        conditions.eagle_layer_ids_differ,
        "{value} is what vLLM reads first, and is not target_layer_ids + 1.",
        "Remove it.",
        sources=(VLLM_LAYER_IDS,),
    ),
    Limit(
        SERVERS,
        "target_layer_ids",
        conditions.reads_last_layer,
        "{value} has the target's last layer: engines read it before the final norm.",
        "Compare the acceptance length.",
        sources=(VLLM_LAYER_IDS, SGLANG_FIELDS),
        severity="warning",
    ),
    *(
        Limit(
            ENGINES,
            field,
            DiffersInTwoPlaces(field),
            "is {nested} in dflash_config and {top} at the top level; readers differ in which they use.",
            "Write one value in both.",
            sources=(VLLM_SPECULATIVE, SGLANG_FIELDS, TRANSFORMERS_DFLASH),
        )
        for field in _FIELDS_IN_BOTH
    ),
    *(
        Limit(
            ENGINES,
            field,
            Comparison(field, "absent"),
            "is missing, so every reader uses its own default.",
            "Write it in dflash_config.",
            sources=(VLLM_SPECULATIVE, SGLANG_FIELDS, TRANSFORMERS_DFLASH),
        )
        for field in _FIELDS_IN_BOTH
    ),
    *(
        Limit(
            TRANSFORMERS,
            field,
            IsNestedOnly(field),
            "is in dflash_config only; transformers' own DFlash decoding reads the top level.",
            sources=(TRANSFORMERS_DFLASH,),
            severity="warning",
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
    ),
    Limit(
        {"vllm": ">=0.25,<0.28"},
        "is_causal",
        conditions.is_causal_is_not_nested,
        "{value} is not read before vLLM 0.28: sliding layers are causal in the block, full layers are not.",
        "Write causal into dflash_config, or install a newer version.",
        sources=(VLLM_MODEL,),
    ),
    Limit(
        {"sglang": ">=0.5.14,<0.5.18"},
        "is_causal",
        conditions.is_causal_is_needed,
        "{value} is read for all layers only since SGLang 0.5.18.",
        "Install a newer version.",
        sources=(SGLANG_MODEL,),
    ),
    Limit(
        SERVERS,
        "use_sliding_window",
        conditions.windows_are_switched_off,
        "is not true, so Qwen3Config drops the windows.",
        "Write true.",
        sources=(VLLM_READER, SGLANG_READER),
        layouts=ALL_BUT_MUSE,
    ),
    Limit(
        {"vllm": ">=0.25"},
        "layer_types",
        conditions.layers_are_of_two_kinds,
        f"mixes full and sliding layers, {_V2_RUNNER}",
        _KEEP_V2_RUNNER,
        sources=(VLLM_CONFIG,),
        severity="warning",
    ),
    Limit(
        {"vllm": ">=0.28", "sglang": ">=0.5.18", **TRANSFORMERS},
        "causal",
        conditions.causal_contradicts_is_causal,
        "{value} in dflash_config contradicts is_causal={is_causal}, which engines use.",
        "Compare the acceptance length.",
        sources=(VLLM_MODEL, SGLANG_MODEL, TRANSFORMERS_DFLASH),
        severity="warning",
    ),
    Limit(
        SERVERS,
        "causal_head",
        conditions.causal_head_is_read_as_bidirectional,
        "is JetSpec's key, which engines do not read: they draft bidirectionally.",
        "Save the drafter again.",
        sources=(VLLM_MODEL, SGLANG_MODEL),
    ),
    Limit(
        SERVERS,
        "is_causal",
        conditions.layer_is_read_differently,
        "layer {layer}: vLLM reads (window, causal) = {vllm}, SGLang {sglang}.",
        "Write layer_types, sliding_window and is_causal at the top level.",
        sources=(VLLM_MODEL, SGLANG_MODEL),
    ),
    Limit(
        ENGINES,
        "sliding_window",
        conditions.speculators_layers_slide,
        "was counted from the anchor in training, for every slot, and not in the block; engines and this package "
        "count it from each slot.",
        "Compare the acceptance length.",
        sources=(VLLM_SPECULATORS, SGLANG_MODEL, TRANSFORMERS_DFLASH),
        severity="warning",
        layouts=("speculators",),
    ),
    Limit(
        VLLM,
        "sliding_window_non_causal",
        conditions.speculators_full_layers_become_causal,
        "is false, which vLLM applies to full layers too: they were trained bidirectionally in the block.",
        "`dflash convert` keeps them so.",
        sources=(VLLM_SPECULATORS,),
        severity="warning",
        layouts=("speculators",),
    ),
    # ---- Rotary embedding.
    Limit(
        SERVERS,
        "rope_parameters",
        conditions.rope_differs_by_layer_type,
        "differs by layer type; vLLM rotates the context of all layers with one table.",
        "Write one.",
        sources=(VLLM_MODEL, SGLANG_MODEL),
    ),
    Limit(
        SERVERS,
        "rope_theta",
        conditions.theta_is_missing,
        "is missing: vLLM uses 1000000, others 10000.",
        "Write it.",
        sources=(VLLM_MODEL, SGLANG_MODEL),
    ),
    Limit(
        ENGINES,
        "rope_theta",
        conditions.thetas_differ,
        "is {thetas} in rope_parameters, top level and rope_scaling.",
        "Write one value.",
        sources=(VLLM_MODEL, SGLANG_MODEL, TRANSFORMERS_DFLASH),
    ),
    Limit(
        SERVERS,
        "rope_theta",
        conditions.theta_is_in_rope_parameters_only,
        "is in rope_parameters only; readers before transformers 5 fall back to 10000.",
        "Write both.",
        sources=(VLLM_READER, SGLANG_READER),
        severity="warning",
    ),
    Limit(
        ENGINES,
        "rope_scaling",
        conditions.rope_types_differ,
        "{value} and rope_parameters={rope_parameters} are of two types.",
        "Write one in both.",
        sources=(VLLM_READER, SGLANG_READER, TRANSFORMERS_DFLASH),
    ),
    Limit(
        SERVERS,
        "rope_scaling",
        conditions.yarn_is_in_rope_parameters_only,
        "is missing next to rope_parameters; readers before transformers 5 lose YaRN.",
        "Write both.",
        sources=(VLLM_READER, SGLANG_READER),
        severity="warning",
    ),
    Limit(
        SERVERS,
        "rope_parameters",
        conditions.has_mscale,
        "has mscale, which engines turn into an attention factor in different ways.",
        "Compare the acceptance length.",
        sources=(VLLM_MODEL, SGLANG_MODEL),
        severity="warning",
    ),
    Limit(
        SERVERS,
        "rope_is_neox_style",
        conditions.rotary_pairs_are_interleaved,
        "is false, which few readers support.",
        "`dflash convert` writes the same drafter in the usual order.",
        sources=(VLLM_MODEL, SGLANG_MODEL),
        severity="warning",
    ),
    # ---- Activation, vocabulary and embedding.
    Limit(
        SERVERS,
        "hidden_act",
        Comparison("hidden_act", "not in", (None, "silu")),
        "{value!r} is not supported; engines only have silu.",
        sources=(VLLM_MODEL, SGLANG_MODEL),
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
        SGLANG,
        "draft_vocab_size",
        conditions.vocabulary_is_reduced,
        _REDUCED_VOCABULARY,
        _WITHOUT_OWN_HEAD,
        sources=(SGLANG_WORKER,),
    ),
    Limit(
        VLLM,
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
    ),
    Limit(
        SERVERS,
        "architectures",
        conditions.has_dflash2_field,
        "{architecture} has no {dflash2_field}; engines need DFlash2DraftModel to build it.",
        sources=(VLLM_REGISTRY, SGLANG_MODEL),
        layouts=ALL_BUT_DFLASH2,
    ),
    *(
        Limit(
            {"vllm": ">=0.28"},
            field,
            Comparison(field, "not set", place="dflash_config"),
            "{value} in dflash_config must be a positive integer; it is read nowhere else.",
            sources=(VLLM_DFLASH2,),
            layouts=("DFlash 2",),
        )
        for field in CONVOLUTION
    ),
    *(
        Limit(
            {"vllm": ">=0.28", "sglang": ">=0.5.19"},
            field,
            Comparison(field, "not set", place="dflash_config"),
            "{value} in dflash_config must be a positive integer; it is read nowhere else.",
            sources=(VLLM_DFLASH2, SGLANG_MODEL),
            layouts=("DFlash 2",),
        )
        for field in SELECTOR
    ),
    Limit(
        VLLM,
        "architectures",
        Comparison("markov_rank", "set"),
        "{architecture} has no Markov head in vLLM; it needs Qwen3DSparkModel.",
        sources=(VLLM_REGISTRY,),
        layouts=ALL_BUT_DSPARK,
    ),
    Limit(
        {"vllm": ">=0.25"},
        "markov_rank",
        Comparison("markov_rank", "not set"),
        "0: vLLM needs a Markov head for anchor-first drafters, SGLang none.",
        sources=(VLLM_DSPARK,),
        layouts=("DSpark",),
    ),
    Limit(
        {"vllm": ">=0.25"},
        "markov_head_type",
        conditions.markov_head_is_not_vanilla,
        "{value!r}: vLLM has only the vanilla Markov head, SGLang all.",
        sources=(VLLM_DSPARK,),
        layouts=("DSpark",),
    ),
    Limit(
        VLLM,
        "gru_hidden_dim",
        conditions.always,
        "vLLM has no Domino head; SGLang serves it.",
        sources=(VLLM_REGISTRY,),
        layouts=("Domino",),
    ),
    Limit(
        {"sglang": ">=0.5.20"},
        "pure_draft_prefix_len",
        Comparison("pure_draft_prefix_len", "not in", (1,)),
        "{value} is not 1, the only value that SGLang supports.",
        sources=(SGLANG_DOMINO,),
        layouts=("Domino",),
    ),
    Limit(
        {"sglang": ">=0.5.20"},
        "projector_type",
        Comparison("projector_type", "not in", ("domino",)),
        "{value!r}: SGLang needs 'domino'.",
        "Save the drafter again.",
        sources=(SGLANG_DOMINO,),
        layouts=("Domino",),
    ),
    Limit(
        {"sglang": ">=0.5.20"},
        "projector_type",
        conditions.always,
        "is drafted greedily by SGLang, on one GPU, in bfloat16.",
        sources=(SGLANG_WORKER,),
        severity="warning",
        layouts=("Domino",),
    ),
    # ---- Files beside the weights.
    Limit(
        {"vllm": "<0.25", "sglang": "<0.5.20"},
        MASK_EMBEDDING,
        conditions.has_own_mask_embedding,
        "is not read before vLLM 0.25 and SGLang 0.5.20: they feed the target's embedding of the mask token.",
        "Install a newer version.",
        sources=(VLLM_MODEL, SGLANG_WORKER),
    ),
    Limit(
        {"vllm": ">=0.25", "sglang": ">=0.5.20"},
        MASK_EMBEDDING,
        conditions.mask_file_is_missing,
        "is missing: engines skip the tensor mask_embedding and feed the target's.",
        "Save the drafter again.",
        sources=(VLLM_MODEL, SGLANG_WORKER),
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
        TRANSFORMERS,
        "auto_map",
        conditions.auto_map_names_no_model,
        "names no AutoModel: without this package the folder loads as a Qwen3 model with random weights.",
        sources=(TRANSFORMERS_CODE,),
        severity="warning",
        layouts=ALL_BUT_MUSE,
    ),
    Limit(
        TRANSFORMERS,
        "{file}",
        conditions.code_file_is_missing,
        "is not in the folder, which does not load without this package.",
        "Publish it, or save it again.",
        sources=(TRANSFORMERS_CODE,),
        severity="warning",
        layouts=ALL_BUT_MUSE,
    ),
    Limit(
        TRANSFORMERS,
        "dflash_hf_version",
        conditions.code_has_mended_defects,
        "the code beside the weights is older than this package's: {defects}.",
        "`dflash publish --code-only REPO` replaces it; a folder is saved again.",
        sources=(TRANSFORMERS_CODE,),
        severity="warning",
        layouts=ALL_BUT_MUSE,
    ),
    Limit(
        TRANSFORMERS,
        "auto_map",
        conditions.code_is_foreign,
        "{code} is not a file beside the weights and its class: others may change their code.",
        "Save it again.",
        sources=(TRANSFORMERS_CODE,),
    ),
    Limit(
        ENGINES,
        "quantization_config",
        conditions.quantization_is_unknown,
        "quant_method {method} is unknown.",
        sources=(VLLM_READER, SGLANG_READER, TRANSFORMERS_QUANTIZERS),
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
        Limit(SERVERS, field, IsNotDefault(field), _NOT_READ, sources=(VLLM_MODEL, SGLANG_MODEL))
        for field in _PLAIN_FIELDS
    ),
    Limit(
        VLLM,
        "input_embedding_scale",
        IsNotDefault("input_embedding_scale"),
        _NOT_READ,
        sources=(VLLM_MODEL,),
        layouts=ALL_BUT_DFLASH2,
    ),
    Limit(
        SGLANG,
        "input_embedding_scale",
        IsNotDefault("input_embedding_scale"),
        _NOT_READ,
        sources=(SGLANG_MODEL,),
    ),
)
