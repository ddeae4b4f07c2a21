"""
Would a drafter pay here? What a drafter with a certain mean acceptance length would bring, before one is trained.

The target decodes by itself and, in the package's own loop, with a drafter of random weights that drafts the target's
text, right as often as such a drafter would be: see [`~dflash_hf.evaluation.scripted_draft`]. So all that
`dflash eval` times of a real drafter is timed here: both models' forwards, caches, acceptance, the choice of sizes.
"""

import copy
import gc
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import transformers

from dflash_hf._io.files import json_text
from dflash_hf.decoding.adaptive import AdaptiveLength
from dflash_hf.decoding.probe import capabilities_of
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.evaluation.forwards import repeated, time_sizes
from dflash_hf.evaluation.measure import hardware, with_decoding_config, with_whole_blocks
from dflash_hf.evaluation.scripted_draft import (
    Script,
    ScriptedDraft,
    Stopwatch,
    now_undisturbed,
    script_of,
    scripted_target,
    slot_accuracy,
)
from dflash_hf.layouts.configuration import DFlashDraftConfig
from dflash_hf.modeling.target_dflash import check_pair
from dflash_hf.pairs.draft_vocabulary import set_draft_vocabulary
from dflash_hf.targets.generation import context_length_of, generate_one
from dflash_hf.targets.unsafe_hooks import unsafe_hook


FORWARD_SIZES = (1, 2, 4, 8, 16, 32)  # tokens of the target's forwards that are timed
OTHER_TAUS = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)  # also predicted, as far as a block allows
PAPER_BLOCK_SIZE = 16


@dataclass
class TauPrediction:
    """
    What a drafter with an acceptance length would bring.

    Args:
        tau (`float`): Mean tokens committed per verification of whole blocks, the target's own included.
        whole_blocks (`float`): Speedup over the target alone, prompts included, if every round verifies a block. Only
            that of the report's own tau was decoded; at others, a round takes as long and commits that many tokens.
        plain_call (`float`): Speedup of `generate` with default settings, which choose what each round verifies.
    """

    tau: float
    whole_blocks: float
    plain_call: float


@dataclass
class ContextPrediction:
    """
    What was measured after prompts of one length. Times are medians, in seconds.

    Args:
        prompt_lengths (`list[int]`): Tokens of each prompt.
        forwards (`dict[int, float]`): The target's bare forward over so many tokens.
        draft_forward (`float`): The drafter's bare forward over a block, with the head.
        target_round (`float`): A round of the target alone, which writes one token.
        block_round (`float`): A drafted round that verifies a whole block.
        block_tokens (`int`): Tokens of a block, anchor included.
        overhead (`float`): The share of such a round that is neither model's forward: candidates, acceptance, caches.
        reached_tau (`float`): Tokens that these rounds committed, on average.
        predictions (`list[TauPrediction]`): By acceptance length, ascending.
    """

    prompt_lengths: list[int]
    forwards: dict[int, float]
    draft_forward: float
    target_round: float
    block_round: float
    block_tokens: int
    overhead: float
    reached_tau: float
    predictions: list[TauPrediction]

    @property
    def break_even(self) -> float:
        """The acceptance length at which whole blocks are as fast as the target alone; may exceed a block."""
        return self.block_round / self.target_round


@dataclass
class PretendReport:
    """
    The result of [`pretend`].

    Args:
        tau (`float`): The acceptance length that was asked about.
        contexts (`list[ContextPrediction]`): One for each length of prompts.
        setting (`dict`): Target, drafter, device, dtype, packing, versions, limits.
    """

    tau: float
    contexts: list[ContextPrediction]
    setting: dict

    def to_json(self) -> str:
        """The report as JSON, with the derived figures."""
        facts = asdict(self)
        for context, fields in zip(self.contexts, facts["contexts"], strict=True):
            fields["break_even"] = context.break_even
        return json_text(facts)


