"""
`dflash bench`: every way of decoding one pair, side by side in one run, and where the time of a round goes.

With `--forced-acceptance` random weights of a given shape are timed, drafted by an oracle that is right as often as a
trained drafter would be, so that the shapes of real models can be timed anywhere.
"""

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModel, DynamicCache

from dflash_hf.convert import convert
from dflash_hf.data.prompts import template_kwargs
from dflash_hf.evaluation.bench_pairs import native_oracle, oracle_text, random_pair, slot_accuracy
from dflash_hf.evaluation.bench_reference import Reference
from dflash_hf.evaluation.measure import (
    COMPILED,
    DFLASH,
    OURS,
    PACKED,
    PACKED_METHODS,
    PROMPT_LOOKUP,
    TARGET,
    TARGET_PACKED,
    TREE,
    EvalReport,
    evaluate,
    out_of_sight,
    variant,
)
from dflash_hf.evaluation.scripted_draft import ScriptedDraft
from dflash_hf.evaluation.text import summary_lines
from dflash_hf.packed_linear import packed_weights
from dflash_hf.pairs import Loading, check_pair, device_of, draft_config_of, load_draft, load_target, positions_of
from dflash_hf.terminal import Outcome, note, template_arguments


STATIC, NATIVE, ASSISTANT, REFERENCE = "target_static", "native", "assistant", "reference"
METHODS = (TARGET, DFLASH, TREE, COMPILED, NATIVE, PROMPT_LOOKUP)
ON_CPU = (TARGET, TARGET_PACKED, DFLASH, PACKED, TREE, COMPILED, NATIVE, PROMPT_LOOKUP)  # the default there
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass
class Forwards:
    """
    Seconds of bare forwards, with an ordinary cache; medians.

    Args:
        one_token (`float`): The target's forward over one token.
        verify (`float`): The target's forward over a block.
        draft (`float`): The drafter's forward over a block and as many context features, and the head on its slots.
    """

    one_token: float
    verify: float
    draft: float

    def attainable(self, tau: float) -> float:
        """The speed-up that they allow over one-token forwards alone: `tau * t_1 / (t_draft + t_verify)`."""
        return tau * self.one_token / (self.draft + self.verify)


@dataclass
class RoundReport:
    """
    Where the time of a round goes.

    Args:
        plain (`Forwards`): The bare forwards.
        packed (`Forwards`, *optional*): The same with packed weights, where a method has them.
        rounds (`dict[str, float]`): Seconds of a whole round of each method that drafts; see `time_round`.
        tau (`float`): Tokens committed per verification.
    """

    plain: Forwards
    packed: Forwards | None
    rounds: dict[str, float]
    tau: float

    def forwards_of(self, method: str) -> Forwards:
        """The bare forwards with the weights that a method has."""
        return self.packed if method in PACKED_METHODS else self.plain

    @property
    def overhead(self) -> dict[str, float]:
        """Time of a round over that of its two forwards, packed where the method's are."""
        both = {name: self.forwards_of(name).verify + self.forwards_of(name).draft for name in self.rounds}
        return {name: seconds / both[name] for name, seconds in self.rounds.items()}

    def attained(self, report: EvalReport) -> dict[str, float]:
        """Of the speed-up that the bare forwards allow, over the target alone with the same weights."""
        speedups = {
            name: report.methods[name].speedup_over_packed if name in PACKED_METHODS else report.methods[name].speedup
            for name in self.rounds
        }
        return {name: value / self.forwards_of(name).attainable(self.tau) for name, value in speedups.items()}

    def lines(self) -> list[str]:
        lines = []
        for weights, forwards in (("", self.plain), (", packed", self.packed)):
            if forwards is not None:
                lines.append(
                    f"bare forwards     {1e3 * forwards.one_token:.2f} ms one token, {1e3 * forwards.verify:.2f} ms "
                    f"block, {1e3 * forwards.draft:.2f} ms draft{weights}; attainable "
                    f"{forwards.attainable(self.tau):.2f}x over one-token forwards alone{weights}"
                )
        for name, seconds in self.rounds.items():
            lines.append(f"round             {1e3 * seconds:.2f} ms {name}: {self.overhead[name]:.2f} of its forwards")
        return lines


