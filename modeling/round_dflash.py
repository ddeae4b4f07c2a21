"""
One round of decoding, draft and verification, and its compiled form: a graph of fixed shape for each bucket of slots,
made once for a pair and used for every prompt.
"""

import contextlib
import weakref

import torch
from transformers.utils import logging


logger = logging.get_logger(__name__)

_START, _USED = 4, 8  # places of `start` and `used` among the arguments of `draft_and_verify`

_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
_MODES = ("default", "max-autotune-no-cudagraphs", *_CUDA_GRAPHS)

# For each drafter and target: where compiled rounds keep their slots, and whether they could be compiled at all.
_pools: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()
_uncompilable: "weakref.WeakSet" = weakref.WeakSet()


def draft_and_verify(generator, session, tap, text, start, features, features_start, size, used, temperature):
    """
    Draft a block for each row and verify it with one forward of the target.

    Args:
        generator (`DFlashCandidateGenerator`), session (`SlotSession`), tap (`FeatureTap`), text (`Continuation`): The
            drafter's context, the target's cache, the features of its next forward, what has been written.
        start (`torch.LongTensor`): `[R]`, numbers of the anchors.
        features, features_start, used: As in `DFlashCandidateGenerator.draft`.
        size (`int`): Tokens of the block to verify, anchor included.
        temperature (`float`): Of the draft.

    Returns:
        The block `[R, size]`, its `Proposal` or `None`, the target's logits `[R, size, V]`, its features
        `[R, size, L * H]`, and the `Verdict` on the block where tensors alone tell.
    """
    proposal = None
    if temperature == 0:
        block = generator.draft(text.last, start, features, features_start, used)
    else:
        block, proposal = generator.sample(text.last, start, features, features_start, used, temperature)
    block = text.drafted(block)[:, :size]
    logits = session.verify(block, start, used)
    return block, proposal, logits, tap.take(), text.judge(logits, block)


def eager_round(generator, session, *args):
    """[`draft_and_verify`], with the cheapest dispatch. What inference mode leaves in a cache would be read-only."""
    with torch.inference_mode() if session.free else torch.no_grad():
        return draft_and_verify(generator, session, *args)


def _round(weights: int | None, *args):
    if weights == 0:  # what is read is guarded: a graph with frozen weights serves those alone
        raise ValueError("weights=0 is no fingerprint.")
    return draft_and_verify(*args)


def fingerprint(*models) -> int:
    """
    A number that changes with the weights of models: where they lie, how often they were changed in place, and some of
    their values, since a change behind `.data`, as merging an adapter makes it, is not counted.
    """
    facts = []
    for model in models:
        for p in model.parameters():
            some = p.detach().reshape(-1)[:: max(p.numel() // 16, 1)]
            facts += [p.data_ptr(), 0 if p.is_inference() else p._version, float(some.float().sum())]
    return hash(tuple(facts)) or 1


class CompiledRound:
    """
    [`draft_and_verify`] as one graph; eager, with one warning, for a pair that cannot be compiled.

    Args:
        target (`PreTrainedModel`): Whose rounds.
        draft (`DFlashDraftModel`): Its drafter.
        how (`str`, *optional*): A mode or a backend of `torch.compile`; default: its own, with CUDA graphs on a GPU.
        freeze (`bool`): Whether the weights are constants of the graph, packed for the processor.
    """

    def __init__(self, target, draft, how: str | None = None, freeze: bool = False):
        self.target, on_gpu = target, target.device.type == "cuda"
        how = how or ("reduce-overhead" if on_gpu else "default")
        options = {"mode": how} if how in _MODES else {"backend": how}
        self.compiled = torch.compile(_round, fullgraph=True, dynamic=False, **options)
        self.graphs_replay = on_gpu and how in _CUDA_GRAPHS
        self.settled = None
        self.weights = fingerprint(target, draft) if freeze else None

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
            freezing = self.weights is not None and not settled
            with (
                torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024),
                torch.compiler.set_stance("default", skip_guard_eval_unsafe=settled),
                torch._inductor.config.patch(freezing=True) if freezing else contextlib.nullcontext(),
            ):
                if not self.graphs_replay:
                    return self.compiled(self.weights, *args)
                torch.compiler.cudagraph_mark_step_begin()
                block, proposal, logits, features, verdict = self.compiled(self.weights, *args)
                # The next replay writes over what this one returned.
                return block, proposal, logits, features.clone(), verdict and type(verdict)(*map(torch.clone, verdict))
        except Exception as error:
            # Nothing is lost: a round writes slots that the same round may write again. If the error has nothing to do
            # with compilation, it comes again from here.
            output = draft_and_verify(*args)
            _uncompilable.add(self.target)
            reason = str(error).strip().split("\n")[0]
            logger.warning(
                f"Decoding eagerly: the round of {type(self.target).__name__} cannot be compiled ({reason})."
            )
            return output
