"""`dflash publish`."""

from dflash_hf.commands.shared import add_examples
from dflash_hf.names import RELATIONS
from dflash_hf.terminal import Outcome, output_folder


AGAIN = "the same command sends what is missing; what arrived is not sent twice"
_FACTS = ("base_model", "base_model_revision", "base_model_relation", "license", "datasets", "data", "hardware")


def add_arguments(parser) -> None:
    parser.add_argument("folder", help="local folder of a drafter")
    parser.add_argument("repo", help="user/name on the Hub")
    parser.add_argument("--private", action="store_true", help="make the repository a private one")
    parser.add_argument("--dry-run", action="store_true", help="list the files and validate the card; upload nothing")
    parser.add_argument("--write-to", type=output_folder, help="also write every file into this folder, as on the Hub")
    parser.add_argument(
        "--gguf", metavar="TARGET", help="also make dflash-NAME.gguf for llama.cpp; .gguf file or folder of the target"
    )
    facts = parser.add_argument_group("facts of the card, besides card_facts.json and eval_report.json of the folder")
    facts.add_argument("--base-model", help="repository of the target")
    facts.add_argument("--base-model-revision", help="its commit")
    facts.add_argument("--base-model-relation", choices=RELATIONS, help="only where one fits")
    facts.add_argument("--license", help="the Hub's short name, such as mit")
    facts.add_argument("--dataset", action="append", dest="datasets", help="repository of training data; repeatable")
    facts.add_argument("--data", help="a sentence about the data")
    facts.add_argument("--hardware", help="what the evaluation ran on")
    facts.add_argument("--evaluated-on", help="dataset of the evaluation")
    add_examples(
        parser,
        "dflash publish my-drafter me/my-drafter --base-model Qwen/Qwen3-0.6B --license mit --dry-run",
        "dflash publish my-drafter me/my-drafter --private",
        after=AGAIN,
    )


def run(arguments, echo) -> Outcome:
    """`echo` what was or would be uploaded."""
    from pathlib import Path

    from dflash_hf.hub.card import CardFacts
    from dflash_hf.hub.check import render
    from dflash_hf.hub.publish import left_out_line, publish

    if not Path(arguments.folder).is_dir():
        raise FileNotFoundError(f"{arguments.folder}: there is no such folder; publish what lies on this machine.")
    given = {name: getattr(arguments, name) for name in (*_FACTS, "evaluated_on") if getattr(arguments, name)}
    facts = CardFacts.from_folder(arguments.folder, **given) if given else None
    options = {"facts": facts, "write_to": arguments.write_to, "gguf_target": arguments.gguf}
    result = publish(arguments.folder, arguments.repo, arguments.private, arguments.dry_run, **options)
    if result.findings:
        echo(render(result.findings))
    for name, size in result.files.items():
        echo(f"{size:>14,}  {name}")
    if result.left_out:
        echo(left_out_line(result.left_out))
    if arguments.dry_run:
        echo(f"The card's metadata is valid:\n{result.card.data.to_yaml()}")
        echo(f"Dry run: nothing was sent to {result.repo}.")
    else:
        echo(result.url or f"{result.repo} already holds all of this: no new commit.")
    known = {"repo": result.repo, "files": result.files, "left_out": len(result.left_out), "url": result.url}
    return Outcome(facts={**known, "findings": [vars(finding) for finding in result.findings]})