def time_forwards(target, draft, prompt: Sequence[int], context: int, repeats: int = 5) -> Forwards:
    """The bare forwards at a context of so many tokens."""
    device, size = target.device, draft.config.block_size
    ids = torch.tensor([(list(prompt) * (context // len(prompt) + 2))[:context]], device=device)
    block = ids[:, :size]
    times: dict[str, list[float]] = {"one": [], "verify": [], "draft": []}
    with torch.no_grad():
        cache = DynamicCache(config=target.config.get_text_config(decoder=True))
        target(input_ids=ids, past_key_values=cache, use_cache=True)
        draft_cache = DynamicCache()
        width = draft.fc.in_features
        positions = torch.arange(context, device=device)[None]
        features = torch.randn(1, context, width, device=device, dtype=draft.dtype)
        draft.extend_context(draft.project_context(features), positions, draft_cache)
        noise = torch.randn(1, size, draft.config.hidden_size, device=device, dtype=draft.dtype)

        def run(name: str, forward: Callable, cache, length: int) -> None:
            _synchronize(device)
            start = time.perf_counter()
            forward()
            _synchronize(device)
            times[name].append(time.perf_counter() - start)
            cache.crop(-length)

        def one():
            target(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)

        def verify():
            target(input_ids=block, past_key_values=cache, use_cache=True)

        def drafting():
            output = draft(noise_embeds=noise, context_hidden_states=features[:, :size], past_key_values=draft_cache)
            draft.draft_logits(output.last_hidden_state[:, 1:], target.get_output_embeddings())

        for _ in range(repeats + 2):  # in turn, so that other load falls on all
            run("one", one, cache, 1)
            run("verify", verify, cache, size)
            run("draft", drafting, draft_cache, 2 * size)
    return Forwards(*(statistics.median(seconds[2:]) for seconds in times.values()))


def _synchronize(device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bench(
    target,
    draft,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 128,
    runs: int = 5,
    methods: Sequence[str] = METHODS,
    forced_acceptance: float | None = None,
    assistant=None,
    reference: str | Path | None = None,
    reference_python: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[EvalReport, RoundReport]:
    """
    Time a pair by every method, alternating, in one process (the reference in one of its own).

    Args:
        target, draft: The pair.
        prompts (`Sequence[Sequence[int]]`): Prompt ids.
        max_new_tokens (`int`): Longest answer.
        runs (`int`): Timed repetitions.
        methods (`Sequence[str]`): `"target"`, `"dflash"` and any of `"target_static"` (compiled, static cache),
            others of `OURS`, `"native"` (transformers' own `speculation_type="dflash"`), `"prompt_lookup"`; with a
            packed one also `"target_packed"`, the target alone with packed weights.
        forced_acceptance (`float`, *optional*): Tokens per verification that an oracle draft is to reach.
        assistant (`PreTrainedModel`, *optional*): A small autoregressive assistant to time as well.
        reference (path, *optional*): A checkout of z-lab/dflash to time as well.
        reference_python (`str`, *optional*): Its interpreter; default: this one.
        say: Called with a line on what is left out, and why.

    Raises:
        `ValueError`: `forced_acceptance` lies outside 1..block size.
    """
    size = draft.config.block_size
    known = {TARGET, TARGET_PACKED, *OURS, STATIC, NATIVE, PROMPT_LOOKUP}
    if unknown := set(methods) - known:
        raise ValueError(f"methods={list(methods)} names {sorted(unknown)}; choose from {sorted(known)}.")
    texts, drafter = None, draft
    if forced_acceptance is not None:
        texts = [oracle_text(target, prompt, max_new_tokens, size, forced_acceptance) for prompt in prompts]
        drafter = ScriptedDraft.of(draft, texts, certainty=slot_accuracy(forced_acceptance, size))
    others: dict = {}
    with tempfile.TemporaryDirectory() as scratch:
        if STATIC in methods:
            others[STATIC] = {"cache_implementation": "static"}
        if NATIVE in methods:
            try:
                folder = convert(_saved(draft, scratch), Path(scratch) / "native", to="native")
                native = AutoModel.from_pretrained(folder, dtype=draft.dtype).to(draft.device).eval()
                others[NATIVE] = {"assistant_model": native, "speculation_type": "dflash"}
            except ValueError as error:
                say(f"native            left out: {error}")
        if assistant is not None:
            others[ASSISTANT] = {"assistant_model": assistant}
        server = None
        if reference is not None:
            target.save_pretrained(Path(scratch) / "target")
            server = Reference(
                reference, scratch, _saved(draft, scratch), target, max_new_tokens, texts, reference_python
            )
            others[REFERENCE] = server
        ours = [method for method in methods if method in (TARGET, TARGET_PACKED, *OURS, PROMPT_LOOKUP)]
        try:
            with native_oracle(texts, prompts):
                report = evaluate(target, drafter, prompts, max_new_tokens, runs, ours, others=others)
        finally:
            if server is not None:
                server.close()
    # The prompt with the longest answer; of it the rounds of the second half are timed.
    prompt, answer = max(zip(prompts, report.responses, strict=True), key=lambda pair: len(pair[1]))
    context = len(prompt) + 3 * len(answer) // 4
    drafters = {name: variant(drafter, **OURS[name].changes()) for name in OURS if name in report.methods}
    rounds = _round_report(target, draft, drafters, prompt, len(answer), context, report.tau)
    report.setting.update(
        forced_acceptance=forced_acceptance,
        target_parameters=sum(p.numel() for p in target.parameters()),
        draft_parameters=sum(p.numel() for p in draft.parameters()),
        context=context,
    )
    return report, rounds


def _round_report(target, draft, drafters: dict, prompt, max_new_tokens: int, context: int, tau: float) -> RoundReport:
    forwards: dict[bool, list[Forwards]] = {packed: [] for packed in sorted({OURS[name].packed for name in drafters})}
    times: dict[str, list[float]] = {name: [] for name in drafters}
    with out_of_sight():
        for _ in range(7):  # in turn, since a machine's own speed drifts
            for packed in forwards:
                with packed_weights(target, draft) if packed else contextlib.nullcontext():
                    forwards[packed].append(time_forwards(target, draft, prompt, context))
                    for name, drafter in drafters.items():
                        if OURS[name].packed == packed:
                            times[name].append(time_round(target, drafter, prompt, max_new_tokens))
    medians = {
        packed: Forwards(*map(statistics.median, zip(*(vars(one).values() for one in timed), strict=True)))
        for packed, timed in forwards.items()
    }
    rounds = {name: statistics.median(seconds) for name, seconds in times.items()}
    return RoundReport(medians[False], medians.get(True), rounds, tau)


def _saved(draft, scratch) -> Path:
    folder = Path(scratch) / "draft"
    if not folder.exists():
        draft.save_pretrained(folder)
    return folder


def time_round(target, draft, prompt: Sequence[int], max_new_tokens: int) -> float:
    """
    Seconds of a round: what a whole answer takes longer than half of it, over the rounds that it has more, so that the
    prompt and all that is done once for a call are left out.
    """
    ids = torch.tensor([list(prompt)], device=target.device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "return_dict_in_generate": True}

    def call(tokens: int) -> tuple[float, int]:
        _synchronize(target.device)
        start = time.perf_counter()
        output = target.generate(ids, max_new_tokens=tokens, assistant_model=draft, **options)
        _synchronize(target.device)
        return time.perf_counter() - start, len(output.acceptance_lengths[0])

    (half, fewer), (whole, more) = call(max(max_new_tokens // 2, 1)), call(max_new_tokens)
    return (whole - half) / max(more - fewer, 1)


# ------------------------------------------------------------------------------------------------------- command line


def run(arguments, echo) -> Outcome:
    """`dflash bench`; returns 1 where an output of ours is WRONG, see `divergence`."""
    if arguments.dtype not in _DTYPES:
        raise ValueError(f"--dtype {arguments.dtype}: times are of one dtype; choose {', '.join(_DTYPES)}.")
    dtype = _DTYPES[arguments.dtype]
    loading = Loading.of(arguments)
    device = device_of(loading.device)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if (arguments.shape is None) == (arguments.target is None or arguments.draft is None):
        raise ValueError("Give either --shape, or --target and --draft.")
    if arguments.shape is not None:
        if arguments.forced_acceptance is None:
            raise ValueError(f"--shape {arguments.shape} has random weights: give --forced-acceptance TAU.")
        target, draft, prompts = random_pair(arguments.shape, dtype, device, arguments.prompts)
    else:
        positions = positions_of(check_pair(arguments.target, arguments.draft, loading))
        prompts = _prompts(arguments, draft_config_of(arguments.draft, loading), positions)
        target = load_target(arguments.target, loading, device)
        draft = load_draft(arguments.draft, loading, device)
    assistant = None
    if arguments.assistant is not None:
        assistant = load_target(arguments.assistant, Loading(arguments.dtype), device)
    default = ON_CPU if target.device.type == "cpu" else METHODS
    report, rounds = bench(
        target,
        draft,
        prompts,
        arguments.max_new_tokens,
        arguments.runs,
        default if arguments.methods is None else arguments.methods.split(","),
        arguments.forced_acceptance,
        assistant,
        arguments.reference,
        arguments.reference_python,
        say=echo,
    )
    facts = json.loads(report.to_json()) | {"round": {**asdict(rounds), "overhead": rounds.overhead}}
    lines = _lines(report, rounds, arguments)
    for line in lines:
        echo(line)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "bench.md").write_text("```\n" + "\n".join(lines) + "\n```\n", encoding="utf-8")
        (arguments.output / "bench.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        try:
            from dflash_hf.evaluation.plots import plot_report

            plot_report(report, arguments.output / "bench.png", _title(report, arguments))
        except ImportError as error:
            echo(f"no picture: {error}")
        echo(f"written to {arguments.output}")
    return Outcome(1 if report.is_wrong else 0, facts)


def _prompts(arguments, draft_config, positions: int | None) -> list[list[int]]:
    if arguments.data is None:
        raise ValueError("Give --data, the prompts to decode.")
    from dflash_hf.data.encode import RowEncoder
    from dflash_hf.data.prepare import load_tokenizer
    from dflash_hf.evaluation.command import read_prompts

    kwargs = template_kwargs(template_arguments(arguments.template_args), draft_config=draft_config, say=note)
    tokenizer = load_tokenizer(arguments.target, None, arguments.revision, arguments.trust_remote_code)
    encoder = RowEncoder(tokenizer, chat_template_kwargs=kwargs, positions=positions)
    return [list(prompt) for prompt in read_prompts(arguments.data, encoder, arguments.prompts)]


def _title(report: EvalReport, arguments) -> str:
    forced = "" if arguments.forced_acceptance is None else f", FORCED acceptance {arguments.forced_acceptance}"
    name = arguments.shape or Path(arguments.target).name
    return f"{name}, {_SHORT[arguments.dtype]}, {report.setting['threads']} threads{forced}"


def _lines(report: EvalReport, rounds: RoundReport, arguments) -> list[str]:
    setting = report.setting
    head = [
        f"{_title(report, arguments)}: target {setting['target_parameters'] / 1e6:.1f} M, drafter "
        f"{setting['draft_parameters'] / 1e6:.1f} M parameters; {setting['hardware']}; torch {setting['torch']}, "
        f"transformers {setting['transformers']}",
        "",
    ]
    reached = ", ".join(f"{share:.2f} {name}" for name, share in rounds.attained(report).items())
    tail = rounds.lines() + [f"attained          of the attainable speed-up: {reached}"]
    peers = [report.methods[name] for name in (NATIVE, REFERENCE) if name in report.methods]
    for packed, remark in ((False, ""), (True, "; ours alone is packed")):
        ours = {name: report.methods[name].speedup for name in rounds.rounds if OURS[name].packed == packed}
        if peers and ours:
            best = max(peer.speedup for peer in peers)
            ratios = ", ".join(f"{speedup / best:.2f}x {name}" for name, speedup in ours.items())
            tail.append(f"over best peer    {ratios}{remark}")
    return head + summary_lines(report) + tail
