"""
`dflash publish`: upload a drafter with its model card to the Hub.

    dflash publish my-drafter me/my-drafter --base-model Qwen/Qwen3-0.6B --license mit --dry-run
    dflash publish my-drafter me/my-drafter --private
    dflash publish --code-only me/my-drafter
"""

from functools import partial

from dflash_hf._io.errors import UsageError, one_line
from dflash_hf._io.terminal import Outcome
from dflash_hf.commands.shared import options_given


RESUME_HINT = "the same command uploads the rest; files that arrived are not sent again"
_CARD_FACTS = (
    "base_model",
    "base_model_revision",
    "license",
    "license_name",
    "license_link",
    "datasets",
    "data_description",
    "hardware",
    "evaluated_on",
)


def add_arguments(parser) -> None:
    parser.add_argument("source", metavar="folder", help="local folder of a drafter; its repository for --code-only")
    parser.add_argument("repo", nargs="?", help="user/name on the Hub")
    only = "open a pull request with this version's code in a repository, which is the only other argument"
    parser.add_argument("--code-only", action="store_true", help=only)
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--revision", metavar="BRANCH", help="commit to this branch, created if there is none")
    parser.add_argument("--dry-run", action="store_true", help="list what would change, print the card, send nothing")
    parser.add_argument("--gguf", metavar="TARGET", help="add dflash-NAME.gguf for llama.cpp; TARGET: file or folder")
    parser.add_argument(
        "--replace-card", action="store_true", help="replace a README.md there that was written by hand"
    )
    facts = parser.add_argument_group(
        "model card, in addition to card_facts.json and eval_report.json in the folder; a README.md written by hand "
        "is taken as it is"
    )
    facts.add_argument("--base-model", metavar="REPO", help="repository of the target")
    facts.add_argument("--base-model-revision", metavar="REV", help="commit of the base model")
    facts.add_argument("--license", help="the Hub's identifier, such as mit; other with the next two")
    facts.add_argument("--license-name", metavar="NAME", help="name of another license, such as my-license-1.0")
    facts.add_argument("--license-link", metavar="LINK", help="its text: a URL, or LICENSE in the folder")
    facts.add_argument(
        "--dataset", action="append", dest="datasets", metavar="REPO", help="training dataset on the Hub; repeatable"
    )
    facts.add_argument("--data-description", metavar="TEXT", help="a sentence about the training data")
    facts.add_argument("--hardware", help="hardware of the evaluation")
    facts.add_argument("--evaluated-on", metavar="REPO", help="dataset of the evaluation")


def run(arguments, echo) -> Outcome:
    """`echo` what will change in the repository, then upload."""
    from pathlib import Path

    from dflash_hf.hub.card import CardFacts, has_own_card
    from dflash_hf.hub.publish import publish

    if arguments.code_only:
        return _code_only(arguments, echo)
    if arguments.repo is None:
        raise UsageError(f"{arguments.source}: name a folder and a repository, or with --code-only a repository.")
    if not Path(arguments.source).is_dir():
        raise FileNotFoundError(f"{arguments.source}: there is no such folder; publish a local folder.")
    facts = None
    given_facts = {name: getattr(arguments, name) for name in _CARD_FACTS if getattr(arguments, name)}
    if given_facts and has_own_card(arguments.source):
        raise UsageError(
            f"{Path(arguments.source, 'README.md')} was written by hand and is taken as it is: instead of "
            f"{', '.join(options_given(arguments, _CARD_FACTS))}, change its metadata, or remove it for a rendered "
            "card."
        )
    if given_facts:
        given_facts["data"] = given_facts.pop("data_description", None)
        facts = CardFacts.from_folder(arguments.source, **given_facts)
    options = {"facts": facts, "gguf_target": arguments.gguf, "replace_card": arguments.replace_card}
    options["revision"] = arguments.revision
    options["announce"] = partial(_announce, Path(arguments.source), echo)
    result = publish(arguments.source, arguments.repo, arguments.private, arguments.dry_run, **options)
    if arguments.dry_run:
        echo(f"README.md:\n\n{result.card}\nDry run: nothing was sent to {result.repo}.")
    else:
        if facts is not None:  # the card is rendered again each time
            facts.save(arguments.source)
        echo(result.url or f"{result.repo} is already up to date: no new commit.")
    outcome = {"repo": result.repo, "files": result.files, "left_out": len(result.left_out), "url": result.url}
    outcome["card"] = str(result.card)
    if result.changes is not None:
        outcome |= {name: getattr(result.changes, name) for name in ("added", "replaced", "deleted")}
    return Outcome(facts={**outcome, "findings": [vars(finding) for finding in result.findings]})


def _announce(folder, echo, result) -> None:
    """`echo` the findings, and what will happen to each file."""
    from dflash_hf._io.names import ENGINES, REPORT_FILE
    from dflash_hf.evaluation.methods import LABELS
    from dflash_hf.evaluation.report import EvalReport
    from dflash_hf.hub.engines import engine_versions
    from dflash_hf.hub.findings import render

    if result.findings:
        echo(render(result.findings))
    for version in engine_versions(ENGINES):
        if version.warning is not None:
            echo.note(f"warning: {version.warning}")
    changes = result.changes
    action_of: dict[str, str] = {}
    if changes is not None:
        action_of = dict.fromkeys(result.files, "same")
        action_of |= dict.fromkeys(changes.added, "new")
        action_of |= dict.fromkeys(changes.replaced, "replaces")
    for name, size in result.files.items():
        echo(f"{action_of.get(name, ''):9}{size:>14,}  {name}")
    for name in [] if changes is None else changes.deleted:
        echo(f"{'deletes':9}{'':14}  {name}")
    if result.left_out:
        top_level_names = sorted({name.partition("/")[0] for name in result.left_out})
        echo(one_line(f"not uploaded: {', '.join(top_level_names)} ({len(result.left_out)} files)"))
    if result.comparison_error:
        reason = f"the Hub could not be reached ({result.comparison_error})"
        echo(one_line(f"not compared with what is there, and the card is not checked: {reason}"))
    if REPORT_FILE in result.files:
        report = EvalReport.load(folder / REPORT_FILE)
        gain = report.methods[report.fastest].gain
        if gain < 1:
            baseline = f"the {LABELS[report.baseline]}"
            echo.note(f"warning: this drafter slows the target down: {gain:.2f}x of {baseline} in {REPORT_FILE}.")


def _code_only(arguments, echo) -> Outcome:
    """`--code-only`: open the pull request, and `echo` what it changes."""
    from dflash_hf.hub.code_only import publish_code

    ignored = options_given(arguments, ("private", "revision", "gguf", "replace_card", *_CARD_FACTS))
    if ignored or arguments.repo is not None:
        others = ", ".join(ignored or [arguments.repo])
        raise UsageError(f"--code-only changes only the code of a repository: leave out {others}.")
    change = publish_code(arguments.source, arguments.dry_run)
    echo(f"code beside the weights: {change.before} -> {change.after}")
    for sign, names in (("+", change.files), ("-", change.removed)):
        for name in names:
            echo(f"  {sign} {name}")
    if not change.files and not change.removed:
        echo(f"{change.repo} is already up to date: no pull request.")
    else:
        echo(change.url or f"Dry run: nothing was sent to {change.repo}.")
    return Outcome(facts=vars(change))
