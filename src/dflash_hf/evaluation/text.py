"""Reports and answers as text for a terminal."""

from collections import Counter
from collections.abc import Sequence

from dflash_hf.evaluation.divergence import NEAR_TIE, WRONG
from dflash_hf.evaluation.methods import (
    DRAFT_TREES,
    LABELS,
    METHODS,
    MTP,
    PLAIN_CALL,
    TARGET_PACKED,
    WHOLE_BLOCKS,
)
from dflash_hf.evaluation.pretended import ContextPrediction, PretendReport
from dflash_hf.evaluation.report import DepthReport, EvalReport


_SIZE_BINS = ((0, "none"), (4, "1 to 4"), (8, "5 to 8"), (16, "9 to 16"))  # the largest size of each, and its name
_LARGER = "more"


def origins(lengths: Sequence[int], total: int) -> list[int]:
    """
    Where each token of an answer comes from.

    Args:
        lengths (`Sequence[int]`): Tokens committed by each verification, bonus included.
        total (`int`): Tokens of the answer, including the first, which comes from the prompt's forward.

    Returns:
        `list[int]`: 0 for the target's own tokens (the first, and each bonus); otherwise the number of the
        verification that accepted the token, counted from 1.
    """
    sources = [0]
    for number, length in enumerate(lengths, start=1):
        sources += [number] * (length - 1) + [0]
    return sources[:total]


def chosen_line(sizes: Sequence[int], speedup: float | None = None) -> str:
    """
    A line about how many tokens each verification read, drafted or copied.

    Args:
        sizes (`Sequence[int]`): `draft_sizes` of one or more outputs, one entry a verification.
        speedup (`float`, *optional*): The `estimated_speedup`.
    """
    verifications_of = Counter(_size_bin(size) for size in sizes)
    names = [*(name for _, name in _SIZE_BINS), _LARGER]
    counts = ", ".join(f"{name} in {verifications_of[name]}" for name in names if verifications_of[name])
    estimate = "" if speedup is None else f"; an estimated {speedup:.2f}x of the target alone"
    return f"drafted or copied tokens verified: {counts} of {len(sizes)} verifications{estimate}"


def _size_bin(size: int) -> str:
    for largest, name in _SIZE_BINS:
        if size <= largest:
            return name
    return _LARGER


def rate(tokens_per_second: float) -> str:
    """A speed: whole tokens, below ten with a decimal."""
    if tokens_per_second >= 9.95:
        return f"{tokens_per_second:.0f}"
    return f"{tokens_per_second:.1f}"


def headline(report: EvalReport) -> str:
    """What a user who sets nothing gains, and tau, each with its method: one line, as for a title."""
    over = "over the packed target" if report.baseline == TARGET_PACKED else "over the target alone"
    gain = report.methods[report.default_method].gain
    return f"{LABELS[report.default_method]} {gain:.2f}x {over}, tau {report.tau:.2f} in {LABELS[WHOLE_BLOCKS]}"


def summary_lines(report: EvalReport) -> list[str]:
    """A report for a terminal: the two figures of its headline, the table, and the lines below it."""
    packed = report.baseline == TARGET_PACKED  # shows the gain of packing alone
    default = report.methods[report.default_method]
    baseline = report.methods[report.baseline]
    target = f"the {LABELS[report.baseline]}"
    speeds = f"{rate(default.tokens_per_second)} against {rate(baseline.tokens_per_second)} tokens/s"
    lines = [
        f"{LABELS[report.default_method]:18}{default.gain:.2f}x the speed of {target}: {speeds}",
        f"tau               {report.tau:.2f} tokens per verification in {LABELS[WHOLE_BLOCKS]}",
        "",
        f"{'':30}{'tokens/s':>9}{'slowest-fastest':>17}{'speedup':>10}"
        + (f"{'over packed':>12}" if packed else "")
        + f"{'tokens/forward':>16}{'equal':>9}",
    ]
    for name, method in report.methods.items():
        spread = f"{rate(min(method.runs))}-{rate(max(method.runs))}"
        lines.append(
            f"{LABELS.get(name, name):30}{rate(method.tokens_per_second):>9}{spread:>17}{method.speedup:9.2f}x"
            + (f"{method.speedup_over_packed:11.2f}x" if packed else "")
            + f"{method.tokens_per_forward:16.2f}{method.equal:>5}/{report.num_prompts}"
        )
    if packed:
        lines += ["", "speedup           over the target alone; over packed: over the target alone, packed"]
    auto = report.methods.get(PLAIN_CALL)
    if auto is not None and auto.draft_sizes:
        chosen = chosen_line(auto.draft_sizes)
        lines += ["", f"{LABELS[PLAIN_CALL]:18}draft length chosen per round; {chosen}"]
    tree_methods = [method for name, method in report.drafted.items() if METHODS[name].trees]
    tree_taus = [method.tau for method in tree_methods if method.tau is not None]
    nodes = report.setting.get("tree_nodes")
    lines += [
        "",
        f"{LABELS[WHOLE_BLOCKS]:18}tau {report.tau:.2f} over {len(report.verifications)} verifications, "
        "bonus included, prompts excluded",
        *_paper_lines(report),
        *[f"{LABELS[DRAFT_TREES]:18}tau {tau:.2f} with trees of {nodes} tokens" for tau in tree_taus[:1]],
        "slot accepted, %  " + " ".join(f"{100 * share:.0f}" for share in report.acceptance_by_position),
        *depth_lines(report.tau_by_depth),
        _lossless_line(report),
        *_divergence_lines(report),
        *_distribution_lines(report),
    ]
    compiled = {name: method for name, method in report.methods.items() if method.compiled}
    if compiled:
        times = [f"{method.warmup_seconds:.0f} s {LABELS[name]}" for name, method in compiled.items()]
        lines.append(f"compiling         {', '.join(times)}, once; the next run reuses it")
    seconds = report.setting.get("mtp_loading_seconds")
    if seconds:
        loading = f"transformers loads the heads in each call, {seconds:.2g} s that its speed includes"
        lines.append(f"{LABELS[MTP]}: {loading}")
    gain = report.methods[report.fastest].gain
    if gain < 1:
        best = LABELS[report.fastest]
        lines.append(f"verdict           slower than {target}: {gain:.2f}x at best ({best})")
    return lines


