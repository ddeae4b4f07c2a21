"""
How other projects write the token heads: names of families, configuration keys and tensors; and checks of the fields
of each head. The heads themselves are in `modeling/head_*_dflash.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from dflash_hf.layouts.errors import require, require_key
from dflash_hf.layouts.source_layout import unchanged
from dflash_hf.modeling.heads_dflash import TOKEN_HEADS, DominoHead, MarkovHead, PathSelector, TokenHead


@dataclass(frozen=True)
class HeadSchema:
    """
    The names and keys of a head in the files of other projects.

    Args:
        family (`str`): The name of drafters with this head; other families are rejected.
        speculators_model_type (`str`, *optional*): The `speculators_model_type` in files of speculators.
        tensor_names (`dict[str, str]`): Regular expressions of other names of its tensors, and the published names.
        read (`Callable`): Called with a `config.json` whose nested keys are merged into the top level; returns it with
            this head's fields set from any project's keys.
        check (`Callable`): Called with a configuration; raises `ValueError` if a field of the head is invalid. Its
            `sizes` are checked before.
    """

    family: str
    speculators_model_type: str | None = None
    tensor_names: dict[str, str] = field(default_factory=dict)
    read: Callable[[dict], dict] = unchanged
    check: Callable[..., None] = lambda config: None


# DFlash 2's path selector.


def _read_selector(config: dict) -> dict:
    """Sets speculators' defaults, which its files leave out."""
    if config.get("speculators_model_type") == "dflash2":
        return {"selector_rank": 256, "selector_top_k": 16, **config}
    return config


def _check_selector(config) -> None:
    top_k = config.selector_top_k
    size = config.vocab_size
    require(size is not None and top_k <= size, f"at most vocab_size={size}, the target's", selector_top_k=top_k)
    reduced = config.draft_vocab_size
    require(reduced is None or top_k <= reduced, f"at most draft_vocab_size={reduced}", selector_top_k=top_k)


# DSpark's Markov head. DeepSpec and Automodel name the fields as they are named here.

