"""Which layers of a target a drafter reads by default."""

from transformers.utils import logging


logger = logging.get_logger(__name__)


def default_target_layer_ids(num_target_layers: int, num_features: int) -> list[int]:
    """
    The target layers whose outputs a drafter reads by default, by the rule of the paper (arXiv 2602.06036): evenly
    spaced from the second layer to the third last; layer `num_target_layers // 2` for a single feature.

    Args:
        num_target_layers (`int`): Depth of the target.
        num_features (`int`): Features to read; by default as many as the drafter has layers.

    Raises:
        `ValueError`: the target is too shallow for that many distinct layers.
    """
    if num_features == 1:
        return [num_target_layers // 2]
    ids = [round(1 + j * (num_target_layers - 4) / (num_features - 1)) for j in range(num_features)]
    if len(set(ids)) != len(ids) or max(ids) >= num_target_layers or min(ids) < 0:
        raise ValueError(
            f"target_layer_ids={ids}, by the default rule for num_target_layers={num_target_layers}, are not distinct "
            "layers of it; pass `target_layer_ids`, or train a drafter with fewer layers."
        )
    return ids


def fitting_target_layer_ids(num_target_layers: int, num_features: int) -> list[int]:
    """
    [`default_target_layer_ids`] for a new drafter: as many as the target has layers for, with a warning if these are
    fewer than `num_features`.
    """
    for count in range(num_features, 0, -1):
        try:
            ids = default_target_layer_ids(num_target_layers, count)
        except ValueError:  # too few layers
            continue
        if count < num_features:
            logger.warning(
                f"The paper's rule finds no {num_features} distinct layers in a target of {num_target_layers}: the "
                f"drafter reads target_layer_ids={ids}. Pass `target_layer_ids` to choose others."
            )
        return ids
    raise ValueError(f"num_target_layers={num_target_layers} must be at least 1.")
