"""A model's folder: weights, tokenizer and model card, written completely or not at all."""

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from oelm.convert import convert
from oelm.data.tokenizer import load_tokenizer
from oelm.errors import UserError
from oelm.method import Method
from oelm.models.conversion_report import ConversionReport
from oelm.models.gpt_config import OelmGPTConfig
from oelm.models.pretrained import check_checkpoint, load_as_saved
from oelm.system.files import delete, folder_beside, sync_files, sync_folder


def write_model(
    folder: Path, model: PreTrainedModel, tokenizer: Any, card: str, weights: dict[str, Tensor] | None = None
) -> None:
    """Write an ordinary checkpoint; an existing one is replaced in one step."""
    disable_progress_bar()  # transformers' own
    with folder_beside(folder) as beside:
        model.save_pretrained(beside, state_dict=weights)
        tokenizer.save_pretrained(beside)
        (beside / "README.md").write_text(card, encoding="utf-8")
        sync_files(beside)
        delete(folder)
        beside.rename(folder)
    sync_folder(folder.parent)


def check_new_folder(folder: Path) -> None:
    """Refuse a folder that is not empty, before any work is done."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} is not empty: name a new folder, or remove it")


def model_card(
    title: str, model: PreTrainedModel, report: ConversionReport, base_model: str, body: list[str]
) -> str:
    """The model card: how the model was made, `body`, and how to load it."""
    rows = "\n".join(
        f"| {row.role} | {row.parameters:,} | {row.start} | {row.gain} | {row.frozen} |"
        for row in report.rows
    )
    made = [
        f"Made with OELM Transformers from `{short_name(base_model)}` by method `{report.method}` "
        f"(seed {report.seed}): {report.frozen:,} of {report.total:,} parameters "
        f"({100 * report.frozen_share:.1f} %) are frozen.",
        f"| part | parameters | starts as | gain | frozen |\n|---|---|---|---|---|\n{rows}",
    ]
    head = "---\nlibrary_name: transformers\ntags:\n- oelm\n---"
    return "\n\n".join([head, f"# {title}", *made, *body, _loading(model)]) + "\n"


def short_name(model: str) -> str:
    """A hub id as it is, of a folder the name without its path, which means nothing to others."""
    return Path(model).resolve().name if Path(model).exists() else model


def _loading(model: PreTrainedModel) -> str:
    name = type(model).__name__
    if model.config.model_type == OelmGPTConfig.model_type:
        code = f"import oelm\n\nmodel = oelm.{name}.from_pretrained(path)  # frozen as it was"
        return f"## Load it\n\nThe reference GPT needs this package.\n\n```python\n{code}\n```"
    return (
        "## Load it\n\nAn ordinary checkpoint of its family. Plain transformers loads it with everything "
        "trainable; OELM Transformers\nrestores the frozen state and checks the frozen weights, bit for "
        "bit.\n\n"
        f"```python\nfrom transformers import {name}\n\nmodel = {name}.from_pretrained(path)\n\n"
        "import oelm\n\nmodel = oelm.load(path)  # or oelm.refreeze(model) after the plain load\n```"
    )


UNTRAINED = "It was converted and not trained since: fine-tune it before use."


def convert_checkpoint(
    model: str, method: Method, out: Path, seed: int, tokenizer: str | None
) -> ConversionReport:
    """Convert a checkpoint (a folder or a hub id) and save it in a new folder. `tokenizer`: where it is, if
    not with the model."""
    check_new_folder(out)
    check_checkpoint(model)
    loaded_tokenizer = load_tokenizer(tokenizer or model)
    loaded = load_as_saved(model)
    rows = int(loaded.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    if len(loaded_tokenizer) > rows:
        raise UserError(
            f"the tokenizer of {tokenizer or model} has {len(loaded_tokenizer):,} tokens, but the model "
            f"knows {rows:,}; name its own with --tokenizer"
        )
    report = convert(loaded, method, seed=seed)
    title = f"{short_name(model)}, converted by `{report.method}`"
    card = model_card(title, loaded, report, model, [UNTRAINED])
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_model(out, loaded, loaded_tokenizer, card)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}; name another folder") from None
    return report