def random_draft(target, config: DFlashDraftConfig | None = None) -> DFlashDraftModel:
    """
    A drafter with random weights, on the target's device and in its dtype.

    Args:
        target (`PreTrainedModel`): The target.
        config (`DFlashDraftConfig`, *optional*): Its configuration. Default: the paper's, as a training would start
            with: five layers with the target's sizes, blocks of 16 tokens.

    Raises:
        `ValueError`: the target cannot have a drafter; says why.
    """
    if config is None:
        last_id = target.config.get_text_config(decoder=True).vocab_size - 1
        config = DFlashDraftConfig.for_target(target.config, last_id, block_size=PAPER_BLOCK_SIZE)
    check_pair(target, config)
    draft = DFlashDraftModel(copy.deepcopy(config)).to(target.device, target.dtype).eval()
    if config.has_own_lm_head:
        torch.nn.init.normal_(draft.lm_head.weight, std=config.initializer_range)
    reason = unsafe_hook(target)
    if reason is None:
        reason = capabilities_of(target).fallback_reason(type(target).__name__, config.target_layer_ids, None)
    if reason is not None:
        raise ValueError(f"A drafter would bring nothing, since calls would decode without it: {reason}.")
    return draft.requires_grad_(False)


@torch.no_grad()
def pretend(
    target,
    draft: DFlashDraftModel,
    prompts: Sequence[Sequence[int]],
    tau: float,
    max_new_tokens: int = 128,
    runs: int = 3,
    contexts: Sequence[int] = (),
    progress: Callable[[Iterable], Iterable] = iter,
) -> PretendReport:
    """
    Time a target, alone and with a drafter that has an acceptance length of `tau`, greedily and one prompt at a time.

    Answers have `max_new_tokens` tokens, whatever would end them. Methods alternate prompt by prompt, each after one
    call to warm up.

    Args:
        target (`PreTrainedModel`), draft (`DFlashDraftModel`): The pair, packed or not; see [`random_draft`]. The
            weights of the drafter only cost time. A reduced vocabulary is chosen anew.
        prompts (`Sequence[Sequence[int]]`): Prompt ids.
        tau (`float`): Mean tokens committed per verification of a whole block, the target's own included.
        max_new_tokens (`int`): Tokens of an answer.
        runs (`int`): Timed repetitions; the medians are reported. Plain calls at other acceptance lengths are timed
            once.
        contexts (`Sequence[int]`): Lengths to which prompts are extended by other prompts before them, or cut.
            Default: prompts as they are.
        progress: Wraps the iteration over the calls of each context.

    Returns:
        [`PretendReport`].

    Raises:
        `ValueError`: `tau` is not between 1 and the block size, a context does not fit the target, or calls decode
            without the drafter.
    """
    slot_accuracy(tau, draft.config.max_block_tokens)  # checks tau
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise ValueError(f"prompts holds {len(prompts)} prompts; pass the ids of at least one, none of them empty.")
    if max_new_tokens < 2:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 2: the prompt's forward writes the first.")
    prompts_of_contexts = [_extended(prompts, length) for length in contexts] or [[list(ids) for ids in prompts]]
    for prompts_of_context in prompts_of_contexts:
        _check_context(target, max(map(len, prompts_of_context)), max_new_tokens + draft.config.max_block_tokens)
    reports = []
    for prompts_of_context in prompts_of_contexts:
        trial = _Trial(target, draft, prompts_of_context, tau, max_new_tokens)
        reports.append(trial.measure(runs, progress))
    return PretendReport(tau, reports, _setting_of(target, draft, max_new_tokens, runs))


