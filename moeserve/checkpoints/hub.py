"""Finds the folder of a checkpoint that an operator names: a folder, or `org/name` in the local hub cache.

The cache's layout is that of huggingface_hub: `models--org--name` has `refs/<branch>`, files that hold a
commit, and `snapshots/<commit>`, folders of files. Nothing here needs huggingface_hub but `fetched`.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from moeserve.checkpoints.contents import missing_weights
from moeserve.checkpoints.store import CheckpointError, NotThere
from moeserve.proto.texts import clipped

SHORTEST_COMMIT = 7
"""Fewest digits by which a revision may name a commit."""

FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""Files of a repository that are downloaded: no other form of the weights, and no code."""

SECONDS = 10.0
"""How long a hub may take to answer what a repository holds."""

MOST_REF = 256
"""Bytes of a file in refs/ that are read: a commit has 40."""

_ID = re.compile(r"(?P<org>[A-Za-z0-9][\w.-]*)/(?P<name>[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_YES = ("1", "on", "yes", "true")


@dataclass(frozen=True)
class HubId:
    """A repository of a hub, and the revision of it that is wanted: a branch, a tag or a commit."""

    org: str
    name: str
    revision: str = "main"

    @classmethod
    def of(cls, named: str) -> HubId | None:
        """The repository that `org/name` or `org/name@revision` names; None for any other text."""
        found = _ID.fullmatch(named)
        if found is None:
            return None
        revision = found["revision"] or "main"
        if any(part in ("", ".", "..") for part in revision.split("/")):
            return None  # it would name a file outside of the repository's refs
        return cls(found["org"], found["name"], revision)

    @property
    def repository(self) -> str:
        """`org/name`."""
        return f"{self.org}/{self.name}"

    @property
    def folder(self) -> Path:
        """The folder of the local hub cache in which the repository is, if it is there."""
        return cache() / f"models--{self.org}--{self.name}"


def cache() -> Path:
    """Returns the folder of the local hub cache, by the variables that huggingface_hub reads."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    home = os.environ.get("HF_HOME") or str(
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    return Path(home).expanduser() / "hub"


def path_from(folder: Path, named: str) -> str:
    """Returns the path that `named` means in `folder`, `~` expanded; `org/name` stays as it is.

    A relative folder that exists comes before a repository of a hub of the same name.
    """
    path = folder / Path(named).expanduser()
    return named if HubId.of(named) and not path.exists() else str(path)


def located(named: str | Path) -> Path:
    """Returns the folder of a checkpoint: of a snapshot where `named` is a repository in the hub cache.

    A folder that exists comes first. A repository's own folder of the cache stands for its snapshot. Raises
    CheckpointError for a repository or a revision that the cache lacks, with what was looked for and where.
    """
    path = Path(named).expanduser()
    if path.exists():
        return _snapshot(path, "main", str(path)) if _is_repository(path) else path
    wanted = HubId.of(str(named))
    return path if wanted is None else _cached(wanted, str(named), _no_folder(named))


def located_in_cache(named: str) -> Path:
    """Returns the snapshot of `org/name[@revision]`, whatever the working directory has.

    Raises CheckpointError as `located` does, and for what names no repository.
    """
    wanted = HubId.of(named)
    if wanted is None:
        raise CheckpointError(f"{clipped(named)} is not org/name of a hub")
    return _cached(wanted, named)


def _cached(wanted: HubId, named: str, looked: str = "") -> Path:
    """looked: where else it was looked for, for the error's text."""
    try:
        there = wanted.folder.is_dir()
    except OSError as error:  # a name that no file may have
        raise CheckpointError(f"{clipped(named)}: {error.strerror}") from error
    if not there:
        raise NotThere(
            f"{named}: {looked}the hub cache {cache()} has no {wanted.folder.name}; {way_out(wanted)}"
        )
    return _snapshot(wanted.folder, wanted.revision, named)


def _no_folder(named: str | Path) -> str:
    return f"there is no folder {Path(named).absolute()}, and "


def pinned(named: str, *, folders: bool = True) -> str:
    """Returns what every process shall open for `named`: `org/name@commit` for a repository of a hub.

    A repository that the cache lacks, or has in part, is downloaded where that is possible. Raises
    CheckpointError as `located` does, with the reason why nothing could be downloaded. Without `folders`,
    `org/name` is no folder of the working directory, as in a configuration whose paths are resolved.
    """
    wanted = HubId.of(named)
    if wanted is None or (folders and Path(named).exists()):
        return named
    try:
        snapshot = _cached(wanted, named, _no_folder(named))
        lacking = missing_weights(snapshot)
    except CheckpointError as error:
        lacking = str(error)
    if lacking is not None:
        snapshot = fetched(wanted, lacking)
    return f"{wanted.repository}@{snapshot.name}"


def fetched(wanted: HubId, lacking: str) -> Path:
    """Downloads a repository into the hub cache, with huggingface_hub's progress bars; returns its snapshot.

    Raises CheckpointError with `lacking`, what the cache lacks, where downloads are turned off, where
    huggingface_hub is not installed, and where the hub does not answer or has no such repository.
    """
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(variable, "").lower() in _YES:
            raise CheckpointError(f"{lacking} (nothing was downloaded: {variable} is set)")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise CheckpointError(f"{lacking} (nothing was downloaded: huggingface_hub is not installed)")
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            wanted.repository,
            revision=wanted.revision,
            cache_dir=cache(),
            allow_patterns=list(FILES),
            etag_timeout=SECONDS,
        )
    except Exception as error:  # no room, or one of the HTTP library, another with each version
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:300]
        raise CheckpointError(f"{lacking} (it could not be downloaded: {reason})") from error
    return Path(folder)