def _paper_lines(report: EvalReport) -> list[str]:
    """Whole blocks by the paper's definitions, and what they leave out: the prefill."""
    figures = f"tau {report.tau_per_response:.2f}, the mean of the answers' means"
    if report.decode_gain is not None:
        over = f"over the {LABELS[report.baseline]}"
        figures += f"; {report.decode_gain:.2f}x {over} in time per token after the prefill"
    lines = [f"paper's measures  {figures}"]
    share = report.draft_share_of_prefill
    if share is not None:
        time = f"{report.methods[WHOLE_BLOCKS].prefill_seconds:.2g} s until the first token in whole blocks"
        lines.append(f"prefill           {time}, {100 * max(share, 0):.0f} % of it the drafter's")
    return lines


def depth_lines(depths: Sequence[DepthReport]) -> list[str]:
    """Tau by the length of the text, if there are texts of different lengths."""
    if len(depths) < 2:
        return []
    return [f"tau by depth      {depth_phrase(depths)} tokens of text, prompt included"]


def depth_phrase(depths: Sequence[DepthReport]) -> str:
    """Such as `2.40 below 1024, 1.51 from 1024`."""
    taus = []
    for depth in depths:
        end = f"from {depth.begin}" if depth is depths[-1] else f"below {depth.end}"
        taus.append(f"{depth.tau:.2f} {end}")
    return ", ".join(taus)


def _lossless_line(report: EvalReport) -> str:
    """How many outputs with the drafter, of all its methods, equal the target's own."""
    if report.setting.get("temperature"):
        return _sampled_line(report)
    outputs = report.num_prompts * len(report.drafted)
    equal = sum(method.equal for method in report.drafted.values())
    wrong_outputs = {
        (divergence.method, divergence.prompt)
        for divergence in report.divergences
        if divergence.method in report.drafted and divergence.verdict == WRONG
    }
    wrong = len(wrong_outputs)
    near_ties = outputs - equal - wrong
    count = f"{wrong} {WRONG}" if wrong else "no output is wrong"
    line = f"lossless          {count}: {equal} of {outputs} outputs with the drafter equal the target's own"
    return line + (f", {near_ties} differ at a near-tie" if near_ties else "")


def _sampled_line(report: EvalReport) -> str:
    """The same of samples: equal to those of the target with the same seeds, or of its distribution."""
    outputs = report.num_prompts * len(report.drafted)
    equal = sum(method.equal for method in report.drafted.values())
    count = WRONG if report.is_wrong else "no output is wrong"
    others = ""
    if equal < outputs and not report.is_wrong:
        others = f", {outputs - equal} others follow its distribution"
    temperature = f"at temperature {report.setting['temperature']:g}"
    samples = f"{equal} of {outputs} samples with the drafter, {temperature}, equal the target's own of the same seeds"
    return f"lossless          {count}: {samples}{others}"


def _distribution_lines(report: EvalReport) -> list[str]:
    """How far samples that are not the target's own, and its own, are from its distribution."""
    lines = []
    for test in report.distribution_tests:
        label = LABELS.get(test.method, test.method)
        line = f"{label}: surprise of {test.tokens} tokens, {test.z:+.1f} standard deviations from its expectation"
        if test.impossible:
            line += f"; {test.impossible} tokens that it never draws"
        lines.append(f"  {WRONG}: {line}" if test.verdict == WRONG else f"  {line}")
    return lines


