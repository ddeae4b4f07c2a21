"""A training run as one object: its settings, its pair, and how its rows are encoded."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from dflash_hf.data.encode import RowEncoder
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.training.recipe import RecipeArguments
from dflash_hf.training.training_args import DFlashTrainingArguments


@dataclass
class Run:
    """
    What a run trains with.

    Args:
        recipe (`RecipeArguments`), args (`DFlashTrainingArguments`): Its settings.
        target, draft: The models as loaded, or a fresh drafter.
        encoder (`RowEncoder`): Tokenizer, and the arguments of its template.
    """

    recipe: RecipeArguments
    args: DFlashTrainingArguments
    target: PreTrainedModel
    draft: DFlashDraftModel
    encoder: RowEncoder

    @property
    def layer_ids(self) -> list[int]:
        """The target layers whose outputs the drafter reads."""
        return self.draft.config.target_layer_ids
