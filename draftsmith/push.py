"""`draftsmith push drafter=FOLDER repo=USER/NAME report=runs/e/report.json`

Writes a model card, README.md, into a drafter folder, and uploads to the Hugging Face hub what
belongs to a drafter, in one commit: card, weights, config, tokenizer. card_only=true writes the
card and asks no network. A card whose last line was taken out is yours, and kept. The token is that
of `hf auth login`, or HF_TOKEN; HF_ENDPOINT names another hub.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HTTPError

from draftsmith.command import parse
from draftsmith.decode.report.card import MARK, model_card
from draftsmith.decode.report.schema import Report, as_report, schema_problems
from draftsmith.models import scorers, vocab
from draftsmith.models.disk.read_lm import read_json
from draftsmith.models.disk.store import write_atomically
from draftsmith.models.fingerprint import differences
from draftsmith.models.folder.drafter_folder import META, DrafterFolder, open_drafter
from draftsmith.models.tokenizer import TOKENIZER_FILES

CARD = "README.md"
MAY_GO = [vocab.FILE, f"{scorers.FOLDER}/*"]  # an older one would change how it drafts
FILES = [CARD, "LICENSE*", META, "config.json", "generation_config.json", "model.safetensors"]
FILES += [*MAY_GO, "*.jinja", "merges.txt", *(f"{name}*" for name in TOKENIZER_FILES)]


@dataclass(frozen=True)
class Push:
    """What goes where, and what its card says."""

    drafter: str  # its folder, as training wrote it
    repo: str = ""  # user/name of the hub; only the card can do without
    report: str = ""  # the report.json of its evaluation; without one the card says so
    target: str = ""  # its target's name on the hub; empty: as it was trained on
    license: str = ""  # as the hub spells it, such as apache-2.0
    private: bool = False  # that nobody else sees it
    card_only: bool = False  # upload nothing


def main(argv: list[str]) -> None:
    """Write the card; upload; print the address."""
    settings = parse(Push, argv)
    folder, repo = Path(settings.drafter), settings.repo
    if not (folder / META).is_file():
        raise ValueError(
            f"drafter: got {folder}, which has no {META}; expected a drafter folder as training "
            "writes it; other folders, as of export, are uploaded by hf upload"
        )
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo) and (repo or not settings.card_only):
        raise ValueError(f"repo: got {repo!r}, expected user/name or organisation/name of the hub")
    drafter, card = open_drafter(folder, None), folder / CARD
    report = read_report(settings.report, drafter) if settings.report else None
    target = settings.target or drafter.meta["target"].get("name") or "TARGET"
    text = model_card(drafter, report, repo=repo, target=target, licence=settings.license)
    kept = card.is_file() and MARK not in card.read_text("utf-8")
    if not kept:
        write_atomically(card, f"{text}\n".encode())
    print(f"kept: {card}, which was edited" if kept else f"written: {card}")
    if not settings.card_only:
        print(f"uploaded: {upload(settings, drafter)}")


def read_report(path: str, drafter: DrafterFolder) -> Report:
    """The report of this very drafter; ValueError for anything else."""
    values = read_json(Path(path))
    if problems := schema_problems(values):
        raise ValueError(
            f"report: got {path} ({problems[0]}), expected an evaluation's report.json"
        )
    report = as_report(values)
    differ = differences(drafter.meta["target"], report.target_mark or {})
    if report.drafter.mark != scorers.weights_mark(drafter.path) or report.target_mark is None:
        differ.append(f"its drafter is {report.drafter.path or report.drafter.kind}")
    if differ:
        raise ValueError(
            f"report: got {path}, which isn't of {drafter.path} as it is, on the target that it "
            f"was made for ({'; '.join(differ)}); expected its own: run draftsmith evaluate"
        )
    return report


def upload(settings: Push, drafter: DrafterFolder) -> str:
    """Put the folder's own files into the repository, in one commit; its address. ValueError where
    the hub refuses, or would show to all what is to be private.
    """
    folder, repo, hub = drafter.path, settings.repo, HfApi()
    tree = drafter.meta["defaults"]["tree"] or CARD
    patterns = [*FILES, CARD if Path(tree).is_absolute() else tree]
    ours = {path.relative_to(folder).as_posix() for one in patterns for path in folder.glob(one)}
    expected = "expected a token that may write there (hf auth login, or HF_TOKEN), and the hub "
    expected += "within reach (HF_HUB_OFFLINE not set); the card is written"
    if not get_token():
        raise ValueError(f"repo: got {repo} without a token; {expected}")
    try:
        url = hub.create_repo(repo, private=settings.private or None, exist_ok=True)
        if settings.private and not hub.model_info(repo).private:
            raise ValueError(f"private: got true, but {repo} is public; expected another name")
        hub.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=sorted(ours),
            delete_patterns=MAY_GO,
            commit_message=f"A drafter of kind {drafter.kind}",
        )
    except (OSError, HTTPError, RuntimeError) as error:
        says = str(error if isinstance(error, OSError) else error.__cause__ or error)
        raise ValueError(f"repo: got {repo}, which the hub refused ({says}); {expected}") from error
    return str(url)
