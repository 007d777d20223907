"""The model card of a drafter folder: card.md.jinja, with what the hub reads at its top."""

import re
from pathlib import Path
from typing import Any

import yaml

from draftsmith import __version__, printed
from draftsmith.decode.prompts.sources import PRESETS, READ
from draftsmith.decode.report import figures
from draftsmith.decode.report.schema import Report
from draftsmith.models.disk.read_lm import read_json
from draftsmith.models.folder.drafter_folder import DrafterFolder
from draftsmith.models.servers.export import about, serve_line

# The card's last line, for as long as nobody edits it.
MARK = "<!-- written by draftsmith push, which keeps a card without this line as it is -->"


def model_card(
    drafter: DrafterFolder, report: Report | None, *, repo: str, target: str, licence: str
) -> str:
    """The text of its README.md. report: of this very drafter; repo: where it will be, "" if that
    isn't known; target: its name, of the hub or a folder; licence: as the hub spells it, or "".
    """
    folder = drafter.path.absolute()
    ran, made = folder.parent / "recipe.yaml", drafter.meta["provenance"]
    recipe = ran.read_text("utf-8") if ran.is_file() else ""
    said: dict[str, Any] = dict(word.split("=", 1) for word in made.get("argv", ()) if "=" in word)
    said |= yaml.safe_load(recipe) or {}
    name = repo.rpartition("/")[2] or folder.name
    data = trained_on(str(said.get("data") or ""))
    # A head is nothing without its target; a draft LM descends from what it was begun from.
    begun = said.get("draft") if drafter.kind == "lm" else target
    shown: dict[str, Any] = {"drafter": drafter, "report": report, "repo": repo, "name": name}
    shown |= {"target": target, "licence": licence, "made": made, "recipe": recipe, "mark": MARK}
    shown |= {"of_hub": of_hub, "figures": figures, "printed": printed, "version": __version__}
    return figures.TEMPLATES.get_template("card.md.jinja").render(
        shown,
        base=of_hub(begun.get("path") if isinstance(begun, dict) else begun),
        data=data,
        hub_data=list(filter(None, map(of_hub, data))),
        title=about(drafter.kind).title,
        serve=serve_line(drafter.path, target, named=name if repo else ""),
    )


def trained_on(data: str) -> list[str]:
    """The data of a run; of answers that `prepare` made also the prompts."""
    answers = Path(data or "none", "prepare.json")
    if not answers.is_file():
        return [data] if data else []
    return [data, str(yaml.safe_load(read_json(answers)["about"]["recipe"])["prompts"])]


def of_hub(name: str | None) -> str:
    """A name of the hub without configuration and split; nothing for a path of this machine."""
    name = name or ""
    name = re.split("[:@]", PRESETS.get(name.partition("@")[0], name))[0]
    likely = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.endswith(READ)
    return name if likely and not Path(name).parent.exists() else ""