_DSPARK_DEFAULTS: dict = {"sample_from_anchor": True}
_SPECULATORS_DEFAULTS: dict = {
    "sample_from_anchor": False,
    "markov_rank": 256,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
# Keys of DSpark files that are read here and not kept.
_DSPARK_KEYS_READ_HERE = ("projector_type", "use_confidence_head", "confidence_head_alpha")


def _read_markov(config: dict) -> dict:
    """Reads DSpark files of several projects."""
    if not is_dspark(config):
        _check_anchor_convention(config)
        return config
    fields = {key: value for key, value in config.items() if key not in _DSPARK_KEYS_READ_HERE}
    if config.get("speculators_model_type"):
        return _with_defaults(fields, _SPECULATORS_DEFAULTS)
    if config.get("use_confidence_head") is not None:  # ModelOpt, whose confidence head always reads `W1`
        has_confidence = config["use_confidence_head"]
        fields |= {"enable_confidence_head": has_confidence, "confidence_head_with_markov": has_confidence}
    elif config.get("confidence_head_alpha"):  # SpecForge, which has the weight of the confidence's loss
        return _with_defaults(fields, {**_DSPARK_DEFAULTS, "enable_confidence_head": True})
    return _with_defaults(fields, _DSPARK_DEFAULTS)


def _with_defaults(config: dict, defaults: dict) -> dict:
    """A configuration with defaults for the keys that are missing or null."""
    explicit = {key: value for key, value in config.items() if value is not None or key not in defaults}
    return {**defaults, **explicit}


def is_dspark(config: dict) -> bool:
    """Whether a file names itself DSpark."""
    names = [config.get("speculators_model_type"), config.get("projector_type"), *(config.get("architectures") or [])]
    return any("dspark" in str(name).lower() for name in names)


def _check_anchor_convention(config: dict) -> None:
    """
    Raises:
        `ValueError`: a Markov head in a file that neither names itself DSpark nor says which token slot 0 predicts.
    """
    if config.get("markov_rank") and "sample_from_anchor" not in config:
        raise ValueError(
            f"markov_rank={config['markov_rank']} without sample_from_anchor: the file does not say whether slot k of "
            "its blocks predicts the token at anchor + k (false) or anchor + 1 + k (true); set it."
        )


def _check_markov(config) -> None:
    types = ("vanilla", "gated", "rnn")
    kind = config.markov_head_type
    require(kind in types, f"one of {', '.join(types)}", markov_head_type=kind)
    for key in ("enable_confidence_head", "confidence_head_with_markov"):
        require_key(isinstance(getattr(config, key), bool), "true or false", key, getattr(config, key))
    rank = config.markov_rank
    reads_embedding = config.enable_confidence_head and config.confidence_head_with_markov  # `W1` of the last token
    require(bool(rank) or not reads_embedding, "set for confidence_head_with_markov=True", markov_rank=rank)
    require(config.vocab_size is not None, "set: a Markov head has a row for each of its tokens", vocab_size=None)


# Domino's head.


def _read_domino(config: dict) -> dict:
    """Reads Domino files of SpecForge, Automodel and ModelOpt, which write different architectures."""
    names = [*(config.get("architectures") or []), config.get("projector_type")]
    if not any("domino" in str(name).lower() or name == "causal_v5" for name in names):
        return config
    for key in (*DominoHead.fields, "sample_from_anchor"):
        if config.get(key) is None:
            published_key = "shift_label" if key == "sample_from_anchor" else key
            raise ValueError(
                f"{published_key} is missing from a Domino drafter's dflash_config: trainers have different defaults "
                "for it, so set the value that it was trained with."
            )
    return {key: value for key, value in config.items() if key != "projector_type"}


def _check_domino(config) -> None:
    start = config.pure_draft_prefix_len
    size = config.block_size
    is_slot = type(start) is int and 0 <= start < size
    require(is_slot, f"a number of slots below block_size={size}", pure_draft_prefix_len=start)
    require(config.vocab_size is not None, "set: a Domino head has a row for each of its tokens", vocab_size=None)


HEAD_SCHEMAS: dict[type[TokenHead], HeadSchema] = {
    TokenHead: HeadSchema(family="DFlash", speculators_model_type="dflash"),
    PathSelector: HeadSchema(
        family="DFlash2",
        speculators_model_type="dflash2",
        # Names in drafters that z-lab's code saved without having loaded them.
        tensor_names={
            rf"^candidate_selector\.{name}_codebook\.weight$": f"candidate_selector.{name}_codebook"
            for name in ("predecessor", "successor")
        },
        read=_read_selector,
        check=_check_selector,
    ),
    MarkovHead: HeadSchema(
        family="DSpark",
        speculators_model_type="dspark",
        tensor_names={
            r"^markov_w1\.": "markov_head.markov_w1.",
            r"^markov_w2\.": "markov_head.markov_w2.",
            r"^gate_proj\.": "markov_head.gate_proj.",
            r"^joint_proj\.": "markov_head.joint_proj.",
            r"^confidence_proj\.": "confidence_head.proj.",
        },
        read=_read_markov,
        check=_check_markov,
    ),
    # No `speculators_model_type`: the "domino" of speculators fuses features layer by layer, as DFlare does.
    DominoHead: HeadSchema(family="Domino", read=_read_domino, check=_check_domino),
}


def schema_of(head: type[TokenHead]) -> HeadSchema:
    """The schema of a head; one without an entry in `HEAD_SCHEMAS` is written by this package only."""
    return HEAD_SCHEMAS.get(head, HeadSchema(head.architecture.removesuffix("DraftModel")))


def head_schemas() -> list[HeadSchema]:
    """The schemas of all token heads."""
    return [schema_of(head) for head in TOKEN_HEADS]


def engine_method(config) -> str:
    """The speculative method by which engines serve a drafter: `"dflash"` or `"dspark"`."""
    is_anchor_first = config.sample_from_anchor and not config.has_token_head
    return "dspark" if config.token_head_class is MarkovHead or is_anchor_first else "dflash"
