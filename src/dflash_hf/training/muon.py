"""Muon for the matrices of a drafter's layers and AdamW for the rest, as one optimizer."""

import torch
from torch import nn


class MuonAdamW(torch.optim.Optimizer):
    """
    `torch.optim.Muon` and `torch.optim.AdamW` behind one learning rate, schedule and checkpoint.

    Muon's updates are scaled to the size of AdamW's (`match_rms_adamw`), so AdamW's learning rate carries over.

    Args:
        matrices, others (`list[nn.Parameter]`): For Muon, for AdamW.
        lr, weight_decay (`float`): Of both; only matrices decay.
        betas, eps: Of AdamW.
    """

    def __init__(self, matrices, others, lr: float, weight_decay: float = 0.0, betas=(0.9, 0.999), eps: float = 1e-8):
        scaled = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": weight_decay}
        self.muon = torch.optim.Muon(matrices, lr=lr, **scaled)
        self.adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, weight_decay=0.0)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})
        self._share()

    def __setstate__(self, state):
        super().__setstate__(state)  # of a checkpoint: new groups and a new state
        self._share()

    def _share(self) -> None:
        """Let both optimizers work on the groups and the state of this one, which a schedule and a checkpoint use."""
        self.muon.param_groups = self.param_groups[:1]
        self.adamw.param_groups = self.param_groups[1:]
        self.muon.state = self.state
        self.adamw.state = self.state

    @torch.no_grad()
    def step(self, closure=None):
        """One step of both."""
        loss = self.muon.step(closure)
        self.adamw.step()
        return loss


def muon_of(draft, args) -> MuonAdamW:
    """
    The optimizer of a drafter: the matrices of its layers and of `fc`, which reads the features, go to Muon.

    Raises:
        `ValueError`: either of the two has nothing to train.
    """
    modules = [*draft.layers.modules(), *draft.fc.modules()]
    weights = [module.weight for module in modules if isinstance(module, nn.Linear)]
    matrices = {id(weight): weight for weight in weights if weight.requires_grad}
    trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    others = [parameter for parameter in trained if id(parameter) not in matrices]
    if not matrices or not others:
        raise ValueError(
            f"muon=True trains matrices of layers with Muon and the rest with AdamW, but of what is trained here "
            f"{len(matrices)} are such matrices and {len(others)} are not; leave it out."
        )
    betas = (args.adam_beta1, args.adam_beta2)
    return MuonAdamW(list(matrices.values()), others, args.learning_rate, args.weight_decay, betas, args.adam_epsilon)
