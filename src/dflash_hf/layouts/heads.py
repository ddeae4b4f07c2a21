"""How others write each head: names of families, configuration keys and tensors, and what its fields must satisfy."""

from collections.abc import Callable
from typing import NamedTuple

from dflash_hf.modeling.heads_dflash import HEADS, DominoHead, Head, MarkovHead, PathSelector


class UnknownHeadError(ValueError):
    """A drafter whose head, or drafting method, this package does not know."""


class Spelling(NamedTuple):
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
        said = " and ".join(f"{name}={value!r}" for name, value in values.items())
        raise ValueError(f"{said} must be {rule}; correct the drafter's configuration.")


# DFlash 2's path selector.


def _read_selector(config: dict) -> dict:
    """speculators leaves out its defaults."""
    spoken = config.get("speculators_model_type") == "dflash2"
    return {"selector_rank": 256, "selector_top_k": 16, **config} if spoken else config


def _check_selector(config) -> None:
    top_k, known, drafted = config.selector_top_k, config.vocab_size, config.draft_vocab_size
    require(known is not None and top_k <= known, f"at most vocab_size={known}, the target's", selector_top_k=top_k)
    require(drafted is None or top_k <= drafted, f"at most draft_vocab_size={drafted}", selector_top_k=top_k)


# DSpark's Markov head.


def _read_markov(config: dict) -> dict:
    """DSpark's dialects; the fields have DeepSpec's and Automodel's names."""
    if not _is_dspark(config):
        return config
    others = ("projector_type", "use_confidence_head", "confidence_head_alpha")
    file = {key: value for key, value in config.items() if key not in others}
    left_out: dict = {"sample_from_anchor": True}
    if file.get("speculators_model_type"):
        left_out = {"sample_from_anchor": False, "markov_rank": 256}
        left_out |= dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), True)
    elif (has_one := config.get("use_confidence_head")) is not None:  # ModelOpt's always reads the codebook
        file |= dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), has_one)
    elif config.get("confidence_head_alpha"):  # SpecForge's
        left_out["enable_confidence_head"] = True
    # Without its own table the drafter's embedding is a copy of the target's.
    layout = {} if file.get("has_embed_tokens") else {"source_layout": "with copies"}
    stated = {key: value for key, value in file.items() if value is not None or key not in left_out}
    return {**left_out, **stated, **layout}


def _is_dspark(config: dict) -> bool:
    """
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
    types, kind = ("vanilla", "gated", "rnn"), config.markov_head_type
    require(kind in types, f"one of {', '.join(types)}", markov_head_type=kind)
    for key in ("enable_confidence_head", "confidence_head_with_markov"):
        require(isinstance(getattr(config, key), bool), "true or false", **{key: getattr(config, key)})
    reads, rank = config.enable_confidence_head and config.confidence_head_with_markov, config.markov_rank
    require(bool(rank) or not reads, "set for confidence_head_with_markov=True", markov_rank=rank)
    require(config.vocab_size is not None, "set: a Markov head has a row for each of its tokens", vocab_size=None)


# Domino's head.


def _read_domino(config: dict) -> dict:
    """The files of SpecForge, Automodel and ModelOpt, which differ in the architecture's name."""
    names = [*(config.get("architectures") or []), config.get("projector_type")]
    if not any("domino" in str(name).lower() or name == "causal_v5" for name in names):
        return config
    for key, spelling in {**{key: key for key in DominoHead.fields}, "sample_from_anchor": "shift_label"}.items():
        if config.get(key) is None:
            raise ValueError(
                f"{spelling} is missing from a Domino drafter's dflash_config: trainers have different defaults for "
                "it, so set the value that it was trained with."
            )
    return {key: value for key, value in config.items() if key != "projector_type"}


def _check_domino(config) -> None:
    start, size = config.pure_draft_prefix_len, config.block_size
    fits = type(start) is int and 0 <= start < size
    require(fits, f"a number of slots below block_size={size}", pure_draft_prefix_len=start)
    require(config.vocab_size is not None, "set: a Domino head has a row for each of its tokens", vocab_size=None)


SPELLINGS: dict[type[Head], Spelling] = {
    Head: Spelling("DFlash", "dflash"),
    PathSelector: Spelling(
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
    MarkovHead: Spelling(
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
    DominoHead: Spelling("Domino", None, {}, _read_domino, _check_domino),
}


def spelling_of(head: type[Head]) -> Spelling:
    """How others write a head; a head without an entry is in our own files only."""
    return SPELLINGS.get(head, Spelling(head.architecture))


def spellings() -> list[Spelling]:
    """Those of all heads that a drafter may have."""
    return [spelling_of(head) for head in HEADS]


def engine_method(config) -> str:
    """The engines' name for drafting with a configuration's head: `"dflash"` or `"dspark"`."""
    plain = config.sample_from_anchor and not config.has_head
    return "dspark" if config.head is MarkovHead or plain else "dflash"
