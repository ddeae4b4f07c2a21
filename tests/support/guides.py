"""The fenced blocks of README and guides, and the tiny pair that stands in for `smollm2` while they run."""

import ast
import importlib.util
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from support.tiny_chat import END, save_target


ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "examples" / "guides").glob("*.md"))]


@dataclass
class Block:
    """A fenced block: where it is, its language, and its text."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def needs(self) -> str:
        """What its first line says that it needs; empty where it runs anywhere."""
        first = self.text.splitlines()[0]
        return first.removeprefix("# needs ") if first.startswith("# needs ") else ""

    @property
    def runs(self) -> bool:
        """Whether it can run here: a package that it needs may be installed."""
        package = re.fullmatch(r"the package (\w+)", self.needs)
        return not self.needs or bool(package) and importlib.util.find_spec(package[1]) is not None

    def commands(self) -> list[list[str]]:
        """The words of each line of a shell block, without comments."""
        text = self.text.replace("\\\n", " ")
        return [words for words in (shlex.split(line, comments=True) for line in text.splitlines()) if words]


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, from top to bottom."""
    text = page.read_text(encoding="utf-8")
    fences = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(page, text[: fence.start()].count("\n") + 1, fence[1], fence[2]) for fence in fences]


def definitions_of(page: Path, *names: str) -> dict:
    """What the Python blocks of a page define or import under these names; nothing else of the page is run."""
    namespace: dict = {"torch": torch}
    for block in blocks_of(page):
        if block.language != "python":
            continue
        for node in ast.parse(block.text).body:
            defined = {alias.asname or alias.name for alias in getattr(node, "names", ())} | {
                getattr(node, "name", "")
            }
            if defined & set(names):
                exec(compile(ast.Module([node], []), block.where, "exec"), namespace)
    return {name: namespace[name] for name in names}


def save_stand_in(folder: Path, ends: bool = True) -> tuple[Path, Path]:
    """
    A target with as many layers as SmolLM2-135M, for its layer ids, and a drafter; both tiny and random.

    It writes letters and, where `ends`, soon the end of its turn.
    """
    saved = save_target(folder / "target", family="llama", num_hidden_layers=30, max_position_embeddings=2048)
    target = AutoModelForCausalLM.from_pretrained(saved)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    written = {tokenizer.convert_tokens_to_ids(letter) for letter in "abcdefghi\u0120"}
    if ends:
        written.add(END)
    unwritten = [token for token in range(280) if token not in written]
    head = target.get_output_embeddings().weight.data.mul_(0.3)
    head[unwritten] = 0.0
    target.save_pretrained(saved)
    torch.manual_seed(1)
    config = DFlashDraftConfig.for_target(
        target.config, mask_token_id=16, num_hidden_layers=2, block_size=8, target_layer_ids=[8, 15, 22, 27]
    )
    DFlashDraftModel(config).save_pretrained(folder / "draft")
    return saved, folder / "draft"
