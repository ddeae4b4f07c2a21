"""Loading the tokenizer of a target by its name: a folder, or a repository on the Hub."""

from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer

from dflash_hf._io.errors import one_line
from dflash_hf._io.files import read_text
from dflash_hf._io.repositories import small_file
from dflash_hf.pairs.configs import TRUST_REMEDY, damaged_config


def load_tokenizer(
    name: str | Path,
    chat_template: str | Path | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_no_vocabulary: bool = False,
):
    """
    Load a tokenizer.

    Args:
        name (`str` or `Path`): A folder, or a repository on the Hub.
        chat_template (`str` or `Path`, *optional*): A Jinja file, whose template replaces the tokenizer's.
        revision (`str`, *optional*): Branch, tag or commit of the repository.
        trust_remote_code (`bool`): Run the tokenizer's own code.
        allow_no_vocabulary (`bool`): Whether a folder without a vocabulary will do, as for rows of token ids.
            transformers makes a tokenizer without one of a folder that has no tokenizer's files.

    Raises:
        `OSError`: the folder or repository does not exist.
        `ValueError`: it has no tokenizer, or a tokenizer with custom code.
    """
    small_file(str(name), str(name), revision, "tokenizer_config.json")
    options = {"trust_remote_code": True} if trust_remote_code else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main", **options)
        if not allow_no_vocabulary and not _has_vocabulary(tokenizer):
            raise ValueError(f"the tokenizer of {name} has no vocabulary")
    except StrictDataclassError as error:
        raise ValueError(damaged_config(str(name), error)) from error
    except (ValueError, OSError, ImportError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(f"The tokenizer of {name} has custom code; if you trust it {TRUST_REMEDY}.") from error
        if Path(name).expanduser().is_dir():
            raise ValueError(
                f"{name} holds no tokenizer that can be read; save the target's there with "
                f"`tokenizer.save_pretrained(folder)` ({one_line(error, 100)})."
            ) from error
        raise
    if chat_template is not None:
        tokenizer.chat_template = read_text(Path(chat_template))
    return tokenizer


def _has_vocabulary(tokenizer) -> bool:
    """Whether a tokenizer has more tokens than were added to it."""
    added = tokenizer.added_tokens_decoder
    if not isinstance(added, dict):  # a method in mistral-common's tokenizers, which raises; these have a vocabulary
        return True
    return len(tokenizer.get_vocab()) > len(added)