def _extended(prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """Prompts of `length` tokens, which end as the prompts do, after other prompts."""
    extended = []
    for number in range(len(prompts)):
        last_is_own = [*prompts[number + 1 :], *prompts[: number + 1]]
        extended.append(repeated([token for prompt in last_is_own for token in prompt], length))
    return extended


def _check_context(target, prompt_length: int, new_tokens: int) -> None:
    limit = context_length_of(target)
    if limit is not None and prompt_length + new_tokens > limit:
        raise ValueError(
            f"A prompt of {prompt_length} tokens, the answer and a block behind it, {new_tokens} more, exceed the "
            f"target's {limit} positions: take shorter prompts, or a lower max_new_tokens."
        )


class _Quiet(AdaptiveLength):
    """The default policy, without its warning that drafting does not pay: the report says so."""

    def _warn_if_slow(self) -> None:
        pass


class _Call(NamedTuple):
    """One timed call."""

    seconds: float
    lengths: list[int]  # tokens committed by each round


_ALONE = "target alone"
_BLOCKS = "whole blocks"


def _plain_call(tau: float) -> str:
    """The name of the method that drafts with default settings."""
    return f"plain call at tau {tau}"


class _Trial:
    """
    The measurements after prompts of one length.

    Args:
        target, draft, prompts, tau, max_new_tokens: As for [`pretend`].

    Attributes:
        taus (`list[float]`): Those to predict.
        drafters (`dict[str, DFlashDraftModel]`): The drafter of each method; `None` for the target alone.
    """

    def __init__(self, target, draft, prompts: list[list[int]], tau: float, max_new_tokens: int):
        self.target = scripted_target(target)
        self.draft = draft
        self.prompts = prompts
        self.tau = tau
        self.max_new_tokens = max_new_tokens
        block_tokens = draft.config.max_block_tokens
        self.taus = sorted({tau, *(other for other in OTHER_TAUS if other <= block_tokens)})
        # The target's own texts; the last block may reach past the end.
        self.texts = []
        for prompt in prompts:
            self.texts.append(self._generate(None, prompt, max_new_tokens + block_tokens).sequences[0])
        scripts = {value: self._scripts(value) for value in self.taus}
        if draft.config.draft_vocab_size is not None:
            self._choose_vocabulary([script for of_tau in scripts.values() for script in of_tau])
        self.drafters: dict = {_ALONE: None, _BLOCKS: with_whole_blocks(_scripted(draft, scripts[tau]))}
        for value in self.taus:
            drafter = with_decoding_config(_scripted(draft, scripts[value]), policy=_Quiet)
            drafter.is_certain_in_blocks = False  # the policy chooses sizes by the drafter's probabilities
            self.drafters[_plain_call(value)] = drafter

    def _scripts(self, tau: float) -> list[Script]:
        """What a drafter with this acceptance length says about each text."""
        block_tokens = self.draft.config.max_block_tokens
        vocab_size = self.target.config.get_text_config(decoder=True).vocab_size
        scripts = []
        for number, (prompt, text) in enumerate(zip(self.prompts, self.texts, strict=True)):
            scripts.append(script_of(text, len(prompt), tau, block_tokens, vocab_size, seed=number))
        return scripts

    def _choose_vocabulary(self, scripts: list[Script]) -> None:
        """Give the drafter a vocabulary with the texts' tokens and, if there is room, with all that is drafted."""
        rows = self.target.get_output_embeddings().weight.shape[0]
        counts = torch.zeros(rows, dtype=torch.long)
        for script in scripts:
            counts += torch.bincount(script.likely.flatten().cpu(), minlength=rows)
        drafted_most = counts.max()
        for text in self.texts:
            counts[text.cpu()] += drafted_most
        set_draft_vocabulary(self.draft, self.target, counts)

    def _generate(self, drafter, prompt: list[int], new_tokens: int):
        """The output of `generate`. It ends at the mask token, which texts do not hold: answers have full length."""
        return generate_one(
            self.target,
            prompt,
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=self.draft.config.mask_token_id,
            assistant_model=drafter,
        )

    def _time_call(self, method: str, number: int, new_tokens: int) -> _Call:
        """
        Time the answer to a prompt.

        Raises:
            `ValueError`: a call with a drafter was decoded without it.
        """
        drafter = self.drafters[method]
        prompt = self.prompts[number]
        self.target.script = self.texts[number]
        start = now_undisturbed(self.target.device)
        output = self._generate(drafter, prompt, new_tokens)
        seconds = now_undisturbed(self.target.device) - start
        if drafter is None:
            return _Call(seconds, [1] * (output.sequences.shape[1] - len(prompt) - 1))
        lengths = list(output.acceptance_lengths[0])
        if new_tokens > 1 and not lengths:
            raise ValueError(
                "A drafter would bring nothing: a call decoded without it, for the reason that is logged above."
            )
        return _Call(seconds, lengths)

    def _overhead(self) -> float:
        """The share of the rounds of whole blocks that is neither model's forward, in one call and its prompt."""
        seconds = []
        for new_tokens in (1, self.max_new_tokens):
            stopwatch = Stopwatch()
            self.target.stopwatch = stopwatch
            self.drafters[_BLOCKS].stopwatch = stopwatch
            seconds.append((self._time_call(_BLOCKS, 0, new_tokens).seconds, stopwatch.seconds))
        self.target.stopwatch = None
        self.drafters[_BLOCKS].stopwatch = None
        (prompt, prompt_forwards), (answer, answer_forwards) = seconds
        return 1 - (answer_forwards - prompt_forwards) / (answer - prompt)

    def measure(self, runs: int, progress: Callable[[Iterable], Iterable]) -> ContextPrediction:
        """Decode every prompt by each method in turn, `runs` times; at other acceptance lengths once."""
        # 1. Warm up: costs of sizes are learned, kernels are loaded.
        for method in self.drafters:
            self._time_call(method, 0, self.max_new_tokens)
        # 2. Alternate. The prompts alone are timed as answers of one token.
        calls: list[dict[str, list[_Call]]] = [defaultdict(list) for _ in range(runs)]
        prompt_seconds = [dict.fromkeys((_ALONE, _BLOCKS), 0.0) for _ in range(runs)]
        gc.collect()
        for run, number in progress(list(itertools.product(range(runs), range(len(self.prompts))))):
            methods = list(self.drafters) if run == 0 else [_ALONE, _BLOCKS, _plain_call(self.tau)]
            shift = (run + number) % len(methods)
            for method in (*methods[shift:], *methods[:shift]):
                calls[run][method].append(self._time_call(method, number, self.max_new_tokens))
            for method in prompt_seconds[run]:
                prompt_seconds[run][method] += self._time_call(method, number, 1).seconds
        # 3. Bare forwards, in the middle of the first answer, and those within rounds.
        block_tokens = self.draft.config.max_block_tokens
        overhead = self._overhead()
        self.target.script = None
        forwards, draft_forward = time_sizes(
            self.target,
            self.draft,
            self.texts[0].tolist(),
            context=len(self.prompts[0]) + self.max_new_tokens // 2,
            sizes=sorted({*FORWARD_SIZES, block_tokens}),
        )
        # 4. Times of rounds, and speedups, which are ratios within a run.
        seconds = []
        for calls_of_run in calls:
            seconds.append({method: sum(call.seconds for call in timed) for method, timed in calls_of_run.items()})
        round_seconds = {}
        for method in (_ALONE, _BLOCKS):
            rounds = sum(len(call.lengths) for call in calls[-1][method])
            without_prompts = [seconds[run][method] - prompt_seconds[run][method] for run in range(runs)]
            round_seconds[method] = statistics.median(without_prompts) / rounds
        reached_tau = statistics.fmean(length for call in calls[-1][_BLOCKS] for length in call.lengths)
        predictions = []
        for tau in self.taus:
            block_speedups = []
            plain_speedups = []
            for run in range(runs):
                rounds = (seconds[run][_BLOCKS] - prompt_seconds[run][_BLOCKS]) * reached_tau / tau
                block_speedups.append(seconds[run][_ALONE] / (prompt_seconds[run][_BLOCKS] + rounds))
                if _plain_call(tau) in seconds[run]:
                    plain_speedups.append(seconds[run][_ALONE] / seconds[run][_plain_call(tau)])
            predictions.append(
                TauPrediction(tau, statistics.median(block_speedups), statistics.median(plain_speedups))
            )
        return ContextPrediction(
            prompt_lengths=[len(prompt) for prompt in self.prompts],
            forwards=forwards,
            draft_forward=draft_forward,
            target_round=round_seconds[_ALONE],
            block_round=round_seconds[_BLOCKS],
            block_tokens=block_tokens,
            overhead=overhead,
            reached_tau=reached_tau,
            predictions=predictions,
        )


def _scripted(draft: DFlashDraftModel, scripts: Sequence[Script]) -> ScriptedDraft:
    return ScriptedDraft.of(
        draft,
        [script.text for script in scripts],
        [script.likely for script in scripts],
        [script.chances for script in scripts],
    )


def _setting_of(target, draft, max_new_tokens: int, runs: int) -> dict:
    """What was measured, where and how: [`PretendReport.setting`]."""
    return {
        "device": str(target.device),
        "hardware": hardware(target.device),
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "draft_layers": draft.config.num_hidden_layers,
        "draft_head": draft.config.token_head_class.name,
        "draft_parameters": sum(parameter.numel() for parameter in draft.parameters()),
        "block_size": draft.config.max_block_tokens,
        "max_new_tokens": max_new_tokens,
        "runs": runs,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
