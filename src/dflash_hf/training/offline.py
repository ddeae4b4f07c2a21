"""Training on stored features."""

from collections.abc import Callable

from torch.nn.utils.rnn import pad_sequence

from dflash_hf.data.examples import DFlashCollator
from dflash_hf.target import TargetOutput, digest_of_target
from dflash_hf.training.features import StoredFeatures, parts_of
from dflash_hf.training.trainer import DFlashTrainer


class StoredCollator(DFlashCollator):
    """Pads ids and loss masks; the features stay on disk until their micro-batch runs."""

    def __call__(self, examples: list[dict]) -> dict:
        batch = super().__call__([{name: row[name] for name in ("input_ids", "loss_mask")} for row in examples])
        return {**batch, "stored": [row["stored"] for row in examples]}


class DFlashOfflineTrainer(DFlashTrainer):
    """
    A [`DFlashTrainer`] that reads the target's features from disk. It needs only the target's embedding and head, see
    [`~dflash_hf.training.features.drop_layers`].

    Args:
        train_dataset, eval_dataset ([`~dflash_hf.training.features.StoredFeatures`]): From the same target and layers;
            several of them as a `ConcatDataset`. With states if the loss needs the target's distribution.

    Raises:
        `ValueError`: the features belong to another target or other layers, or lack the states.
    """

    collator_class = StoredCollator

    def check_dataset(self, dataset, args, draft_config, target) -> None:
        """Rows were checked when they were stored; reading them all again would take hours."""
        for part in parts_of(dataset):
            check_features(part, draft_config, target)
            if args.reads_states and not part.states:
                raise ValueError(
                    f"label_source={args.label_source!r} with loss_type={args.loss_type!r} needs the target's final "
                    "states; pass `StoredFeatures(folder, states=True)`."
                )

    def reader(self) -> Callable[[dict], TargetOutput]:
        """The target's output is in the batch; its states were checked when they were stored."""
        return stored_output


def stored_output(batch: dict) -> TargetOutput:
    """The target's output for a batch of stored rows, read from disk."""
    device = batch["input_ids"].device
    features = pad_sequence([row.features() for row in batch["stored"]], batch_first=True)  # [N, S, L*H]
    states = [row.last_hidden_state() for row in batch["stored"]]
    of_all = None if states[0] is None else pad_sequence(states, batch_first=True).to(device)  # [N, S, H]
    return TargetOutput(features.to(device), of_all)


def check_features(dataset, draft_config, target) -> None:
    """
    Check that stored features fit a drafter and its target.

    Raises:
        `ValueError`: names the mismatch and the remedy.
    """
    if not isinstance(dataset, StoredFeatures):
        raise ValueError(f"The dataset is a {type(dataset).__name__}; pass `StoredFeatures(folder)`.")
    manifest, folder = dataset.manifest, dataset.folder
    if dataset.layer_ids != draft_config.target_layer_ids:
        raise ValueError(
            f"The dataset of {folder} reads target_layer_ids={dataset.layer_ids}, but the drafter reads "
            f"target_layer_ids={draft_config.target_layer_ids}; pass `StoredFeatures(folder, layer_ids)`."
        )
    for part, digest in digest_of_target(target).items():
        if manifest.weights[part] != digest:
            raise ValueError(
                f"{folder} holds features of {manifest.target} with weights.{part}={manifest.weights[part]}, but this "
                f"{type(target).__name__} has {digest}: load that target, or store the features again."
            )
