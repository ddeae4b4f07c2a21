"""
`push_to_hub` of a run: its checkpoints and the trained drafter are published as by `dflash publish`, with their card.

The life of a publication, all of it in the first process:

1. At construction of the trainer, [`DrafterPublisher.open`] rehearses: the drafter is saved as it is before training,
   checked, and compared with the repository. What would be refused after hours is refused now.
2. At each save, [`DrafterPublisher.start`] checks the checkpoint's files and renders the card in the thread that
   trains, because loading weights changes settings of the process. Then another thread compares and uploads. It reads
   hard links in `output_dir/.hub`: the checkpoint itself may be removed meanwhile (`save_total_limit`).
3. At the end, [`DrafterPublisher.publish`] does the same in one go.

Every publication compares all files with the repository, so that the next one brings whatever an interrupted one did
not, and sends nothing twice.
"""

import functools
import os
import shutil
from concurrent.futures import Future
from pathlib import Path

from huggingface_hub import HfApi
from transformers.utils import logging

from dflash_hf._io.errors import one_line
from dflash_hf._io.files import write_json
from dflash_hf._io.names import FACTS_FILE
from dflash_hf._io.progress import without_bars
from dflash_hf._io.repositories import REPOSITORY_ID, is_repository_id
from dflash_hf.hub.card import has_own_card
from dflash_hf.hub.commits import HubError, PublishError, explain_hub_errors, upload
from dflash_hf.hub.publish import Publication, compare, prepare
from dflash_hf.training.adapters import is_adapted, merged
from dflash_hf.training.trainer_card import with_origin


logger = logging.get_logger(__name__)

STAGING = ".hub"  # in `output_dir`; not a name that a user would choose, since it is removed
# Files of a checkpoint from which a run resumes. They are not linked: none of them is published.
_TRAINING_STATE = ("optimizer*", "scheduler*", "rng_state*", "trainer_state.json", "training_args.bin", "global_step*")
# Files of a drafter that a user puts into `output_dir`, besides a card of their own.
_FILES_OF_USER = "LICENSE*"


