"""Tells what a folder holds that is no checkpoint of safetensors: adapters, other forms, LFS pointers."""

from __future__ import annotations

from pathlib import Path

from moeserve.checkpoints.store import INDEX, CheckpointError, read_json

ADAPTER = "adapter_config.json"
OTHER_FORMS = {
    "*.gguf": "GGUF files of llama.cpp, which are not read: give the safetensors checkpoint they are made of",
    "*.bin": "pickled weights, which are not read, as a pickle can run code: convert them once with "
    "transformers, AutoModelForCausalLM.from_pretrained({folder!r}).save_pretrained(NEW_FOLDER)",
    "*.pt": "pickled weights, which are not read, as a pickle can run code: convert them to safetensors",
    "*.pth": "pickled weights, which are not read, as a pickle can run code: convert them to safetensors",
}
"""Forms of weights that are not read, by the names of their files: what they are, and the way out."""

NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin")


def check_contents(folder: Path) -> None:
    """Compares the names of a folder's files with those of a checkpoint.

    Raises CheckpointError for a file in place of the folder, an adapter beside or in place of a model, and
    weights in another form than safetensors.
    """
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file: give the folder that has config.json and safetensors")
    if (folder / ADAPTER).is_file():
        raise CheckpointError(_adapter(folder))
    if (folder / INDEX).is_file() or any(folder.glob("*.safetensors")):
        return
    for pattern, text in OTHER_FORMS.items():
        files = sorted(file.name for file in folder.glob(pattern) if file.name not in NOT_WEIGHTS)
        if files:
            more = f" and {len(files) - 1} more" if len(files) > 1 else ""
            raise CheckpointError(
                f"{folder} has no *.safetensors file; {files[0]}{more} are {text.format(folder=str(folder))}"
            )


def missing_weights(folder: Path) -> str | None:
    """Returns what a folder lacks of its weights, None: nothing; a download cut short leaves such."""
    if (folder / INDEX).is_file():
        named = read_json(folder / INDEX).get("weight_map")
        files = sorted(set(named.values())) if isinstance(named, dict) else []
        lost = [file for file in files if not (folder / file).is_file()]
        return f"{folder} lacks {len(lost)} of {len(files)} shards, as {lost[0]}" if lost else None
    files = [file for form in ("*.safetensors", *OTHER_FORMS) for file in folder.glob(form)]
    return None if any(file.is_file() for file in files) else f"{folder} has no weights"


def _adapter(folder: Path) -> str:
    base = read_json(folder / ADAPTER).get("base_model_name_or_path")
    of = f" {base}" if base else ""
    told = f"{folder / ADAPTER} is a LoRA adapter, which is not served: merge it into its model{of} first"
    weights = [file for file in folder.glob("*.safetensors") if not file.name.startswith("adapter_")]
    if not weights or not (folder / "config.json").is_file():
        return told
    files = " and ".join(sorted(file.name for file in folder.glob("adapter_*")))
    return f"{told}, or move {files} away to serve the model beside it alone"
