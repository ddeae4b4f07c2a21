"""How others write each head: names of families, configuration keys and tensors, and what its fields must satisfy."""

from collections.abc import Callable
from typing import NamedTuple

from dflash_hf.modeling.heads_dflash import TOKEN_HEADS, DominoHead, MarkovHead, PathSelector, TokenHead


class UnknownDrafterError(ValueError):
    """A drafter whose layout, head or drafting method this package does not know."""


class HeadSchema(NamedTuple):
    """
    What others call a head, and how they write it.

    Attributes:
        family (`str`): What drafters with this head are called; other families are refused.
        speculators_model_type (`str`, *optional*): The type under which speculators writes it.
        tensor_names (`dict[str, str]`): Other names of its tensors (regular expressions), and those in our files.
        read (`Callable`): A `config.json` with this head's fields, from any published spelling. Keys of
            `dflash_config` that have a field are already at the top level.
        check (`Callable`): Check the head's fields in a configuration, beyond its `sizes`; raises `ValueError`.
    """

    family: str
    speculators_model_type: str | None = None
    tensor_names: dict[str, str] = {}
    read: Callable[[dict], dict] = lambda config: config
    check: Callable[..., None] = lambda config: None


def require(fits: bool, rule: str, **values) -> None:
    """
    A rule of the configuration.

    Args:
        fits (`bool`): Whether it is kept.
        rule (`str`): What the values must be.
        values: Fields with their values.

    Raises:
        `ValueError`: it is not; names fields, values and rule.
    """
    if not fits:
        received = " and ".join(f"{name}={value!r}" for name, value in values.items())
        raise ValueError(f"{received} must be {rule}; correct the drafter's configuration.")


# DFlash 2's path selector.


def _read_selector(config: dict) -> dict:
    """speculators leaves out its defaults."""
    if config.get("speculators_model_type") == "dflash2":
        return {"selector_rank": 256, "selector_top_k": 16, **config}
    return config


def _check_selector(config) -> None:
    top_k = config.selector_top_k
    size = config.vocab_size
    require(size is not None and top_k <= size, f"at most vocab_size={size}, the target's", selector_top_k=top_k)
    reduced = config.draft_vocab_size
    require(reduced is None or top_k <= reduced, f"at most draft_vocab_size={reduced}", selector_top_k=top_k)


# DSpark's Markov head.


def _read_markov(config: dict) -> dict:
    """DSpark's files, of several projects; the fields have DeepSpec's and Automodel's names."""
    if not is_dspark(config):
        return config
    read_here = ("projector_type", "use_confidence_head", "confidence_head_alpha")
    file = {key: value for key, value in config.items() if key not in read_here}
    # What the projects mean where their files say nothing, or null.
    defaults: dict = {"sample_from_anchor": True}
    if file.get("speculators_model_type"):
        defaults = {
            "sample_from_anchor": False,
            "markov_rank": 256,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    elif config.get("use_confidence_head") is not None:  # ModelOpt's always reads the codebook
        file["enable_confidence_head"] = config["use_confidence_head"]
        file["confidence_head_with_markov"] = config["use_confidence_head"]
    elif config.get("confidence_head_alpha"):  # SpecForge's
        defaults["enable_confidence_head"] = True
    stated = {key: value for key, value in file.items() if value is not None or key not in defaults}
    return {**defaults, **stated}


def is_dspark(config: dict) -> bool:
    """
    Whether a file names itself DSpark.

    Raises:
        `ValueError`: the file has a Markov head, but cannot be read.
    """
    names = [config.get("speculators_model_type"), config.get("projector_type"), *(config.get("architectures") or [])]
    if any("dspark" in str(name).lower() for name in names):
        return True
    if config.get("markov_rank") and "sample_from_anchor" not in config:
        raise ValueError(
            f"markov_rank={config['markov_rank']} without sample_from_anchor: the file does not say whether slot k of "
            "its blocks predicts the token at anchor + k (false) or anchor + 1 + k (true); set it."
        )
    return False


def _check_markov(config) -> None:
    types = ("vanilla", "gated", "rnn")
    kind = config.markov_head_type
    require(kind in types, f"one of {', '.join(types)}", markov_head_type=kind)
    for key in ("enable_confidence_head", "confidence_head_with_markov"):
        require(isinstance(getattr(config, key), bool), "true or false", **{key: getattr(config, key)})
    rank = config.markov_rank
    reads_codebook = config.enable_confidence_head and config.confidence_head_with_markov
    require(bool(rank) or not reads_codebook, "set for confidence_head_with_markov=True", markov_rank=rank)
    require(config.vocab_size is not None, "set: a Markov head has a row for each of its tokens", vocab_size=None)


# Domino's head.


def _read_domino(config: dict) -> dict:
    """The files of SpecForge, Automodel and ModelOpt, which differ in the architecture's name."""
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
    fits = type(start) is int and 0 <= start < size
    require(fits, f"a number of slots below block_size={size}", pure_draft_prefix_len=start)
    require(config.vocab_size is not None, "set: a Domino head has a row for each of its tokens", vocab_size=None)


HEAD_SCHEMAS: dict[type[TokenHead], HeadSchema] = {
    TokenHead: HeadSchema("DFlash", "dflash"),
    PathSelector: HeadSchema(
        "DFlash2",
        "dflash2",
        # As z-lab's code names them in drafters that it did not load.
        {
            rf"^candidate_selector\.{name}_codebook\.weight$": f"candidate_selector.{name}_codebook"
            for name in ("predecessor", "successor")
        },
        _read_selector,
        _check_selector,
    ),
    MarkovHead: HeadSchema(
        "DSpark",
        "dspark",
        {
            r"^markov_w1\.": "markov_head.markov_w1.",
            r"^markov_w2\.": "markov_head.markov_w2.",
            r"^gate_proj\.": "markov_head.gate_proj.",
            r"^joint_proj\.": "markov_head.joint_proj.",
            r"^confidence_proj\.": "confidence_head.proj.",
        },
        _read_markov,
        _check_markov,
    ),
    # speculators' "domino" fuses features layer by layer, as DFlare does.
    DominoHead: HeadSchema("Domino", None, {}, _read_domino, _check_domino),
}


def schema_of(head: type[TokenHead]) -> HeadSchema:
    """How others write a head; a head without an entry has no files but this package's."""
    return HEAD_SCHEMAS.get(head, HeadSchema(head.architecture.removesuffix("DraftModel")))


def head_schemas() -> list[HeadSchema]:
    """Those of all heads that a drafter may have."""
    return [schema_of(head) for head in TOKEN_HEADS]


def engine_method(config) -> str:
    """The engines' name for drafting with a configuration's head: `"dflash"` or `"dspark"`."""
    plain = config.sample_from_anchor and not config.has_token_head
    return "dspark" if config.token_head_class is MarkovHead or plain else "dflash"
