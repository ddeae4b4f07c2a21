"""
One round of decoding, draft and verification, and its compiled form: a graph of fixed shape for each bucket of slots,
made once for a pair and used for every prompt.
"""

import weakref
from typing import NamedTuple

import torch
from transformers.utils import logging

from .accept_dflash import Proposal, Verdict
from .tree_dflash import DraftTree


logger = logging.get_logger(__name__)

_START, _USED = 4, 8  # places of `start` and `used` among the arguments of `draft_and_verify`

_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
_MODES = ("default", "max-autotune-no-cudagraphs", *_CUDA_GRAPHS)

# For each drafter and target: where compiled rounds keep their slots, and whether they could be compiled at all.
_pools: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()
_uncompilable: "weakref.WeakSet" = weakref.WeakSet()


class Round(NamedTuple):
    """What was drafted, and what the target says of it."""

    block: torch.LongTensor  # [R, n]
    proposal: Proposal | None
    tree: DraftTree | None  # of which the tokens of the block are the nodes
    logits: torch.Tensor  # [R, n, V]
    features: torch.Tensor  # [R, n, L * H]; of a tree with a verdict those of the way, [R, block_size, L * H]
    verdict: Verdict | None  # where tensors alone tell


def draft_and_verify(generator, session, tap, text, start, features, features_start, size, used, temperature):
    """
    Draft a block, or a tree of that depth, for each row and verify it with one forward of the target.

    Args:
        generator (`DFlashCandidateGenerator`), session (`SlotSession`), tap (`FeatureTap`), text (`Continuation`): The
            drafter's context, the target's cache, the features of its next forward, what has been written.
        start (`torch.LongTensor`): `[R]`, numbers of the anchors.
        features, features_start, used: As in `DFlashCandidateGenerator.draft`.
        size (`int`): Tokens of the block to verify, anchor included.
        temperature (`float`): Of the draft.

    Returns:
        [`Round`].
    """
    context = (text.last, start, features, features_start, used)
    proposal = tree = None
    if generator.paths is not None:
        tree = generator.tree(*context)
        block, logits = tree.tokens, session.verify_tree(tree, start, used)
    else:
        if temperature == 0:
            block = generator.draft(*context)
        else:
            block, proposal = generator.sample(*context, temperature)
        block = text.drafted(block)[:, :size]
        logits = session.verify(block, start, used)
    features, verdict = tap.take(), text.judge(logits, block, tree)
    if tree is not None and verdict is not None:
        features = straighten(session, features, start, verdict.way)
    return Round(block, proposal, tree, logits, features, verdict)


def straighten(session, features: torch.Tensor, start: torch.LongTensor, way: torch.LongTensor) -> torch.Tensor:
    """Make a block of the way through a tree: in the target's cache, and its features `[R, block_size, L * H]`."""
    session.straighten(start, way)
    return features.gather(1, way[..., None].expand(-1, -1, features.shape[-1]))


def eager_round(generator, session, *args):
    """[`draft_and_verify`], with the cheapest dispatch. What inference mode leaves in a cache would be read-only."""
    with torch.inference_mode() if session.free else torch.no_grad():
        return draft_and_verify(generator, session, *args)


class CompiledRound:
    """
    [`draft_and_verify`] as one graph; eager, with one warning, for a pair that cannot be compiled.

    Args:
        target (`PreTrainedModel`): Whose rounds.
        how (`str`, *optional*): A mode or a backend of `torch.compile`; default: its own, with CUDA graphs on a GPU.
    """

    def __init__(self, target, how: str | None = None):
        self.target, on_gpu = target, target.device.type == "cuda"
        how = how or ("reduce-overhead" if on_gpu else "default")
        options = {"mode": how} if how in _MODES else {"backend": how}
        self.compiled = torch.compile(draft_and_verify, fullgraph=True, dynamic=False, **options)
        self.graphs_replay = on_gpu and how in _CUDA_GRAPHS
        self.settled = None

    @staticmethod
    def pool(model) -> dict:
        """Where the slots of a model outlive a call of `generate`."""
        return _pools.setdefault(model, {})

    def __call__(self, *args):
        if self.target in _uncompilable:
            return draft_and_verify(*args)
        bucket = args[_USED]
        try:
            # One graph for each bucket, number of rows and way of drafting, of every pair of the process.
            # Within one bucket of one call nothing changes that a graph depends on, so its guards are checked once.
            settled, self.settled = self.settled == bucket, bucket
            if not settled:
                kind, rows = type(self.target).__name__, len(args[_START])
                logger.warning_once(
                    f"Compiling a round of {kind} for {rows} row(s) of {bucket + 1} slots. This takes a while, once."
                )
            with (
                torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024),
                torch.compiler.set_stance("default", skip_guard_eval_unsafe=settled),
            ):
                if not self.graphs_replay:
                    return self.compiled(*args)
                torch.compiler.cudagraph_mark_step_begin()
                output = self.compiled(*args)
                # The next replay writes over what this one returned.
                verdict = output.verdict
                if verdict is not None:
                    verdict = Verdict(*(None if tensor is None else tensor.clone() for tensor in verdict))
                return output._replace(features=output.features.clone(), verdict=verdict)
        except Exception as error:
            # Nothing is lost: a round writes slots that the same round may write again. If the error has nothing to do
            # with compilation, it comes again from here.
            output = draft_and_verify(*args)
            _uncompilable.add(self.target)
            first, *others = str(error).strip().split("\n")  # "backend='inductor' raised:", and then what
            reason = " ".join([first, *others[: first.endswith(":")]])
            logger.warning(
                f"Decoding eagerly: the round of {type(self.target).__name__} cannot be compiled ({reason})."
            )
            return output
