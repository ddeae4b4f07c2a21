"""What `DFlashTrainer` writes beside a drafter's weights: the facts of its model card, its report, and the card."""

import shutil
from collections.abc import Sized
from pathlib import Path

from dflash_hf.evaluation.measure import EvalReport
from dflash_hf.evaluation.report import PLOT_FILE, REPORT_FILE, save_report
from dflash_hf.hub.card import FACTS_FILE, CardFacts, render_card, save_training_facts
from dflash_hf.training.adapters import is_adapted


class CardWriter:
    """
    The part of `DFlashTrainer` that writes cards; mixed in before `Trainer`.

    Attributes:
        eval_report (`EvalReport`, *optional*): What was measured by decoding with the weights as they are now. It is
            dropped when they change, so that no folder holds the figures of other weights.
    """

    eval_report: EvalReport | None = None
    _loaded_best = False

    def training_step(self, *args, **kwargs):
        """As upstream; the weights are about to change."""
        self.eval_report, self._loaded_best = None, False
        return super().training_step(*args, **kwargs)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._loaded_best = True
        report = Path(self.state.best_model_checkpoint) / REPORT_FILE
        self.eval_report = EvalReport.from_json(report.read_text(encoding="utf-8")) if report.is_file() else None

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """As upstream, with `card_facts.json` and, where these weights were evaluated, the report and its picture."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        super()._save(output_dir, state_dict)
        if not self.args.should_save:
            return
        steps = self.state.best_global_step if self._loaded_best else self.state.global_step
        measured = {"optimizer_steps": steps}
        if isinstance(self.train_dataset, Sized):
            measured["train_examples"] = len(self.train_dataset)
        save_training_facts(folder, self.target, self.args, measured)
        if self.eval_report is not None:
            save_report(self.eval_report, folder)
        else:
            for name in (REPORT_FILE, PLOT_FILE):  # of the weights that were there before
                (folder / name).unlink(missing_ok=True)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """
        Write the drafter's card, rendered from facts, as README.md of the output folder; `push_to_hub` calls this.

        Args:
            license (`str`): The Hub's short name, e.g. `"mit"`.
            tags (`str` or `list[str]`): Added to the card's own.
            model_name (`str`): Its title where no repository is known yet. Default: the folder's name.
            finetuned_from (`str`): Repository of the target. Default: where it was loaded from.
            dataset (`str` or `list[str]`): Repositories of the training data. Default: `dataset_tags`.
            language, tasks, dataset_args: Not part of a drafter's card.

        Raises:
            `ValueError`: the target was not loaded from the Hub and `finetuned_from` is missing.
        """
        if not self.is_world_process_zero() or is_adapted(self.model):  # PEFT writes the card of an adapter
            return
        folder = Path(self.args.output_dir)
        datasets = dataset_tags if dataset is None else dataset
        facts = CardFacts.from_folder(
            folder,
            base_model=finetuned_from,
            license=license,
            datasets=[datasets] if isinstance(datasets, str) else datasets,
        )
        repo = self.hub_model_id or self.args.hub_model_id or model_name or folder.absolute().name
        card = render_card(folder, facts, repo)
        wanted = [tags] if isinstance(tags, str) else tags or []
        card.data.tags += [tag for tag in wanted if tag not in card.data.tags]
        (folder / "README.md").write_text(str(card), encoding="utf-8")

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """As upstream, which copies config and weights alone: the code that config.json names goes along."""
        if self.is_world_process_zero():
            source, folder = Path(checkpoint_folder), Path(self.args.output_dir)
            (folder / "custom_generate").mkdir(exist_ok=True)
            for path in (*source.glob("*_dflash.py"), source / "custom_generate/generate.py", source / FACTS_FILE):
                if path.is_file():  # an adapter has no code
                    shutil.copyfile(path, folder / path.relative_to(source))
        super()._push_from_checkpoint(checkpoint_folder)