def way_out(wanted: HubId) -> str:
    """Returns how an operator brings a repository into the cache."""
    revision = "" if wanted.revision == "main" else f" --revision {wanted.revision}"
    return f"fetch it with `hf download {wanted.repository}{revision}`, or give a folder"


def repository_of(path: Path) -> str | None:
    """Returns `org/name` where `path` is a repository of a hub cache or a snapshot in one, else None."""
    for folder in (path, *path.parents[:2]):
        if folder.name.startswith("models--") and folder.name.count("--") > 1:
            return "/".join(folder.name.split("--", 2)[1:])
    return None


def _commit(ref: Path) -> str:
    """The commit that a ref's file holds; empty where there is none. Raises CheckpointError."""
    try:
        if not ref.is_file():
            return ""
        with ref.open("rb") as file:
            return file.read(MOST_REF).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{clipped(str(ref))} cannot be read as a commit: {error}") from error


def _is_repository(path: Path) -> bool:
    """Whether a folder is a hub cache's repository or its `snapshots`, not the files of the model."""
    whole = path.resolve()
    repository = whole.parent if whole.name == "snapshots" else whole
    named = repository.name.startswith("models--") and repository.name.count("--") > 1
    return path.is_dir() and named and not (path / "config.json").exists()


def _snapshot(repository: Path, revision: str, named: str) -> Path:
    """Returns the snapshot of a commit, or of a branch or tag; for main the newest where there is no ref.

    `repository` may be its folder `snapshots` too.
    """
    repository = repository.resolve()
    if repository.name == "snapshots":
        repository = repository.parent
    snapshots = repository / "snapshots"
    found = sorted(path for path in snapshots.iterdir() if path.is_dir()) if snapshots.is_dir() else []
    commit = _commit(repository / "refs" / revision) or revision
    for path in found:
        if path.name == commit or (len(commit) >= SHORTEST_COMMIT and path.name.startswith(commit)):
            return path
    if found and revision == "main":
        return max(found, key=lambda path: path.stat().st_mtime_ns)
    _, org, name = repository.name.split("--", 2)
    wanted = HubId(org, name, revision)
    if not found:
        raise NotThere(f"{named}: {repository} has no folder in snapshots/; {way_out(wanted)}")
    there = ", ".join(path.name for path in found)
    raise NotThere(
        f"{named}: {repository} has no revision {revision} (neither in refs/ nor in snapshots/, which has "
        f"{there}); {way_out(wanted)}"
    )
