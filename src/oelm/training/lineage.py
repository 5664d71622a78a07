"""A model trained here as the start of another run: where it lies, and what changes with the task."""

from pathlib import Path

from oelm.data.tasks.base import TaskKind
from oelm.errors import UserError
from oelm.models.pretrained import check_checkpoint
from oelm.system.files import read_object
from oelm.system.messages import Notice, notice
from oelm.training.folder import read_config

REFERENCE = "oelm-gpt"  # model_type of the reference GPT


def model_folder(name: str) -> str:
    """`runs/x/model` for a run's folder `runs/x`; any other name as it is."""
    run = Path(name)
    if not (run / "config.toml").is_file():
        return name
    if not (run / "model" / "config.json").is_file():
        raise UserError(f"model {name!r} is a run that holds no model: let it finish, or name another")
    return str(run / "model")


def check_start(name: str) -> None:
    """Refuse a model that cannot be had or used, before any data is prepared."""
    try:
        check_checkpoint(name)
    except UserError as error:
        if Path(name).exists():
            raise
        raise UserError(
            f"{str(error).rstrip('.')}; without a network, name a folder that holds the model and its "
            "tokenizer with --model"
        ) from None


def short_model_name(name: str) -> str:
    """A model's name as part of a folder's name: a run's model goes by the run's."""
    path = Path(name)
    return path.parent.name if path.name == "model" and (path.parent / "config.toml").is_file() else path.name


def notes_on_start(name: str, kind: TaskKind, max_length: int) -> list[Notice]:
    """What a reader of a run should know about the model it starts from, where that was trained here."""
    config = Path(name) / "config.json"
    values = read_object(config) if config.is_file() else {}
    if values.get("model_type") != REFERENCE:
        return []
    notes = []
    causal = "OelmGPTForCausalLM" in (values.get("architectures") or [])
    if causal and not kind.stream:
        notes.append(notice("training.was_causal", model=name))
    run = Path(name).parent
    if values.get("positions", "learned") == "learned" and (run / "config.toml").is_file():
        seen = read_config(run).task.max_length
        if seen < max_length:
            notes.append(notice("training.new_positions", model=name, trained=seen, max_length=max_length))
    return notes