def _divergence_lines(report: EvalReport) -> list[str]:
    """How outputs differ from the target's own."""
    lines = []
    for method in report.methods:
        label = LABELS.get(method, method)
        divergences = [divergence for divergence in report.divergences if divergence.method == method]
        near_ties = [divergence for divergence in divergences if divergence.verdict == NEAR_TIE]
        gaps = [divergence.gap for divergence in near_ties if divergence.gap is not None]
        if gaps:
            lines.append(f"  {len(gaps)} {label}: {NEAR_TIE}, the two logits {max(gaps):.3g} apart at most")
        for divergence in divergences:
            if divergence.verdict == WRONG:
                if divergence.gap is None:
                    apart = "where a text ends"
                else:
                    apart = f"the two logits are {divergence.gap:.3g} apart"
                lines.append(
                    f"  {WRONG}: {label}, token {divergence.position} of the answer to prompt {divergence.prompt}: "
                    f"{divergence.other} in place of {divergence.own}; {apart}"
                )
    if report.rounding is not None:
        lines.append(f"  rounding moves two logits of this target apart by up to {report.rounding.size:.3g}")
    return lines


def pretend_lines(report: PretendReport) -> list[str]:
    """What a drafter of an acceptance length would bring, for a terminal."""
    setting = report.setting
    threads = f", threads: {setting['threads']}" if setting["device"] == "cpu" else ""
    packed = "packed" if setting["packed"] else "not packed"
    layers = setting["draft_layers"]
    weights = f"{setting['draft_parameters'] / 1e6:.1f} M parameters, random weights"
    shape = f"the shape of {setting['draft']}" if setting["draft"] else "the paper's shape for this target"
    lines = [
        f"target            {setting['target']}: {setting['dtype']}, weights {packed}",
        f"drafter           {layers} layers, blocks of {setting['block_size']} tokens, {weights}: {shape}",
        f"device            {setting['device']}, {setting['hardware']}{threads}",
        f"versions          torch {setting['torch']}, transformers {setting['transformers']}",
        "acceptance        scripted: lengths are geometric, cut at the block; trees find part of the misses",
    ]
    for context in report.contexts:
        lines += ["", *_context_lines(context, report.tau, setting["max_new_tokens"])]
    return lines


def _context_lines(context: ContextPrediction, tau: float, max_new_tokens: int) -> list[str]:
    """The lines of [`pretend_lines`] about prompts of one length."""
    shortest = min(context.prompt_lengths)
    longest = max(context.prompt_lengths)
    lengths = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
    forwards = ", ".join(f"{1e3 * seconds:.1f} ({tokens})" for tokens, seconds in context.forwards.items())
    lines = [
        f"prompts of {lengths} tokens, answers of {max_new_tokens}",
        f"target forward    ms (tokens): {forwards}",
        f"drafter forward   {1e3 * context.draft_forward:.1f} ms",
        f"target round      {1e3 * context.target_round:.1f} ms a token",
        f"drafted round     {1e3 * context.block_round:.1f} ms with a whole block; "
        f"{100 * context.overhead:.0f} % of it is neither forward",
    ]
    if context.break_even > context.block_tokens:
        lines.append("break-even        none: a round takes longer than the target for all tokens of a block")
    else:
        lines.append(f"break-even        whole blocks pay above tau {context.break_even:.2f}")
    lines += ["", f"{'tau':>6}{'whole blocks':>15}{'plain call':>13}"]
    for prediction in context.predictions:
        mark = ""
        if prediction.tau == tau:
            mark = f"   <- asked; {context.reached_tau:.2f} reached"
        lines.append(f"{prediction.tau:6.2f}{prediction.whole_blocks:14.2f}x{prediction.plain_call:12.2f}x{mark}")
    return lines


def ansi_color(source: int) -> int:
    """The ANSI colour code of an origin: none for the target itself, otherwise one of two alternating greens."""
    if source == 0:
        return 0
    return 32 if source % 2 else 92


def token_texts(tokenizer, ids: Sequence[int]) -> list[str]:
    """
    The text that each token adds; together they are the answer. A character of several tokens belongs to the last of
    them.
    """
    texts = []
    first = 0  # tokens from here on are decoded together
    done = 0  # tokens before this one are in `texts`
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[first:done])
        text = tokenizer.decode(ids[first:end])
        if text.endswith("\ufffd") and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(before) :])
        first = done
        done = end
    return texts


def colored_answer(
    pieces: list[str], lengths: list[int], color: bool, marks: tuple[str, str] = ("\u27e6", "\u27e7")
) -> str:
    """
    An answer's text, with accepted draft tokens in green, alternating by verification; without colour between
    `marks`, for which see [`~dflash_hf._io.terminal.marks_around`].
    """
    opening, closing = marks
    text = ""
    previous = 0
    for piece, source in zip(pieces, origins(lengths, len(pieces)), strict=True):
        if color:
            text += f"\x1b[{ansi_color(source)}m{piece}" if source != previous else piece
        else:
            if previous and source != previous:
                text += closing
            if source and source != previous:
                text += opening
            text += piece
        previous = source
    if color:
        return text + "\x1b[0m"
    return text + closing if previous else text
