"""Files that keep measured costs between runs: one JSON file a setting."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from moeserve.dispatch.costs.costs import Costs, CostSetting

log = logging.getLogger(__name__)


def costs_folder(named: str = "") -> Path:
    """`named`, else `costs` in `MOESERVE_CACHE`, else in `moeserve` of the user's cache folder."""
    if named:
        return Path(named).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("MOESERVE_CACHE") or Path(home) / "moeserve") / "costs"


def costs_path(setting: CostSetting, folder: Path) -> Path:
    """The file in `folder` that keeps the costs of `setting`."""
    key = hashlib.sha256(json.dumps(asdict(setting), sort_keys=True).encode()).hexdigest()
    members = f"{setting.lanes}-lanes-{setting.owners}-owners"
    return folder / f"{setting.device.replace(' ', '-').lower()}-{members}-{key[:16]}.json"


def stored_costs(setting: CostSetting, folder: Path) -> Costs | None:
    """What was kept for exactly this setting. A file that cannot be read is as none, and is logged."""
    path = costs_path(setting, folder)
    try:
        costs = Costs.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("costs in %s cannot be read and are measured anew: %s", path, error)
        return None
    return costs if costs.setting == setting else None


def store_costs(costs: Costs, folder: Path) -> Path:
    """Keeps them, replacing what was kept for their setting in one go. Raises OSError."""
    path = costs_path(costs.setting, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(costs.json(), file, indent=1)
    os.replace(file.name, path)
    return path