class DrafterPublisher:
    """
    Publishes the drafter of a run.

    Args:
        args (`DFlashTrainingArguments`): Their `hub_model_id`, `hub_private_repo` and `hub_token` say where.
        token (`str`, *optional*): Another token.
        private (`bool`, *optional*): Another value of `hub_private_repo`.
    """

    def __init__(self, args, token: str | None = None, private: bool | None = None):
        self.args = args
        self.folder = Path(args.output_dir)
        self.private = bool(args.hub_private_repo if private is None else private)
        self.api = HfApi(token=args.hub_token if token is None else token)

    @functools.cached_property
    def repo(self) -> str:
        """The repository, `"user/name"`; a `hub_model_id` without a user is completed by that of the token."""
        name = self.args.hub_model_id or self.folder.absolute().name
        if not is_repository_id(name):
            raise PublishError(f"hub_model_id={name!r} is not {REPOSITORY_ID}.")
        if "/" in name:
            return name
        with explain_hub_errors(name, "Or name the user, too: hub_model_id=user/name."):
            return f"{self.api.whoami()['name']}/{name}"

    def open(self, model, target) -> None:
        """
        Rehearse the publication, and create the repository if there is none.

        Args:
            model (`DFlashDraftModel` or `PeftModel`): The drafter before training.
            target (`PreTrainedModel`): Its target, which the card names.

        Raises:
            `PublishError`: the drafter could not be published, or the Hub cannot be reached.
        """
        shutil.rmtree(self.folder / STAGING, ignore_errors=True)  # of an interrupted run
        rehearsal = self.folder / STAGING / "before-training"
        facts = with_origin({}, target, self.args.hub_card)
        if not facts.get("base_model") and not has_own_card(self.folder):
            raise PublishError(
                "push_to_hub publishes a card, which names the target, and this one was loaded from a folder: set "
                "hub_card={base_model: user/name}."
            )
        self._check_card(self.args.hub_card)
        draft = merged(model) if is_adapted(model) else model
        try:
            with without_bars():
                draft.save_pretrained(rehearsal)
            write_json(rehearsal / FACTS_FILE, facts)
            self._add_files_of_user(rehearsal)
            compare(self.api, prepare(rehearsal, self.repo), self.private, revision=self.args.hub_revision)
        finally:
            shutil.rmtree(self.folder / STAGING, ignore_errors=True)
        with explain_hub_errors(self.repo, "Nothing was trained."):
            self.api.create_repo(self.repo, private=self.private or None, exist_ok=True)

    def start(self, checkpoint: Path, message: str) -> Future | None:
        """
        Begin to publish a checkpoint in the background. What fails is logged in one line, and training goes on.

        Args:
            checkpoint (`Path`): Its folder, or one in `output_dir/.hub`; it may be removed at once.
            message (`str`): That of the commit.

        Returns:
            The publication, or `None` if it failed; or just `None` if the checkpoint cannot be published.
        """
        staged = self.folder / STAGING / checkpoint.name
        try:
            if staged != checkpoint:
                shutil.rmtree(staged, ignore_errors=True)
                shutil.copytree(
                    checkpoint, staged, copy_function=_link, ignore=shutil.ignore_patterns(*_TRAINING_STATE)
                )
            self._add_files_of_user(staged)
            publication = prepare(staged, self.repo)
        except (PublishError, OSError) as error:
            self._log_failure(checkpoint.name, error)
            shutil.rmtree(staged, ignore_errors=True)
            return None
        return self.api.run_as_future(self._finish, publication, staged, message)

    def _finish(self, publication: Publication, staged: Path, message: str) -> Publication | None:
        """Compare and upload, in the background."""
        try:
            self._send(publication, message, self.args.hub_revision)
        except Exception as error:  # nobody else reports the errors of this thread
            self._log_failure(staged.name, error)
            return None
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        logger.info(f"{staged.name} was published: {publication.url}")
        return publication

    def _log_failure(self, name: str, error: Exception) -> None:
        """One line about a checkpoint that was not published."""
        reason = one_line(getattr(error, "reason", error))
        logger.warning(
            f"{name} was not published in {self.repo}: {reason}. Training goes on; the next save, or the end of "
            "training, publishes everything that is missing."
        )

    def publish(self, message: str, card_facts: dict, revision: str | None = None) -> Publication:
        """
        Publish the drafter in `output_dir`.

        Args:
            message (`str`): That of the commit.
            card_facts (`dict`): The facts that the user has given; the card has them if it is not the user's own.
            revision (`str`, *optional*): The branch. Default: `hub_revision`.

        Raises:
            `PublishError`: nothing was committed; the drafter is complete in its folder.
        """
        revision = revision or self.args.hub_revision
        try:
            self._check_card(card_facts)
            publication = prepare(self.folder, self.repo)
            self._send(publication, message, revision)
        except HubError as error:
            branch = f" --revision {revision}" if revision else ""
            raise PublishError(
                f"{self.repo} was not published: {one_line(error.reason, 120).rstrip('.')}. The drafter is complete: "
                f"`dflash publish {self.folder} {self.repo}{branch}` uploads what is missing."
            ) from error
        return publication

    def _send(self, publication: Publication, message: str, revision: str | None) -> None:
        """Compare and upload."""
        changes = compare(self.api, publication, self.private, revision=revision)
        publication.url = upload(self.api, self.repo, changes, self.private, message)

    def _check_card(self, card_facts: dict) -> None:
        """
        Raises:
            `PublishError`: facts of a card that the user has written, which is taken as it is.
        """
        if card_facts and has_own_card(self.folder):
            raise PublishError(
                f"{self.folder / 'README.md'} was written by hand and is taken as it is: instead of "
                f"{', '.join(card_facts)}, change its metadata, or remove it for a rendered card."
            )

    def _add_files_of_user(self, staged: Path) -> None:
        """Link what a user has put into `output_dir` to be published with the drafter."""
        files = list(self.folder.glob(_FILES_OF_USER))
        if has_own_card(self.folder):
            files.append(self.folder / "README.md")
        for file in files:
            _link(file, staged / file.name)


def _link(source: str | Path, destination: str | Path) -> None:
    """A hard link to a file, which stays when the file is removed or replaced; a copy where there are no links."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy2(source, destination)
